#include "core/cuda_check.h"
#include "ops/cross_entropy_backend.h"
#include "ops/head_view.cuh"
#include "ops/row_reduce.cuh"
#include "rowan/ops/cross_entropy.h"

namespace rowan::cuda {

namespace {

constexpr int kBlockThreads = 256;
constexpr std::int64_t kClassesOfWarpRows = 1024;  // up to here a warp takes a row, above it a block

__device__ float infinity() { return __int_as_float(0x7F800000); }
__device__ float not_a_number() { return __int_as_float(0x7FC00000); }

/// What is subtracted before exponentials: where all logits so far are -infinity, 0 keeps them 0 instead of NaN.
__device__ float finite_maximum(float maximum) { return maximum == -infinity() ? 0.0f : maximum; }

template <class T, int kThreads, int kPack>
__global__ void __launch_bounds__(kBlockThreads) cross_entropy_kernel(CrossEntropyArguments a) {
  __shared__ float shared[kBlockThreads / 32];
  constexpr int kRows = kBlockThreads / kThreads;
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const auto grad_scale = static_cast<float>(a.grad_scale);
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x / kThreads;
  for (std::int64_t row = first; row < a.rows; row += static_cast<std::int64_t>(gridDim.x) * kRows) {
    const T* const logits = static_cast<const T*>(a.logits) + row * a.logits_stride;
    T* const gradient = a.dlogits == nullptr ? nullptr : static_cast<T*>(a.dlogits) + row * a.dlogits_stride;
    float& loss = static_cast<float*>(a.losses)[row];
    const std::int64_t label = a.labels[row];
    if (label < 0 || label >= a.classes) {
      const float value = label == kIgnoredLabel ? 0.0f : not_a_number();
      if (thread == 0) loss = value;
      if (gradient != nullptr) {
        for (std::int64_t j = thread; j < a.classes; j += kThreads) gradient[j] = from_float<T>(value);
      }
      continue;
    }
    const float target = to_float(logits[label]);  // before the gradient may overwrite it

    float maximum = -infinity(), sum = 0;
    for (std::int64_t j = thread * kPack; j < a.classes; j += kThreads * kPack) {
      const auto in = load_pack<T, kPack>(logits + j);
      float larger = maximum;
#pragma unroll
      for (int i = 0; i < kPack; ++i) larger = fmaxf(larger, to_float(in.value[i]));
      const float base = finite_maximum(larger);
      sum *= expf(maximum - base);
#pragma unroll
      for (int i = 0; i < kPack; ++i) sum += expf(to_float(in.value[i]) - base);
      maximum = larger;
    }
    const float base = finite_maximum(combine_row<kThreads>(maximum, shared, Maximum()));
    sum = combine_row<kThreads>(sum * expf(maximum - base), shared, Sum());
    if (thread == 0) loss = logf(sum) - (target - base);
    if (gradient == nullptr) continue;

    const float inverse = 1.0f / sum;
    for (std::int64_t j = thread * kPack; j < a.classes; j += kThreads * kPack) {
      auto out = load_pack<T, kPack>(logits + j);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        const float probability = expf(to_float(out.value[i]) - base) * inverse;
        out.value[i] = from_float<T>((j + i == label ? probability - 1.0f : probability) * grad_scale);
      }
      store_pack<T, kPack>(gradient + j, out);
    }
  }
}

template <class T, int kThreads>
void launch(const CrossEntropyArguments& a, StreamRef stream) {
  const unsigned blocks = row_blocks(a.rows, kBlockThreads / kThreads);
  const bool packs = a.classes % kPackOf<T> == 0 && allows_packs<T>(a.logits, {a.logits_stride}) &&
                     (a.dlogits == nullptr || allows_packs<T>(a.dlogits, {a.dlogits_stride}));
  if (packs) {
    cross_entropy_kernel<T, kThreads, kPackOf<T>><<<blocks, kBlockThreads, 0, to_cuda(stream)>>>(a);
  } else {
    cross_entropy_kernel<T, kThreads, 1><<<blocks, kBlockThreads, 0, to_cuda(stream)>>>(a);
  }
  check_launch("cross_entropy");
}

}  // namespace

void cross_entropy(const CrossEntropyArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  dispatch_device_type(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.classes <= kClassesOfWarpRows) {
      launch<T, 32>(a, stream);
    } else {
      launch<T, kBlockThreads>(a, stream);
    }
  });
}

}  // namespace rowan::cuda
