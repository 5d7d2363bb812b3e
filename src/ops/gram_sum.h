// Newton-Schulz of matrices whose output neurons are split over ranks, by a sum of Gram matrices:
//
//     X = 2^-e U;  R = sum over ranks of X_p^T X_p;  nu = factor sqrt(trace R) + 2^-e epsilon;  O_p = X_p h(R / nu^2) /
//     nu
//
// with h the polynomial of all steps. It is the path gram_fp32 (rowan/ops/newton_schulz.h): Gram matrices in float32,
// taken once. Between the four calls below the caller reduces `largest` (max) and `gram` (sum) over the ranks. e is the
// exponent of the largest magnitude, so that no square overflows or vanishes.
//
// U and O are [B, n, K] (kOutIn) or [B, K, n] (kInOut), this rank's n output neurons of each of B matrices, bfloat16 or
// float32, adjacent elements in the last dimension; n may be 0.
#pragma once

#include "rowan/core/tensor.h"
#include "rowan/ops/matrix_layout.h"
#include "rowan/ops/newton_schulz.h"

namespace rowan::detail {

/// largest[b] = the largest magnitude in matrix b of t [B, rows, columns] (float32, or float64 on the CPU, too);
/// float32 [B].
void gram_largest(const Tensor& t, Tensor& largest, StreamRef stream);

/// x (float32, shape of u, contiguous) = 2^-e u; gram (float32 [B, K, K]) = this rank's X^T X.
void gram_partial(const Tensor& u, MatrixLayout layout, const Tensor& largest, Tensor& x, Tensor& gram,
                  StreamRef stream);

/// gram becomes h(R / nu^2) / nu. Every rank computes it, from equal bits to equal bits.
void gram_polynomial(Tensor& gram, const Tensor& largest, const NewtonSchulzOptions& options, StreamRef stream);

/// out = x h.
void gram_apply(const Tensor& x, MatrixLayout layout, const Tensor& h, Tensor& out, StreamRef stream);

}  // namespace rowan::detail
