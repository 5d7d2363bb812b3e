// Private backend of the rotary embedding: the same call for both devices.
#pragma once

#include <cstdint>

#include "ops/head_view.h"
#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

struct RotaryArguments {
  std::int64_t tokens = 0;
  std::int64_t heads = 0;
  std::int64_t head_dim = 0;
  DType dtype = DType::kFloat32;
  HeadView x;
  const std::int32_t* positions = nullptr;
  const float* table = nullptr;  ///< [table_positions, head_dim / 2, 2], contiguous
  std::int64_t table_positions = 0;
  bool inverse = false;
};

// All extents of x are at least 1.
namespace cpu {
void rotary_apply(const RotaryArguments& arguments);
}
namespace cuda {
void rotary_apply(const RotaryArguments& arguments, StreamRef stream);
}

}  // namespace rowan
