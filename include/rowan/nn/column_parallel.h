// Linear layers with adapters whose output neurons are split over ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "rowan/comm/communicator.h"
#include "rowan/nn/lora_linear.h"

namespace rowan {

/// A LoraLinear of which this rank holds an even part of the output neurons of each of its parts: rows of W, bias and
/// B, and all of A (column parallel, arXiv 1909.08053).
///
///     forward     y_p = x W_p^T + bias_p + scale (x A^T) B_p^T                   no communication
///     backward    dx = sum over ranks of [ dy_p | dS_p ] [ W_p ; A ],  dS_p = scale dy_p B_p     one all-reduce
///                 dB_p is whole; dA_p = dS_p^T x is this rank's share
///
/// A's gradients are summed once a step, by sum_partial_gradients, not once a backward; with equal values at the start
/// A then has the same bits on all ranks for ever. All ranks make the same calls on equal x. The communicator outlives
/// it.
class ColumnParallelLoraLinear {
 public:
  /// `parts` with the out features of the whole. Throws as LoraLinear, InvalidArgument for a part with fewer out
  /// features than ranks, and Unsupported for dropout of outputs, whose mask would have to be split.
  ColumnParallelLoraLinear(std::int64_t in_features, const std::vector<LinearPart>& parts, DType dtype,
                           bool train_weight, Communicator& communicator, StreamRef stream);

  /// This rank's layer: its out features, weights and spare columns.
  const LoraLinear& local() const noexcept { return local_; }

  /// As LoraLinear's, with this rank's columns in y and dy, and the whole dx.
  void forward(const Tensor& x, Tensor& y, LoraLinearContext& context, StreamRef stream,
               const std::optional<DropoutKey>& dropout = {}) const {
    local_.forward(x, y, context, stream, dropout);
  }
  void backward(const Tensor& dy, const LoraLinearContext& context, Tensor* dx, StreamRef stream,
                double dx_beta = 0) const;

  /// As LoraLinear's; those that are split say so (Parameter::shard), as the optimizer needs it.
  std::vector<Parameter> parameters() const;
  /// As LoraLinear's; from equal generators A is equal on all ranks.
  void init_adapter(Rng& rng, StreamRef stream) const { local_.init_adapter(rng, stream); }

 private:
  Communicator* communicator_;
  std::vector<Parameter::Shard> shards_;  // by part
  LoraLinear local_;
};

/// The gradient of every LoRA A among `parameters` = its sum over the ranks: one all-reduce for all. Before the
/// optimizer's step, after the last backward.
void sum_partial_gradients(std::span<const Parameter> parameters, Communicator& communicator, StreamRef stream);

}  // namespace rowan
