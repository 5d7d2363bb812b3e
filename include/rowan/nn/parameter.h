// What a model hands to the optimizer, the checkpoint and the communicator.
#pragma once

#include <cstdint>
#include <string>

#include "rowan/core/tensor.h"
#include "rowan/ops/matrix_layout.h"

namespace rowan {

/// One trainable or frozen tensor of a model under its Hugging Face name. Copies share memory.
///
/// Matrices may be views into a larger buffer (the bordered weight of LoraLinear): rows have unit stride inside and any
/// stride between them, in value, master and grad independently. Refreshing value from master after a step belongs to
/// the optimizer.
struct Parameter {
  /// What the tensor is; optimizer groups choose their algorithm by it.
  enum class Role { kMatrix, kLoraA, kLoraB, kEmbedding, kNorm, kBias, kHead };

  /// Where the rows of value lie in a weight that is split over ranks by output neurons.
  struct Shard {
    std::int64_t global_rows = 0;  ///< output neurons of the whole weight; 0: not split
    std::int64_t first_row = 0;    ///< index of this rank's first output neuron
  };

  std::string name;  ///< for example "model.layers.0.self_attn.q_proj.lora_A.weight"
  Tensor value;      ///< what forward and backward read, in the compute dtype
  /// What the optimizer steps: float32 (float64 when value is float64). The same memory as value when value has that
  /// dtype; undefined when frozen.
  Tensor master;
  Tensor grad;  ///< accumulated by backward, of master's dtype and value's shape; undefined when frozen
  /// False: backward did not reach this parameter in the step at hand; the optimizer leaves it and its state alone and
  /// does not read grad.
  bool has_grad = true;
  bool trainable = false;
  MatrixLayout layout = MatrixLayout::kOutIn;
  Shard shard;
  Role role = Role::kMatrix;

  /// master is memory of its own, of which value is a rounded copy.
  bool has_own_master() const noexcept { return master.defined() && !master.shares_storage(value); }
};

}  // namespace rowan
