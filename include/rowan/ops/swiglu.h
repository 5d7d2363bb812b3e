// The gated activation of Llama's feed-forward block (Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202).
#pragma once

#include "rowan/core/tensor.h"

namespace rowan {

/// out = silu(gate) up, silu(g) = g / (1 + exp(-g)); in float32 (float64) inside, one rounding.
/// gate, up, out [M, F] of one floating dtype, unit column stride, any row stride (views of one fused buffer). Writes
/// out, which may be gate or up itself. Throws InvalidArgument when shapes, dtypes, strides or devices do not fit.
void swiglu_forward(const Tensor& gate, const Tensor& up, Tensor& out, StreamRef stream);

/// With p = 1 / (1 + exp(-gate)):  dgate = dout up p (1 + gate (1 - p)),  dup = dout gate p.
/// All [M, F] of one floating dtype, unit column stride, any row stride. Writes dgate and dup; each may be gate, up or
/// dout itself (the same view), but they must be apart from each other. Throws InvalidArgument when shapes, dtypes,
/// strides or devices do not fit.
void swiglu_backward(const Tensor& dout, const Tensor& gate, const Tensor& up, Tensor& dgate, Tensor& dup,
                     StreamRef stream);

}  // namespace rowan
