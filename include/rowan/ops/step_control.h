// What every kernel of an optimizer step reads on the device: whether the step is skipped, what gradients are
// multiplied with, and the values that change from step to step. Nothing here makes the host wait, so a step can be
// recorded once and replayed.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "rowan/core/tensor.h"

namespace rowan {

/// A step control is a contiguous float64 tensor of shape [4] on the device of the step; these are its elements.
struct StepControl {
  static constexpr int kSquareSum = 0;  ///< sum of squares of all gradients; not finite when any gradient is not
  static constexpr int kFactor = 1;     ///< what gradients are multiplied with (clipping by the global norm)
  static constexpr int kSkip = 2;       ///< not 0: every kernel that writes parameters or state returns without writing
  static constexpr int kSkipCount = 3;  ///< steps skipped so far
};

/// {0, 1, 0, 0}: nothing clipped, nothing skipped.
Tensor make_step_control(StreamRef stream);

/// A list of gradients whose sum of squares is taken again and again; on CUDA one launch for all of them. It keeps the
/// tensors alive and owns the table of their addresses and the partial sums, so that run() allocates nothing.
class GradSquareSum {
 public:
  GradSquareSum() = default;
  /// Gradients: float32 (float64 on the CPU too), all of one dtype; rank 2 with any row stride, or contiguous of any
  /// rank; empty and undefined ones count as 0. `active`: undefined, or int32 [gradients.size()] that run() reads on
  /// the device: 0 leaves that gradient out. Throws InvalidArgument for other dtypes, strides, devices or sizes.
  GradSquareSum(std::span<const Tensor> gradients, const Tensor& active, StreamRef stream);

  /// control[kSquareSum] = (accumulate ? control[kSquareSum] : 0) + sum of the squares of all elements, in float64, in
  /// an order that depends on the shapes alone (fixed blocks, then their sums one after the other). The other elements
  /// of control are left as they are.
  void run(Tensor& control, StreamRef stream, bool accumulate = false) const;

  struct Table;

 private:
  std::shared_ptr<const Table> table_;
};

/// The same for a list that is used once.
void grad_square_sum(std::span<const Tensor> gradients, Tensor& control, StreamRef stream, bool accumulate = false);

/// Sets factor and skip from the square sum: norm = sqrt(square sum); factor = max_norm / norm when norm > max_norm >
/// 0, else 1 (max_norm = 0: no clipping). The step is skipped, and the skip count raised by one, when the square sum is
/// not finite or norm * factor exceeds 1e18. A skipped step has factor 1. Throws InvalidArgument when max_norm is
/// negative or not finite.
void finish_step_control(Tensor& control, double max_norm, StreamRef stream);

/// Marks a step that is skipped for a reason that the host knows (no counted token): square sum 0, factor 1, skip 1,
/// skip count + 1.
void count_skipped_step(Tensor& control, StreamRef stream);

/// A step control read back; waits for the stream.
struct StepReport {
  double gradient_norm = 0;  ///< before clipping
  double factor = 1;
  bool skipped = false;
  std::int64_t skipped_steps = 0;  ///< so far
};
StepReport read_step_control(const Tensor& control, StreamRef stream);

/// For parameter p: controls[p] = control, but with skip 1 where active[p] is 0; steps[p] += 1 where controls[p] is not
/// skipped. So t counts, for each parameter, the steps in which it had a gradient and that were not skipped. control
/// float64 [4], active int32 [P], steps int64 [P], controls float64 [P, 4], all contiguous; steps and controls are
/// written.
void advance_steps(const Tensor& control, const Tensor& active, Tensor& steps, Tensor& controls, StreamRef stream);

/// Writes host values to a device tensor by small kernels that carry them as arguments: ordered in the stream, no host
/// buffer, no wait. Launched ahead of a recorded step to give it new values. destination contiguous, float64 or int32,
/// of values.size() elements.
void write_values(Tensor& destination, std::span<const double> values, StreamRef stream);
void write_values(Tensor& destination, std::span<const std::int32_t> values, StreamRef stream);

}  // namespace rowan
