#include <cstddef>
#include <limits>
#include <string>
#include <type_traits>

#include "core/cuda_check.h"
#include "ops/attention_backend.h"
#include "ops/attention_fp32.cuh"
#include "ops/attention_mma.cuh"
#include "ops/attention_tiles.cuh"
#include "ops/row_reduce.cuh"

namespace rowan::cuda {

namespace {

constexpr int kDeltaThreads = 128;

/// delta[head, token] = sum over the head of dout out, one warp each.
template <class T>
__global__ void __launch_bounds__(kDeltaThreads) delta_kernel(AttentionArguments a) {
  constexpr int kWarps = kDeltaThreads / 32;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  for (std::int64_t i = first; i < a.tokens * a.query_heads; i += static_cast<std::int64_t>(gridDim.x) * kWarps) {
    const std::int64_t token = i / a.query_heads, head = i % a.query_heads;
    const T* const out = head_pointer<T>(a.out, token, head);
    const T* const dout = head_pointer<T>(a.dout, token, head);
    float sum = 0;
    for (auto c = static_cast<std::int32_t>(threadIdx.x % 32); c < a.head_dim; c += 32)
      sum += to_float(out[c]) * to_float(dout[c]);
    sum = combine_lanes<32>(sum, Sum());
    if (threadIdx.x % 32 == 0) static_cast<float*>(a.delta)[head * a.tokens + token] = sum;
  }
}

/// One block for every tile of kRows rows of every (sequence, head); throws before anything is launched.
unsigned tile_blocks(const char* op, const AttentionArguments& a, std::int64_t heads, int rows) {
  const std::int64_t tiles = tiles_of(a.max_length, rows), pairs = heads * a.sequences;
  if (pairs > 0 && tiles > std::numeric_limits<std::int32_t>::max() / pairs) {
    throw Error(ErrorKind::kInvalidArgument, std::string(op) + ": expected fewer than 2^31 tiles of " +
                                                 std::to_string(rows) + " rows, got " + std::to_string(pairs) +
                                                 " sequences times heads of up to " + std::to_string(a.max_length) +
                                                 " tokens");
  }
  return static_cast<unsigned>(tiles * pairs);
}

template <class Kernel>
void launch(const char* op, Kernel kernel, unsigned blocks, int threads, std::size_t shared_bytes,
            const AttentionArguments& a, bool packs, StreamRef stream) {
  if (blocks == 0) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)), op);
  kernel<<<blocks, static_cast<unsigned>(threads), shared_bytes, to_cuda(stream)>>>(a, packs);
  check_launch(op);
}

/// Calls f(constant head size) for the smallest padded size that holds the head.
template <class F>
void with_head_size(std::int64_t head_dim, F&& f) {
  if (head_dim <= 32) return f(std::integral_constant<int, 32>());
  if (head_dim <= 64) return f(std::integral_constant<int, 64>());
  if (head_dim <= 128) return f(std::integral_constant<int, 128>());
  return f(std::integral_constant<int, 256>());
}

template <class T, int kDim>
void launch_forward(const AttentionArguments& a, StreamRef stream) {
  const char* const op = "attention_forward";
  const bool packs = allows_packs<T>(a.head_dim, {&a.q, &a.k, &a.v});
  if constexpr (std::is_same_v<T, float>) {
    using C = fp32::Config<kDim>;
    launch(op, fp32::forward_kernel<kDim>, tile_blocks(op, a, a.query_heads, C::kRows), fp32::kThreads,
           C::kForwardFloats * sizeof(float), a, packs, stream);
  } else {
    using C = mma::Config<kDim>;
    launch(op, mma::forward_kernel<T, kDim>, tile_blocks(op, a, a.query_heads, mma::kRows), mma::kThreads,
           C::kForwardElements * sizeof(T), a, packs, stream);
  }
}

template <class T, int kDim>
void launch_backward(const AttentionArguments& a, StreamRef stream) {
  const char* const op = "attention_backward";
  const bool packs = allows_packs<T>(a.head_dim, {&a.q, &a.k, &a.v, &a.dout});
  constexpr int kRows = std::is_same_v<T, float> ? fp32::Config<kDim>::kRows : mma::kRows;
  const unsigned query_blocks = tile_blocks(op, a, a.query_heads, kRows),
                 key_blocks = tile_blocks(op, a, a.key_heads, kRows);
  delta_kernel<T><<<row_blocks(a.tokens * a.query_heads, kDeltaThreads / 32), kDeltaThreads, 0, to_cuda(stream)>>>(a);
  check_launch(op);
  if constexpr (std::is_same_v<T, float>) {
    constexpr std::size_t kBytes = fp32::Config<kDim>::kBackwardFloats * sizeof(float);
    launch(op, fp32::query_gradient_kernel<kDim>, query_blocks, fp32::kThreads, kBytes, a, packs, stream);
    launch(op, fp32::key_value_gradient_kernel<kDim>, key_blocks, fp32::kThreads, kBytes, a, packs, stream);
  } else {
    using C = mma::Config<kDim>;
    constexpr std::size_t kBytes = C::kKeyGradientElements * sizeof(T);
    launch(op, mma::query_gradient_kernel<T, kDim>, query_blocks, mma::kThreads, C::kQueryGradientElements * sizeof(T),
           a, packs, stream);
    if constexpr (C::kSplitGradients) {
      launch(op, mma::key_value_gradient_kernel<T, kDim, true, false>, key_blocks, mma::kThreads, kBytes, a, packs,
             stream);
      launch(op, mma::key_value_gradient_kernel<T, kDim, false, true>, key_blocks, mma::kThreads, kBytes, a, packs,
             stream);
    } else {
      launch(op, mma::key_value_gradient_kernel<T, kDim, true, true>, key_blocks, mma::kThreads, kBytes, a, packs,
             stream);
    }
  }
}

}  // namespace

void attention_forward(const AttentionArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  dispatch_device_type(a.dtype, [&](auto tag) {
    with_head_size(a.head_dim,
                   [&](auto size) { launch_forward<typename decltype(tag)::type, decltype(size)::value>(a, stream); });
  });
}

void attention_backward(const AttentionArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  dispatch_device_type(a.dtype, [&](auto tag) {
    with_head_size(a.head_dim,
                   [&](auto size) { launch_backward<typename decltype(tag)::type, decltype(size)::value>(a, stream); });
  });
}

}  // namespace rowan::cuda
