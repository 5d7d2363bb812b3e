// Private backend of the elementwise operations: the same calls for both devices.
#pragma once

#include <cstdint>

#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

/// Element (i, j) at i * row_stride + j * col_stride. At least one element.
struct MatrixRef {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t row_stride = 0;
  std::int64_t col_stride = 1;
};

/// Rows and elements that one partial sum covers.
inline constexpr std::int64_t kSumChunk = 16384;
inline constexpr std::int64_t kSumRowsChunk = 256;
inline std::int64_t sum_chunks(std::int64_t elements) { return (elements + kSumChunk - 1) / kSumChunk; }
inline std::int64_t sum_rows_chunks(std::int64_t rows) { return (rows + kSumRowsChunk - 1) / kSumRowsChunk; }

namespace cpu {
void cast(const MatrixRef& src, const MatrixRef& dst);
void fill(const MatrixRef& t, double value);
void scale(const MatrixRef& t, double factor);
void add(const MatrixRef& a, const MatrixRef& b, const MatrixRef& out);
void add_row_vector(const MatrixRef& y, const void* vector);
void broadcast_row(const void* vector, const MatrixRef& y);
void sum_rows(const MatrixRef& x, void* out, double beta);
void sum(const MatrixRef& x, double* partial, double* out);
}  // namespace cpu

namespace cuda {
void cast(const MatrixRef& src, const MatrixRef& dst, StreamRef stream);
void fill(const MatrixRef& t, double value, StreamRef stream);
void scale(const MatrixRef& t, double factor, StreamRef stream);
void add(const MatrixRef& a, const MatrixRef& b, const MatrixRef& out, StreamRef stream);
void add_row_vector(const MatrixRef& y, const void* vector, StreamRef stream);
void broadcast_row(const void* vector, const MatrixRef& y, StreamRef stream);
/// partial: sum_rows_chunks(rows) * cols floats.
void sum_rows(const MatrixRef& x, float* partial, float* out, double beta, StreamRef stream);
/// partial: sum_chunks(rows * cols) doubles.
void sum(const MatrixRef& x, double* partial, double* out, StreamRef stream);
}  // namespace cuda

}  // namespace rowan
