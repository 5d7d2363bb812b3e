// AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization" (ICLR 2019), with the arithmetic of
// torch.optim.AdamW.
#pragma once

#include <memory>
#include <span>

#include "rowan/core/tensor.h"

namespace rowan {

/// What one parameter brings to a step. Tensors that hold the step's values are read on the device.
struct AdamwArguments {
  /// float32 (float64 on the CPU too): contiguous of any rank, or of rank 2 with any row stride; updated.
  Tensor master;
  Tensor gradient;       ///< dtype and shape of master; strides likewise
  Tensor first_moment;   ///< m: dtype and shape of master, contiguous; updated
  Tensor second_moment;  ///< v: likewise
  /// Undefined, or bfloat16 or float16 of master's shape, strides likewise: receives the new master, rounded.
  Tensor value;
  Tensor rates;    ///< float64 [2], contiguous: learning rate lr and weight decay w
  Tensor step;     ///< int64 [1]: t of this step, from 1
  Tensor control;  ///< undefined, or a step control (step_control.h): gradients are multiplied with its factor
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
};

/// A list of parameters that is stepped again and again; on CUDA one launch for all of them. It keeps the tensors alive
/// and owns the table of their addresses, so that run() allocates nothing.
class AdamwBatch {
 public:
  AdamwBatch() = default;
  /// Throws InvalidArgument for wrong shapes, dtypes, strides or devices, betas outside [0, 1), or epsilon < 0, naming
  /// the value.
  AdamwBatch(std::span<const AdamwArguments> parameters, StreamRef stream);

  /// For every element of every parameter, with g = factor * gradient:
  ///   m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
  ///   master -= lr w master + lr (m / (1 - b1^t)) / (sqrt(v) / sqrt(1 - b2^t) + epsilon)
  /// and value = master rounded once. Nothing is written where the parameter's control says skip. float32 on CUDA works
  /// in float32 with one rounding of the new master; the CPU works in float64 and rounds m, v and master once each.
  void run(StreamRef stream) const;

  struct Table;

 private:
  std::shared_ptr<const Table> table_;
};

/// The same for parameters that are stepped once.
void adamw_step(std::span<const AdamwArguments> parameters, StreamRef stream);

}  // namespace rowan
