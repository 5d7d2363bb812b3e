// The elementwise halves of plain Muon (Keller Jordan, kellerjordan.github.io/posts/muon) with heavy-ball momentum and
// the update size of Moonlight (arXiv 2502.16982). One step of a matrix is muon_prepare, newton_schulz
// (rowan/ops/newton_schulz.h), muon_finish.
#pragma once

#include "rowan/core/tensor.h"

namespace rowan {

/// M' = mu M + G;  U = G + mu M' (nesterov) or M'.  G is the gradient times control's factor.
/// gradient: float32 (float64 on the CPU too), contiguous of any rank or of rank 2 with any row stride. momentum: its
/// dtype and shape, contiguous, updated. update: its shape, contiguous, bfloat16 or float32 (float64 beside float64),
/// written with one rounding. control: a step control (step_control.h) or undefined; when it says skip, nothing is
/// written. Throws InvalidArgument when dtypes, shapes, strides, devices or mu (outside [0, 1)) do not fit.
void muon_prepare(const Tensor& gradient, Tensor& momentum, double mu, bool nesterov, const Tensor& control,
                  Tensor& update, StreamRef stream);

/// W' = W - lr (scale O + w W) with {lr, w} = rates, float64 [2] on the device.
/// weight: float32 (float64 on the CPU too), contiguous of any rank or of rank 2 with any row stride, updated. update
/// (O): its shape, strides likewise, bfloat16 or float32 (float64 beside float64). value: null, or bfloat16 or float16
/// of weight's shape, strides likewise: receives W' rounded once. control as above. lr = 0 leaves W as it is, bit for
/// bit. Throws InvalidArgument when dtypes, shapes, strides or devices do not fit.
void muon_finish(Tensor& weight, const Tensor& update, double scale, const Tensor& rates, const Tensor& control,
                 Tensor* value, StreamRef stream);

}  // namespace rowan
