// Private backend of RMSNorm: the same calls for both devices.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/head_view.h"
#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

struct RmsNormArguments {
  std::int64_t tokens = 0;
  std::int64_t heads = 1;
  std::int64_t width = 0;
  DType dtype = DType::kFloat32;
  HeadView x;
  const void* weight = nullptr;
  void* rstd = nullptr;  ///< float, double for float64; [tokens, heads]
  // forward
  HeadView y;
  double eps = 0;
  // backward
  HeadView dy;
  HeadView dx;
  double dx_beta = 0;
  void* dweight = nullptr;   ///< null: frozen
  void* partials = nullptr;  ///< [rms_norm_chunks, width] of rstd's type, where dweight is given

  std::int64_t rows() const { return tokens * heads; }
};

/// dweight is summed within this many equal chunks of rows and then over the chunks: a number of rows alone, so that
/// the order of the sum depends on nothing else.
inline std::int64_t rms_norm_chunk_rows(std::int64_t rows) { return std::max<std::int64_t>(32, (rows + 255) / 256); }
inline std::int64_t rms_norm_chunks(std::int64_t rows) {
  return (rows + rms_norm_chunk_rows(rows) - 1) / rms_norm_chunk_rows(rows);
}

// tokens, heads and width are at least 1.
namespace cpu {
void rms_norm_forward(const RmsNormArguments& arguments);
void rms_norm_backward(const RmsNormArguments& arguments);
}  // namespace cpu
namespace cuda {
void rms_norm_forward(const RmsNormArguments& arguments, StreamRef stream);
void rms_norm_backward(const RmsNormArguments& arguments, StreamRef stream);
}  // namespace cuda

}  // namespace rowan
