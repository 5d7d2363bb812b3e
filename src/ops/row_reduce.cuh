// Sums and maxima over the threads that share a row, in a fixed order.
#pragma once

#include <cstdint>

namespace rowan::cuda {

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Maximum {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

/// Combines the values of `kLanes` (a power of two up to 32) neighbouring lanes; each of them gets the result.
template <int kLanes, class Combine>
__device__ float combine_lanes(float value, Combine combine) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = combine(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
  }
  return value;
}

/// Combines the values of all threads of a row: a warp (kThreads = 32), or a whole block of kThreads (a power of two)
/// with `shared` of kThreads / 32 floats. Every thread gets the result.
template <int kThreads, class Combine>
__device__ float combine_row(float value, float* shared, Combine combine) {
  value = combine_lanes<32>(value, combine);
  if constexpr (kThreads > 32) {
    constexpr int kWarps = kThreads / 32;
    __syncthreads();  // the values of an earlier call are read
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = combine_lanes<kWarps>(shared[threadIdx.x % kWarps], combine);
  }
  return value;
}

/// Blocks for `rows` rows, `rows_per_block` at a time; kernels stride over what is beyond.
inline unsigned row_blocks(std::int64_t rows, std::int64_t rows_per_block) {
  constexpr std::int64_t kMostBlocks = 1 << 20;
  const std::int64_t wanted = (rows + rows_per_block - 1) / rows_per_block;
  return static_cast<unsigned>(wanted < kMostBlocks ? wanted : kMostBlocks);
}

}  // namespace rowan::cuda
