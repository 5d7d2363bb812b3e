// Private backend of attention_cached: the same call for both devices.
#pragma once

#include <cstdint>

#include "ops/head_view.h"
#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

struct AttentionCachedArguments {
  std::int64_t queries = 0;  ///< at least 1
  std::int64_t keys = 0;     ///< at least queries
  std::int64_t query_heads = 0;
  std::int64_t key_heads = 0;
  std::int64_t head_dim = 0;
  double scale = 1;
  DType dtype = DType::kFloat32;
  HeadView q, k, v, out;
};

namespace cpu {
void attention_cached(const AttentionCachedArguments& arguments);
}
namespace cuda {
void attention_cached(const AttentionCachedArguments& arguments, StreamRef stream);
}

}  // namespace rowan
