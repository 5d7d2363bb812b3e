#include "rowan/nn/kv_cache.h"

#include "core/check.h"

namespace rowan {

KvCache::KvCache(const ModelConfig& config, DType dtype, std::int64_t capacity, StreamRef stream)
    : capacity_(capacity), dtype_(dtype) {
  detail::require(capacity >= 0, "KvCache: expected a capacity >= 0, got {}", capacity);
  const AllocationLabel label("key-value cache");
  const Shape shape{capacity, config.num_key_value_heads, config.head_dim};
  for (std::int64_t i = 0; i < config.num_hidden_layers; ++i)
    layers_.push_back({Tensor::empty(shape, dtype, stream), Tensor::empty(shape, dtype, stream)});
}

void KvCache::truncate(std::int64_t length) {
  detail::require(0 <= length && length <= length_, "KvCache::truncate: expected a length in [0, {}], got {}", length_,
                  length);
  length_ = length;
}

}  // namespace rowan
