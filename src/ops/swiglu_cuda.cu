#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "core/cuda_check.h"
#include "ops/head_view.cuh"
#include "ops/piece_search.cuh"
#include "ops/swiglu_backend.h"

namespace rowan::cuda {

namespace {

constexpr int kThreads = 256;

template <class T, int kPack>
__device__ T* pack_address(const SwigluMatrix& m, std::int64_t pack, std::int64_t width) {
  return static_cast<T*>(m.data) + row_offset(pack * kPack, width, m.stride);
}

/// Calls f(index) for `total` packs.
template <class F>
__device__ void for_packs(std::int64_t total, F f) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < total; i += step) f(i);
}

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) forward_kernel(SwigluArguments a) {
  for_packs(a.rows * a.width / kPack, [&](std::int64_t i) {
    const auto gate = load_pack<T, kPack>(pack_address<T, kPack>(a.gate, i, a.width));
    auto up = load_pack<T, kPack>(pack_address<T, kPack>(a.up, i, a.width));
#pragma unroll
    for (int l = 0; l < kPack; ++l) {
      const float g = to_float(gate.value[l]);
      up.value[l] = from_float<T>(to_float(up.value[l]) * (g / (1.0f + expf(-g))));
    }
    store_pack<T, kPack>(pack_address<T, kPack>(a.out, i, a.width), up);
  });
}

template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) backward_kernel(SwigluArguments a) {
  for_packs(a.rows * a.width / kPack, [&](std::int64_t i) {
    auto gate = load_pack<T, kPack>(pack_address<T, kPack>(a.gate, i, a.width));
    auto up = load_pack<T, kPack>(pack_address<T, kPack>(a.up, i, a.width));
    const auto dout = load_pack<T, kPack>(pack_address<T, kPack>(a.dout, i, a.width));
#pragma unroll
    for (int l = 0; l < kPack; ++l) {
      const float g = to_float(gate.value[l]), u = to_float(up.value[l]), d = to_float(dout.value[l]);
      const float p = 1.0f / (1.0f + expf(-g));
      gate.value[l] = from_float<T>(d * u * p * (1.0f + g * (1.0f - p)));
      up.value[l] = from_float<T>(d * g * p);
    }
    store_pack<T, kPack>(pack_address<T, kPack>(a.dgate, i, a.width), gate);
    store_pack<T, kPack>(pack_address<T, kPack>(a.dup, i, a.width), up);
  });
}

template <class T>
bool packable(const SwigluArguments& a, std::initializer_list<const SwigluMatrix*> matrices) {
  bool fits = a.width % kPackOf<T> == 0;
  for (const SwigluMatrix* m : matrices) fits = fits && allows_packs<T>(m->data, {m->stride});
  return fits;
}

unsigned blocks_for(std::int64_t packs, StreamRef stream) {
  return static_cast<unsigned>(
      std::min<std::int64_t>((packs + kThreads - 1) / kThreads, 32 * multiprocessor_count(stream.device())));
}

}  // namespace

void swiglu_forward(const SwigluArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  dispatch_device_type(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kPack = kPackOf<T>;
    const std::int64_t elements = a.rows * a.width;
    if (packable<T>(a, {&a.gate, &a.up, &a.out})) {
      forward_kernel<T, kPack><<<blocks_for(elements / kPack, stream), kThreads, 0, to_cuda(stream)>>>(a);
    } else {
      forward_kernel<T, 1><<<blocks_for(elements, stream), kThreads, 0, to_cuda(stream)>>>(a);
    }
    check_launch("swiglu_forward");
  });
}

void swiglu_backward(const SwigluArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  dispatch_device_type(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kPack = kPackOf<T>;
    const std::int64_t elements = a.rows * a.width;
    if (packable<T>(a, {&a.gate, &a.up, &a.dout, &a.dgate, &a.dup})) {
      backward_kernel<T, kPack><<<blocks_for(elements / kPack, stream), kThreads, 0, to_cuda(stream)>>>(a);
    } else {
      backward_kernel<T, 1><<<blocks_for(elements, stream), kThreads, 0, to_cuda(stream)>>>(a);
    }
    check_launch("swiglu_backward");
  });
}

}  // namespace rowan::cuda
