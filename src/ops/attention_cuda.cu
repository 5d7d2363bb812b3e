#include <cstddef>
#include <initializer_list>
#include <limits>
#include <string>
#include <type_traits>

#include "core/cuda_check.h"
#include "ops/attention_backend.h"
#include "ops/attention_fp32.cuh"
#include "ops/attention_mma.cuh"
#include "ops/attention_sm90.cuh"
#include "ops/attention_tiles.cuh"
#include "ops/row_reduce.cuh"

namespace rowan::cuda {

namespace {

constexpr int kDeltaThreads = 128;

/// delta[head, token] = sum over the head of dout out: kLanes neighbouring lanes a row, kPack elements of it at a time.
template <class T, int kLanes, int kPack>
__global__ void __launch_bounds__(kDeltaThreads) delta_kernel(AttentionArguments a) {
  constexpr int kRows = kDeltaThreads / kLanes;
  const std::int64_t rows = a.tokens * a.query_heads, lane = threadIdx.x % kLanes;
  for (std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRows; first < rows;
       first += static_cast<std::int64_t>(gridDim.x) * kRows) {
    const std::int64_t row = first + threadIdx.x / kLanes, token = row / a.query_heads, head = row % a.query_heads;
    float sum = 0;
    for (std::int64_t c = lane * kPack; row < rows && c < a.head_dim; c += kLanes * kPack) {
      const auto out = load_pack<T, kPack>(head_pointer<T>(a.out, token, head) + c);
      const auto dout = load_pack<T, kPack>(head_pointer<T>(a.dout, token, head) + c);
#pragma unroll
      for (int e = 0; e < kPack; ++e) sum += to_float(out.value[e]) * to_float(dout.value[e]);
    }
    sum = combine_lanes<kLanes>(sum, Sum());
    if (lane == 0 && row < rows) static_cast<float*>(a.delta)[head * a.tokens + token] = sum;
  }
}

template <class T>
void launch_delta(const char* op, const AttentionArguments& a, StreamRef stream) {
  const auto launch_rows = [&](auto kernel, int lanes) {
    kernel<<<row_blocks(a.tokens * a.query_heads, kDeltaThreads / lanes), kDeltaThreads, 0, to_cuda(stream)>>>(a);
  };
  if (allows_packs<T>(a.head_dim, {&a.out, &a.dout})) {
    launch_rows(delta_kernel<T, 8, kPackOf<T>>, 8);
  } else {
    launch_rows(delta_kernel<T, 32, 1>, 32);
  }
  check_launch(op);
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

template <class... Flags>
void launch(const char* op, void (*kernel)(AttentionArguments, Flags...), unsigned blocks, int threads,
            std::size_t shared_bytes, StreamRef stream, const AttentionArguments& a, Flags... flags) {
  if (blocks == 0) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)), op);
  kernel<<<blocks, static_cast<unsigned>(threads), shared_bytes, to_cuda(stream)>>>(a, flags...);
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

/// Whether the kernels for Hopper take these arguments.
template <class T>
bool takes_warpgroups(const AttentionArguments& a, std::initializer_list<const HeadView*> views, StreamRef stream) {
  return a.scale > 0 && allows_packs<T>(a.head_dim, views) && has_warpgroup_products(stream.device());
}

template <class T, int kDim>
void launch_forward(const AttentionArguments& a, StreamRef stream) {
  const char* const op = "attention_forward";
  const auto blocks = [&](int rows) { return tile_blocks(op, a, a.query_heads, rows); };
  const bool packs = allows_packs<T>(a.head_dim, {&a.q, &a.k, &a.v});
  if constexpr (std::is_same_v<T, float>) {
    using C = fp32::Config<kDim>;
    launch(op, fp32::forward_kernel<kDim>, blocks(C::kRows), fp32::kThreads, C::kForwardFloats * sizeof(float), stream,
           a, packs);
  } else {
    if constexpr (kDim == 64 || kDim == 128) {
      if (takes_warpgroups<T>(a, {&a.q, &a.k, &a.v, &a.out}, stream)) {
        using C = warpgroup::Config<kDim>;
        return launch(op, warpgroup::forward_kernel<T, kDim>, blocks(C::kQueries), C::kQueryThreads, C::kForwardBytes,
                      stream, a);
      }
    }
    using C = mma::Config<kDim>;
    launch(op, mma::forward_kernel<T, kDim>, blocks(mma::kRows), mma::kThreads, C::kForwardElements * sizeof(T), stream,
           a, packs);
  }
}

template <class T, int kDim>
void launch_backward(const AttentionArguments& a, StreamRef stream) {
  const char* const op = "attention_backward";
  const auto query_blocks = [&](int rows) { return tile_blocks(op, a, a.query_heads, rows); };
  const auto key_blocks = [&](int rows) { return tile_blocks(op, a, a.key_heads, rows); };
  const bool packs = allows_packs<T>(a.head_dim, {&a.q, &a.k, &a.v, &a.dout});
  launch_delta<T>(op, a, stream);
  if constexpr (std::is_same_v<T, float>) {
    using C = fp32::Config<kDim>;
    constexpr std::size_t kBytes = C::kBackwardFloats * sizeof(float);
    launch(op, fp32::query_gradient_kernel<kDim>, query_blocks(C::kRows), fp32::kThreads, kBytes, stream, a, packs);
    launch(op, fp32::key_value_gradient_kernel<kDim>, key_blocks(C::kRows), fp32::kThreads, kBytes, stream, a, packs);
  } else {
    if constexpr (kDim == 64 || kDim == 128) {
      if (takes_warpgroups<T>(a, {&a.q, &a.k, &a.v, &a.dout, &a.dq, &a.dk, &a.dv}, stream)) {
        using C = warpgroup::Config<kDim>;
        launch(op, warpgroup::query_gradient_kernel<T, kDim>, query_blocks(C::kQueries), C::kQueryThreads,
               C::kQueryGradientBytes, stream, a);
        return launch(op, warpgroup::key_value_gradient_kernel<T, kDim>, key_blocks(warpgroup::kRows),
                      warpgroup::kWarpgroup, C::kKeyGradientBytes, stream, a);
      }
    }
    using C = mma::Config<kDim>;
    constexpr std::size_t kBytes = C::kKeyGradientElements * sizeof(T);
    launch(op, mma::query_gradient_kernel<T, kDim>, query_blocks(mma::kRows), mma::kThreads,
           C::kQueryGradientElements * sizeof(T), stream, a, packs);
    if constexpr (C::kSplitGradients) {
      launch(op, mma::key_value_gradient_kernel<T, kDim, true, false>, key_blocks(mma::kRows), mma::kThreads, kBytes,
             stream, a, packs);
      launch(op, mma::key_value_gradient_kernel<T, kDim, false, true>, key_blocks(mma::kRows), mma::kThreads, kBytes,
             stream, a, packs);
    } else {
      launch(op, mma::key_value_gradient_kernel<T, kDim, true, true>, key_blocks(mma::kRows), mma::kThreads, kBytes,
             stream, a, packs);
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
