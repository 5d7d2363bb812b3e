// HeadView on the device.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "ops/device_types.cuh"
#include "ops/head_view.h"

namespace rowan::cuda {

template <class T>
__device__ T* head_pointer(const HeadView& view, std::int64_t row, std::int64_t head) {
  return static_cast<T*>(view.data) + row * view.row_stride + head * view.head_stride;
}

/// Elements of 16 bytes.
template <class T>
constexpr int kPackOf = 16 / static_cast<int>(sizeof(T));

/// Whether a pointer and strides (in elements) allow packs of 16 bytes.
template <class T>
bool allows_packs(const void* data, std::initializer_list<std::int64_t> strides) {
  bool fits = reinterpret_cast<std::uintptr_t>(data) % 16 == 0;
  for (const std::int64_t stride : strides) fits = fits && stride % kPackOf<T> == 0;
  return fits;
}

/// The same for rows of `width` elements in several views.
template <class T>
bool allows_packs(std::int64_t width, std::initializer_list<const HeadView*> views) {
  bool fits = width % kPackOf<T> == 0;
  for (const HeadView* view : views) fits = fits && allows_packs<T>(view->data, {view->row_stride, view->head_stride});
  return fits;
}

template <class T, int kCount>
__device__ Pack<T, kCount> load_pack(const T* address) {
  return *reinterpret_cast<const Pack<T, kCount>*>(address);
}
template <class T, int kCount>
__device__ void store_pack(T* address, const Pack<T, kCount>& pack) {
  *reinterpret_cast<Pack<T, kCount>*>(address) = pack;
}

}  // namespace rowan::cuda
