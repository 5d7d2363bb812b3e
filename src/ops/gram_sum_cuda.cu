#include "core/cuda_check.h"
#include "ops/block_sum.cuh"
#include "ops/device_types.cuh"
#include "ops/gram_sum_backend.h"

namespace rowan::cuda {

namespace {

constexpr int kThreads = 256;

/// One block a matrix: the matrices here are a step's row maxima, or Muon's shards.
template <class T>
__global__ void __launch_bounds__(kThreads) largest_kernel(const NewtonSchulzMatrix t, float* largest) {
  __shared__ float shared[kThreads];
  const T* const matrix = static_cast<const T*>(t.data) + blockIdx.x * t.batch_stride;
  float most = 0;
  for (std::int64_t i = threadIdx.x; i < t.rows * t.cols; i += kThreads) {
    const std::int64_t row = i / t.cols;
    most = fmaxf(most, fabsf(to_float(matrix[row * t.row_stride + i - row * t.cols])));
  }
  shared[threadIdx.x] = most;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) shared[threadIdx.x] = fmaxf(shared[threadIdx.x], shared[threadIdx.x + half]);
    __syncthreads();
  }
  if (threadIdx.x == 0) largest[blockIdx.x] = shared[0];
}

__global__ void __launch_bounds__(kThreads) power_kernel(const float* largest, std::int64_t count, double* powers) {
  const std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x;
  if (i < count) powers[i] = detail::gram_power(largest[i]);
}

__global__ void __launch_bounds__(kThreads) norm_kernel(const GramNormArguments a) {
  const float* const gram = a.gram + blockIdx.x * a.side * a.side;
  double trace = 0;
  for (std::int64_t i = threadIdx.x; i < a.side; i += kThreads) trace += gram[i * a.side + i];
  trace = block_sum<kThreads>(trace);
  if (threadIdx.x != 0) return;
  const double nu = a.factor * sqrt(trace) + detail::gram_power(a.largest[blockIdx.x]) * a.epsilon;
  a.inverse[blockIdx.x] = nu == 0 ? 0.0 : 1 / nu;
  a.inverse_square[blockIdx.x] = a.inverse[blockIdx.x] * a.inverse[blockIdx.x];
}

}  // namespace

void gram_largest(const NewtonSchulzMatrix& t, float* largest, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  const auto blocks = static_cast<unsigned>(t.batches);
  if (t.dtype == DType::kFloat32) {
    largest_kernel<float><<<blocks, kThreads, 0, to_cuda(stream)>>>(t, largest);
  } else {
    largest_kernel<__nv_bfloat16><<<blocks, kThreads, 0, to_cuda(stream)>>>(t, largest);
  }
  check_launch("newton_schulz");
}

void gram_powers(const float* largest, std::int64_t count, double* powers, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  power_kernel<<<blocks, kThreads, 0, to_cuda(stream)>>>(largest, count, powers);
  check_launch("newton_schulz");
}

void gram_norms(const GramNormArguments& arguments, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  norm_kernel<<<static_cast<unsigned>(arguments.batches), kThreads, 0, to_cuda(stream)>>>(arguments);
  check_launch("newton_schulz");
}

}  // namespace rowan::cuda
