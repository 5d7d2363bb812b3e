// Private backend of the embedding: the same calls for both devices.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

struct EmbeddingArguments {
  const void* ids = nullptr;
  DType id_dtype = DType::kInt32;
  std::int64_t tokens = 0;
  std::int64_t vocabulary = 0;
  std::int64_t width = 0;
  DType dtype = DType::kFloat32;  ///< of rows
  void* rows = nullptr;           ///< y in forward, dy in backward: [tokens, width]
  std::int64_t rows_stride = 0;
  void* table = nullptr;  ///< table (of dtype) in forward, dtable (float32, or float64 for float64) in backward
  std::int64_t table_stride = 0;
};

// tokens and width are at least 1.
namespace cpu {
void embedding_forward(const EmbeddingArguments& arguments);
void embedding_backward(const EmbeddingArguments& arguments);
}  // namespace cpu
namespace cuda {
void embedding_forward(const EmbeddingArguments& arguments, StreamRef stream);
/// Bytes of device memory that embedding_backward needs beside its operands.
std::size_t embedding_backward_workspace(const EmbeddingArguments& arguments, StreamRef stream);
void embedding_backward(const EmbeddingArguments& arguments, void* workspace, StreamRef stream);
}  // namespace cuda

}  // namespace rowan
