#include <algorithm>

#include "core/cuda_check.h"
#include "ops/device_types.cuh"
#include "ops/muon_backend.h"
#include "ops/piece_search.cuh"
#include "rowan/ops/step_control.h"

namespace rowan::cuda {

namespace {

constexpr int kThreads = 256;

__device__ bool skipped(const double* control) { return control != nullptr && control[StepControl::kSkip] != 0; }

__device__ void store(float* to, float x) { *to = x; }
__device__ void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

template <class U>
__global__ void __launch_bounds__(kThreads) prepare_kernel(MuonPrepareArguments a) {
  if (skipped(a.control)) return;
  const float factor = a.control != nullptr ? static_cast<float>(a.control[StepControl::kFactor]) : 1.0f;
  const float mu = static_cast<float>(a.mu);
  const float* const gradient = static_cast<const float*>(a.gradient);
  float* const momentum = static_cast<float*>(a.momentum);
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.elements; i += threads) {
    const float g = factor * gradient[row_offset(i, a.cols, a.gradient_stride)];
    const float m = fmaf(mu, momentum[i], g);
    momentum[i] = m;
    store(static_cast<U*>(a.update) + i, a.nesterov ? fmaf(mu, m, g) : m);
  }
}

template <class U>
__global__ void __launch_bounds__(kThreads) finish_kernel(MuonFinishArguments a) {
  if (skipped(a.control)) return;
  const float decay = static_cast<float>(a.rates[0] * a.rates[1]);
  const float step = static_cast<float>(a.rates[0] * a.scale);
  const std::int64_t threads = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.elements; i += threads) {
    float& weight = static_cast<float*>(a.weight)[row_offset(i, a.cols, a.weight_stride)];
    const float o = to_float(static_cast<const U*>(a.update)[row_offset(i, a.cols, a.update_stride)]);
    const float w = weight - fmaf(step, o, decay * weight);
    weight = w;
    if (a.value == nullptr) continue;
    const std::int64_t offset = row_offset(i, a.cols, a.value_stride);
    if (a.value_dtype == DType::kBFloat16) {
      static_cast<__nv_bfloat16*>(a.value)[offset] = __float2bfloat16_rn(w);
    } else {
      static_cast<__half*>(a.value)[offset] = __float2half_rn(w);
    }
  }
}

unsigned grid_for(std::int64_t elements, StreamRef stream) {
  const std::int64_t blocks = (elements + kThreads - 1) / kThreads;
  return static_cast<unsigned>(std::min<std::int64_t>(blocks, 16 * multiprocessor_count(stream.device())));
}

}  // namespace

void muon_prepare(const MuonPrepareArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  const unsigned grid = grid_for(a.elements, stream);
  if (a.update_dtype == DType::kBFloat16) {
    prepare_kernel<__nv_bfloat16><<<grid, kThreads, 0, to_cuda(stream)>>>(a);
  } else {
    prepare_kernel<float><<<grid, kThreads, 0, to_cuda(stream)>>>(a);
  }
  check_launch("muon_prepare");
}

void muon_finish(const MuonFinishArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  const unsigned grid = grid_for(a.elements, stream);
  if (a.update_dtype == DType::kBFloat16) {
    finish_kernel<__nv_bfloat16><<<grid, kThreads, 0, to_cuda(stream)>>>(a);
  } else {
    finish_kernel<float><<<grid, kThreads, 0, to_cuda(stream)>>>(a);
  }
  check_launch("muon_finish");
}

}  // namespace rowan::cuda
