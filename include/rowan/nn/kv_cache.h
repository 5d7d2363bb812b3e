// Keys and values of one sequence's tokens, kept for the tokens to come.
#pragma once

#include <cstdint>
#include <vector>

#include "rowan/core/tensor.h"
#include "rowan/io/model_config.h"

namespace rowan {

class KvCache {
 public:
  /// Room for `capacity` tokens of a model in this dtype, on the stream's device: 2 * layers * capacity * key heads *
  /// head_dim elements. Throws InvalidArgument for a negative capacity.
  KvCache(const ModelConfig& config, DType dtype, std::int64_t capacity, StreamRef stream);

  std::int64_t capacity() const noexcept { return capacity_; }
  /// Tokens that it holds.
  std::int64_t length() const noexcept { return length_; }
  /// Forgets all tokens behind the first `length`. Throws InvalidArgument when there are fewer.
  void truncate(std::int64_t length);

 private:
  friend class LlamaModel;
  struct Layer {
    Tensor k, v;  // [capacity, key heads, head_dim], rotated
  };
  std::vector<Layer> layers_;
  std::int64_t capacity_ = 0, length_ = 0;
  DType dtype_;
};

}  // namespace rowan
