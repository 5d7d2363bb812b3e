// Matrix products.
#pragma once

#include "rowan/core/tensor.h"

namespace rowan {

struct GemmOptions {
  double alpha = 1;
  double beta = 0;  ///< 0: c is not read, so it may hold anything
  bool allow_tf32 =
      false;  ///< lets float32 products on CUDA run in TF32 (10 bits of fraction); otherwise they are IEEE float32
  const Tensor* addend = nullptr;  ///< what beta multiplies; null: c
};

/// c = alpha a b + beta c, with a [M, K], b [K, N], c [M, N], or batches of them [B, M, K], [B, K, N], [B, M, N]; or
/// c = alpha a b + beta addend with another addend of c's shape, dtype and strides, which may be a or b.
///
/// a and b share one floating dtype; c has that dtype or float32 (float64 for float64). Sums are taken in float32 at
/// least (float64 for float64) and rounded once to c's dtype. a and b have unit stride in one of their last two
/// dimensions (transposed views are taken), c in the last; the other strides are free as long as elements of c do not
/// coincide. M, N, K and B may be 0; with K = 0 c becomes beta c. Writes c, which must not share memory with a or b.
///
/// CUDA: cuBLASLt with one workspace a (device, stream) and, for large products, the algorithm that was measured to be
/// the fastest (see tuning.h: the first call of a shape takes longer and waits for the stream); reductions in float32
/// in a fixed order, so equal calls on one device give equal bits. CPU: OpenBLAS in blocks that depend on the shape
/// alone, each on one thread, so bits do not depend on the number of threads; float64, and all dtypes in a build
/// without OpenBLAS, by plain loops that accumulate in float64.
///
/// Throws InvalidArgument when shapes, dtypes, strides or devices do not fit, Unsupported for float64 on CUDA.
void gemm(const Tensor& a, const Tensor& b, Tensor& c, StreamRef stream, const GemmOptions& options = {});

}  // namespace rowan
