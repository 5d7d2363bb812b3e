#include <cstdint>

#include "core/cuda_check.h"
#include "ops/attention_cached_backend.h"
#include "ops/device_types.cuh"
#include "ops/head_view.cuh"
#include "ops/row_reduce.cuh"
#include "rowan/ops/attention.h"

namespace rowan::cuda {

namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

/// A part of a softmax-weighted sum, relative to the largest score it met; a lane holds elements lane, lane + 32, … of
/// a head of up to 32 kPerLane.
template <int kPerLane>
struct Partial {
  float maximum = -INFINITY;
  float sum = 0;
  float out[kPerLane] = {};

  /// Adds `weight` exp(score) times a value.
  __device__ void add(float score, float weight, const float (&value)[kPerLane]) {
    const float largest = fmaxf(maximum, score);
    // Where all scores are -infinity, 0 keeps the exponentials 0 instead of NaN.
    const float base = largest == __int_as_float(0xFF800000) ? 0.0f : largest;
    const float shrink = expf(maximum - base), factor = expf(score - base);
    maximum = largest;
    sum = sum * shrink + weight * factor;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) out[i] = out[i] * shrink + factor * value[i];
  }
};

template <int kPerLane, class T>
__device__ void load(float (&to)[kPerLane], const T* from, int lane, std::int64_t head_dim) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) to[i] = lane + 32 * i < head_dim ? to_float(from[lane + 32 * i]) : 0.0f;
}

/// One block a query and head: its warps take the keys in turn, then the first joins what they have, in order.
template <class T, int kPerLane>
__global__ void __launch_bounds__(kThreads) cached_kernel(AttentionCachedArguments a) {
  const std::int64_t query = blockIdx.x / a.query_heads, head = blockIdx.x % a.query_heads;
  const std::int64_t key_head = head / (a.query_heads / a.key_heads), visible = a.keys - a.queries + query + 1;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto scale = static_cast<float>(a.scale);
  float q[kPerLane], value[kPerLane];
  load(q, head_pointer<T>(a.q, query, head), lane, a.head_dim);
  Partial<kPerLane> mine;
  for (std::int64_t j = warp; j < visible; j += kWarps) {
    load(value, head_pointer<T>(a.k, j, key_head), lane, a.head_dim);
    float score = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score += q[i] * value[i];
    score = combine_lanes<32>(score, Sum()) * scale;
    load(value, head_pointer<T>(a.v, j, key_head), lane, a.head_dim);
    mine.add(score, 1.0f, value);
  }

  __shared__ float maxima[kWarps], sums[kWarps], outs[kWarps][32 * kPerLane];
  if (lane == 0) maxima[warp] = mine.maximum, sums[warp] = mine.sum;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) outs[warp][lane + 32 * i] = mine.out[i];
  __syncthreads();
  if (warp != 0) return;
  Partial<kPerLane> total;
  for (int w = 0; w < kWarps && w < visible; ++w) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) value[i] = outs[w][lane + 32 * i];
    total.add(maxima[w], sums[w], value);
  }
  T* const out = head_pointer<T>(a.out, query, head);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    if (lane + 32 * i < a.head_dim) out[lane + 32 * i] = from_float<T>(total.out[i] / total.sum);
  }
}

}  // namespace

void attention_cached(const AttentionCachedArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  const auto blocks = static_cast<unsigned>(a.queries * a.query_heads);
  dispatch_device_type(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.head_dim <= 64) {
      cached_kernel<T, 2><<<blocks, kThreads, 0, to_cuda(stream)>>>(a);
    } else if (a.head_dim <= 128) {
      cached_kernel<T, 4><<<blocks, kThreads, 0, to_cuda(stream)>>>(a);
    } else {
      cached_kernel<T, kMaxAttentionHeadDim / 32><<<blocks, kThreads, 0, to_cuda(stream)>>>(a);
    }
  });
  check_launch("attention_cached");
}

}  // namespace rowan::cuda
