// Private backend of AdamW: the same call for both devices.
#pragma once

#include <cstdint>

#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

/// One parameter; chunks of kAdamwChunk elements are numbered through all parameters.
struct AdamwPiece {
  void* master = nullptr;
  const void* gradient = nullptr;
  void* first_moment = nullptr;
  void* second_moment = nullptr;
  void* value = nullptr;          ///< null: no 16-bit copy
  const double* rates = nullptr;  ///< {lr, weight decay}
  const std::int64_t* step = nullptr;
  const double* control = nullptr;  ///< null: factor 1, never skipped
  std::int64_t cols = 0;            ///< elements of a row, in every tensor
  std::int64_t master_stride = 0;
  std::int64_t gradient_stride = 0;
  std::int64_t value_stride = 0;
  std::int64_t elements = 0;
  std::int64_t first_chunk = 0;
  double beta1 = 0;
  double beta2 = 0;
  double epsilon = 0;
  std::int64_t value_is_bfloat16 = 0;  ///< otherwise float16
};
inline constexpr std::int64_t kAdamwChunk = 8192;

struct AdamwBatchArguments {
  const AdamwPiece* pieces = nullptr;  ///< on the device
  std::int64_t piece_count = 0;
  std::int64_t chunks = 0;
  DType dtype = DType::kFloat32;  ///< of master, gradient and moments
};

namespace cpu {
void adamw(const AdamwBatchArguments& arguments);
}
namespace cuda {
void adamw(const AdamwBatchArguments& arguments, StreamRef stream);
}

}  // namespace rowan
