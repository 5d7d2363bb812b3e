// Root-mean-square normalisation (Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467), as in
// Llama; over the heads of a [M, heads, head_dim] tensor it is the q and k norm of Qwen3.
#pragma once

#include "rowan/core/tensor.h"

namespace rowan {

/// rstd = 1 / sqrt(mean_j x_j^2 + eps);  y_j = x_j rstd weight_j, for each row of H elements; one rounding to y's
/// dtype. x, y [M, H] or [M, heads, H] of one floating dtype, unit last stride, any other strides; weight [H],
/// contiguous, dtype of x; rstd float32 (float64 when x is), contiguous, shape of x without its last dimension: what
/// backward needs. Writes y and rstd; y may be x itself. Throws InvalidArgument when shapes, dtypes, strides or devices
/// do not fit, or eps is negative or not finite.
void rms_norm_forward(const Tensor& x, const Tensor& weight, double eps, Tensor& y, Tensor& rstd, StreamRef stream);

/// With n = x rstd and g = dy weight:  dx = rstd (g - n mean_j(g_j n_j)) + dx_beta dx;  dweight += sum over rows of dy
/// n. dy, x, dx alike as x above; dx_beta = 0 does not read dx, which may then be dy itself (the same view). dweight is
/// float32 [H] (float64 when x is), contiguous, accumulated into in a fixed order; null for a frozen weight. x must be
/// the input of forward: not available where y overwrote it. Writes dx and dweight. Throws InvalidArgument when shapes,
/// dtypes, strides or devices do not fit, or dx_beta is not finite.
void rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd, Tensor& dx,
                       Tensor* dweight, StreamRef stream, double dx_beta = 0);

}  // namespace rowan
