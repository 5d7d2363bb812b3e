// Element types on the device, and the way from a run-time dtype to them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <utility>

#include "rowan/core/dtype.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

/// One rounding to nearest even.
template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

template <class T>
struct DeviceTypeTag {
  using type = T;
};

/// Calls f(DeviceTypeTag<T>{}) for the device's element type of float32, bfloat16 or float16.
template <class F>
void dispatch_device_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return std::forward<F>(f)(DeviceTypeTag<float>{});
    case DType::kBFloat16:
      return std::forward<F>(f)(DeviceTypeTag<__nv_bfloat16>{});
    case DType::kFloat16:
      return std::forward<F>(f)(DeviceTypeTag<__half>{});
    default:
      throw Error(ErrorKind::kUnsupported, "expected float32, bfloat16 or float16 on CUDA");
  }
}

/// `kCount` adjacent elements that move in one access where their address allows it.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T value[kCount];
};

}  // namespace rowan::cuda
