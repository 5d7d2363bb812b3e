// Address and strides of a tensor [M, heads, d] with unit last stride, as backends take it. [M, d] counts as one head.
#pragma once

#include <cstdint>

namespace rowan {

struct HeadView {
  void* data = nullptr;  ///< inputs too; backends treat those as const
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;

  template <class T>
  const T* at(std::int64_t row, std::int64_t head) const {
    return static_cast<const T*>(data) + row * row_stride + head * head_stride;
  }
  template <class T>
  T* at_mutable(std::int64_t row, std::int64_t head) const {
    return static_cast<T*>(data) + row * row_stride + head * head_stride;
  }
};

}  // namespace rowan
