// Low-rank adapters (Hu et al., "LoRA", arXiv 2106.09685): y = scale (x A^T) B^T without a base weight.
//
// Shapes: x [M, K], A [r, K], B [N, r], dy and y [M, N]; any r >= 1 and any M, K, N >= 0. x, A, B and dy share one
// dtype (float32, bfloat16, float16; float64 on the CPU), or A and B are float32 beside 16-bit x (then rounded to x's
// dtype once). x, dy, y and dx have adjacent columns and any row stride; A and B have unit stride in either dimension
// (transposed views of [K, r] or [r, N] storage are taken); no alignment is needed. Sums are float32 on CUDA, float64
// on the CPU (float32 in OpenBLAS for float32), in an order that depends on the shapes and the device alone. The result
// of x A^T and of dy B is multiplied by the scale before its one rounding to x's dtype.
//
// A `mask` is the dropout mask of the wide matrix that the operation reads or writes (see DropoutMask); null: none.
// With p = 1 that branch is exactly zero.
//
// All throw InvalidArgument when shapes, dtypes, strides or devices do not fit or outputs share memory with inputs, and
// Unsupported for float64 on CUDA.
#pragma once

#include <optional>

#include "rowan/core/tensor.h"
#include "rowan/ops/dropout.h"

namespace rowan {

// The three primitives. `wide` is [M, C], `narrow` is [M, r], `factor` is [r, C].

/// out[:, :r] = scale (mask o wide) factor^T in wide's dtype; out[:, r:] = 0. out [M, rp] with rp >= r, any row stride
/// (the slack of wide is a good place). Writes out.
void lora_shrink(const Tensor& wide, const Tensor& factor, double scale, Tensor& out, StreamRef stream,
                 const DropoutMask* mask = nullptr);

/// out = mask o (narrow factor) + beta out, with beta 0 (out is not read) or 1. out [M, C] of narrow's dtype, or any of
/// float32, bfloat16, float16 (float64 with float64). Writes out.
void lora_expand(const Tensor& narrow, const Tensor& factor, Tensor& out, double beta, StreamRef stream,
                 const DropoutMask* mask = nullptr);

/// grad = narrow^T (mask o wide) + beta grad, with beta 0 or 1. grad [r, C] float32 (float64 with float64) with unit
/// stride in either dimension. Writes grad.
void lora_reduce(const Tensor& narrow, const Tensor& wide, Tensor& grad, double beta, StreamRef stream,
                 const DropoutMask* mask = nullptr);

/// Both at once: out[:, :r] = scale (mask o wide) factor^T, out[:, r:] = 0, and grad = narrow^T (mask o wide) + beta
/// grad. On CUDA one pass over wide for 16-bit types up to rank 32 where the device has thread block clusters;
/// otherwise lora_shrink, then lora_reduce. In a backward pass wide is dy, factor B^T, out dS, narrow the saved S and
/// grad dB^T. Writes out and grad, which share memory with no other argument.
void lora_shrink_reduce(const Tensor& wide, const Tensor& factor, double scale, Tensor& out, const Tensor& narrow,
                        Tensor& grad, double beta, StreamRef stream, const DropoutMask* mask = nullptr);

// The operations of a whole adapter, as in NVIDIA NeMo Automodel's lora_kernel (see the map in README.md).

/// y = scale (x A^T) B^T + beta y, with beta 0 or 1. y of x's dtype, or any of float32, bfloat16, float16. Writes y.
void lora_forward(const Tensor& x, const Tensor& a, const Tensor& b, double scale, Tensor& y, double beta,
                  StreamRef stream);
/// The same with beta 0 into a new tensor of `dtype` (default: that of x).
Tensor lora_forward(const Tensor& x, const Tensor& a, const Tensor& b, double scale, StreamRef stream,
                    std::optional<DType> dtype = {});

/// t = scale dy B;  dx = t A;  dA = t^T x + beta_da dA, with beta_da 0 or 1. dx [M, K] of x's dtype, or any of float32,
/// bfloat16, float16; dA [r, K] float32 (float64 with float64). Writes dx and dA; dx must not be x.
void lora_da_dx(const Tensor& dy, const Tensor& x, const Tensor& a, const Tensor& b, double scale, Tensor& dx,
                Tensor& da, double beta_da, StreamRef stream);
struct LoraDaDx {
  Tensor da;
  Tensor dx;
};
/// The same with beta_da 0 into new tensors.
LoraDaDx lora_da_dx(const Tensor& dy, const Tensor& x, const Tensor& a, const Tensor& b, double scale,
                    StreamRef stream);

/// u = scale x A^T;  dB = dy^T u + beta dB, with beta 0 or 1. dB [N, r] float32 (float64 with float64), unit stride in
/// either dimension. Writes dB.
void lora_db(const Tensor& dy, const Tensor& x, const Tensor& a, double scale, Tensor& db, double beta,
             StreamRef stream);
/// The same with beta 0 into a new tensor.
Tensor lora_db(const Tensor& dy, const Tensor& x, const Tensor& a, double scale, StreamRef stream);
/// The same with the u [M, r] that forward saved: dB = dy^T u + beta dB is lora_reduce(u, dy, dB^T, beta).
void lora_db_saved(const Tensor& dy, const Tensor& u, Tensor& db, double beta, StreamRef stream);

}  // namespace rowan
