// What the demo trains: its model, its adapter, its texts and its optimizers. The study of default learning rates
// (rowan-bench study) trains the same.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "grammar.h"
#include "rowan/io/model_config.h"
#include "rowan/io/peft_adapter.h"
#include "rowan/io/token_rows.h"
#include "rowan/nn/llama.h"
#include "rowan/optim/optimizer.h"
#include "rowan/train/trainer.h"

namespace rowan::app {

inline constexpr std::int64_t kDemoSequenceLength = 128;
inline constexpr std::int64_t kDemoBatchSize = 16;
inline constexpr std::int64_t kDemoTokensPerStep = kDemoSequenceLength * kDemoBatchSize;

/// A byte-level Llama of about one million parameters.
ModelConfig demo_model_config();

/// LoRA r = 8, alpha = 16 on every linear.
AdapterConfig demo_adapter_config(const std::string& base);

/// `algorithm` for matrices and factors, AdamW for the rest, gradients clipped to norm 1. Newton-Schulz of matrices in
/// float32: they are small, it costs nothing here, and it keeps CPU and CUDA together for longer.
OptimizerOptions demo_optimizer(Algorithm algorithm);

/// Five steps of warm-up, then linear to zero.
TrainerOptions demo_schedule(double learning_rate, std::int64_t steps);

/// A text of its own for every purpose, all of one seed.
struct DemoCorpora {
  DemoCorpora(const TemplateGrammar& grammar, std::uint64_t seed, std::int64_t steps);

  std::vector<HostBatch> training;
  std::string held_out_text;
  std::vector<TokenRow> held_out_rows;
  std::vector<HostBatch> held_out;
  double entropy;  ///< of the grammar, nats a byte
};

}  // namespace rowan::app
