// Private backend of attention: the same calls for both devices.
#pragma once

#include <cstdint>

#include "ops/head_view.h"
#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

struct AttentionArguments {
  std::int64_t tokens = 0;
  std::int64_t query_heads = 0;
  std::int64_t key_heads = 0;
  std::int64_t head_dim = 0;
  const std::int32_t* starts = nullptr;  ///< [sequences + 1]
  std::int64_t sequences = 0;
  std::int64_t max_length = 0;
  double scale = 1;
  DType dtype = DType::kFloat32;
  HeadView q, k, v, out;
  void* lse = nullptr;  ///< [query_heads, tokens], float (double for float64)
  // backward
  HeadView dout, dq, dk, dv;
  void* delta = nullptr;  ///< CUDA only: [query_heads, tokens] float, sum over the head of dout out
};

// tokens and heads are at least 1.
namespace cpu {
void attention_forward(const AttentionArguments& arguments);
void attention_backward(const AttentionArguments& arguments);
}  // namespace cpu
namespace cuda {
void attention_forward(const AttentionArguments& arguments, StreamRef stream);
void attention_backward(const AttentionArguments& arguments, StreamRef stream);
}  // namespace cuda

}  // namespace rowan
