// Private backend of products that are known to be symmetric, where a device has a kernel for them.
#pragma once

#include <cstdint>

#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

/// A matrix whose element (batch b, i, j) is at b * batch_stride + i * stride + j.
struct SymmetricOperand {
  void* data = nullptr;
  std::int64_t stride = 0;
  std::int64_t batch_stride = 0;
};

/// out = alpha a b^T + beta c + gamma I with a and b [side, depth], c and out [side, side]; the product is symmetric,
/// as is c. Only its lower triangle is computed; out is symmetric to the bit.
struct SymmetricProductArguments {
  DType dtype = DType::kFloat16;
  std::int64_t batches = 0, side = 0, depth = 0;
  SymmetricOperand a, b, c, out;  ///< c is not read where beta is 0
  double alpha = 1, beta = 0, gamma = 0;
};

namespace cuda {
/// Whether the kernel below takes such a product and is faster than a whole one.
bool symmetric_product_pays(const SymmetricProductArguments& arguments, StreamRef stream);
/// Bytes of scratch memory, zero before the first call and left fit for the next one.
std::int64_t symmetric_product_workspace(StreamRef stream);
void symmetric_product(const SymmetricProductArguments& arguments, void* workspace, StreamRef stream);
}  // namespace cuda

}  // namespace rowan
