// Private backend of gemm: the same call for both devices.
#pragma once

#include <cstdint>

#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

/// A matrix whose element (i, j) is at i * ld + j, or at j * ld + i when transposed.
struct GemmOperand {
  const void* data = nullptr;
  std::int64_t ld = 0;
  std::int64_t batch_stride = 0;
  bool transposed = false;
};

struct GemmArguments {
  std::int64_t batch = 1;
  std::int64_t m = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  GemmOperand a;
  GemmOperand b;
  void* c = nullptr;
  const void* addend = nullptr;  ///< what beta multiplies, laid out as c; null: c
  std::int64_t ldc = 0;
  std::int64_t c_batch_stride = 0;
  DType dtype = DType::kFloat32;
  DType c_dtype = DType::kFloat32;
  double alpha = 1;
  double beta = 0;
  bool allow_tf32 = false;
};

// All extents are at least 1.
namespace cpu {
void gemm(const GemmArguments& arguments);
}
namespace cuda {
void gemm(const GemmArguments& arguments, StreamRef stream);
}

}  // namespace rowan
