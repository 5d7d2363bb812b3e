// Sums over a block.
#pragma once

namespace rowan::cuda {

/// Sum of one value a thread, over a block of kThreads (a power of two), in a fixed tree; valid in every thread. A
/// second call in one kernel needs a barrier before it, since both use the same shared memory.
template <int kThreads>
__device__ double block_sum(double value) {
  __shared__ double shared[kThreads];
  shared[threadIdx.x] = value;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    __syncthreads();
  }
  return shared[0];
}

}  // namespace rowan::cuda
