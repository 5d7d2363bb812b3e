// Causal grouped-query attention over sequences of different lengths laid end to end, without a matrix of all pairs in
// memory: FlashAttention-2 (Dao, arXiv 2307.08691), with dq and dk/dv in separate passes so that no atomics are needed.
// On Hopper, 16-bit heads of 33 to 128 elements run on warpgroup products (FlashAttention-3, arXiv 2407.08608) where
// scale is positive and addresses, strides and the head size are multiples of 16 bytes.
#pragma once

#include <cstdint>

#include "rowan/core/tensor.h"

namespace rowan {

/// Where sequences lie in M tokens: sequence s is rows [starts[s], starts[s + 1]). Empty sequences are fine.
struct SequenceBatch {
  Tensor starts;  ///< int32 [S + 1], contiguous, on the operation's device: 0 first, never falling, M last
  std::int64_t max_length = 0;  ///< at least the longest sequence (sizes the launch; larger only costs time)
};

/// Largest head_dim that attention takes; it must be even and positive.
inline constexpr std::int64_t kMaxAttentionHeadDim = 256;

/// out[i, h, :] = sum over j <= i of the same sequence of softmax_j(scale q[i, h, :] . k[j, g, :]) v[j, g, :], g = h /
/// (Hq / Hkv). q, out [M, Hq, d], k, v [M, Hkv, d], one floating dtype, unit last stride, any other strides (views of
/// one fused buffer); Hq a multiple of Hkv, d even and at most kMaxAttentionHeadDim. lse float32 (float64 when q is)
/// [Hq, M], contiguous: the logarithm of each row's sum of exponentials, which backward needs. Softmax and sums in
/// float32 (float64); for 16-bit dtypes the weights are rounded to the dtype before they meet v. Writes out and lse,
/// which must not overlap the inputs. A NaN or infinity in a token may reach any row of its own sequence, never another
/// sequence. starts is checked on the CPU (InvalidArgument); on CUDA its values are only known on the device: what lies
/// outside [0, M] or beyond max_length is cut off, and rows that no sequence covers are not written. Throws
/// InvalidArgument when shapes, dtypes, strides or devices do not fit, Unsupported for a head_dim that is odd or too
/// large.
void attention_forward(const Tensor& q, const Tensor& k, const Tensor& v, const SequenceBatch& batch, double scale,
                       Tensor& out, Tensor& lse, StreamRef stream);

/// Gradients of attention_forward for dout [M, Hq, d]: writes dq [M, Hq, d], dk and dv [M, Hkv, d] (overwritten, not
/// added to; unit last stride, views of one fused buffer allowed). q, k, v, out and lse as they left forward; scale and
/// batch the same. Weights and their gradients are recomputed tile by tile and, for 16-bit dtypes, rounded to the dtype
/// before each product. Same bits every time. The gradients must overlap neither each other's elements nor any input.
/// Throws as attention_forward does.
void attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                        const Tensor& lse, const SequenceBatch& batch, double scale, Tensor& dq, Tensor& dk, Tensor& dv,
                        StreamRef stream);

}  // namespace rowan
