// How much device memory a training run takes, before it is begun.
#pragma once

#include <algorithm>
#include <cstdint>

#include "rowan/core/device.h"
#include "rowan/nn/llama.h"
#include "rowan/optim/optimizer.h"

namespace rowan {

/// Bytes by what holds them, and counts of parameters.
struct MemoryEstimate {
  std::int64_t parameters = 0;            ///< all, LoRA factors included
  std::int64_t trainable_parameters = 0;  ///< those that an optimizer steps
  std::int64_t weights = 0;               ///< in the compute dtype, borders and tables included
  std::int64_t gradients = 0;             ///< and float32 masters
  std::int64_t optimizer = 0;             ///< moments, and what updates are made in
  std::int64_t activations = 0;           ///< at most, in a forward and backward pass
  std::int64_t update = 0;                ///< at most, in an optimizer step, beside what stays
  std::int64_t total() const noexcept { return weights + gradients + optimizer + std::max(activations, update); }
};

/// What a model of this configuration takes at its peak, trained by make_optimizer(optimizer, …) on micro-batches of at
/// most `tokens` tokens: the sum of the tensors that are alive at once, without allocating one. Evaluation on batches
/// of no more tokens takes less. What libraries hold beside (a CUDA context, cuBLAS) is not in it. Throws
/// InvalidArgument for tokens < 1 and as LlamaOptions::lora does.
MemoryEstimate estimate_memory(const ModelConfig& config, const LlamaOptions& options,
                               const OptimizerOptions& optimizer, std::int64_t tokens, Device device);

}  // namespace rowan
