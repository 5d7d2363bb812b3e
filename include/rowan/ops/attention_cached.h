// Attention of the last tokens of one sequence to all of it: generation, where keys and values of earlier tokens are
// kept.
#pragma once

#include "rowan/core/tensor.h"

namespace rowan {

/// out[i, h, :] = sum over j <= N - M + i of softmax_j(scale q[i, h, :] . k[j, g, :]) v[j, g, :], g = h / (Hq / Hkv):
/// the M queries are the last of N tokens. q, out [M, Hq, d], k, v [N, Hkv, d], N >= M, one floating dtype, unit last
/// stride, any other strides; Hq a multiple of Hkv, d even and at most kMaxAttentionHeadDim. Products, softmax and sums
/// in float32 (float64 on the CPU), one rounding to the dtype at the end. Same bits every time. Writes out, which must
/// not overlap the inputs. Every query reads all keys it sees on its own: made for few queries; many at once are faster
/// with attention_forward. Throws InvalidArgument when shapes, dtypes, strides or devices do not fit, Unsupported for a
/// head_dim that is odd or too large.
void attention_cached(const Tensor& q, const Tensor& k, const Tensor& v, double scale, Tensor& out, StreamRef stream);

}  // namespace rowan
