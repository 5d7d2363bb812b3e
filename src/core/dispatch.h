// From a run-time dtype to a compile-time element type.
#pragma once

#include <type_traits>
#include <utility>

#include "rowan/core/dtype.h"
#include "rowan/core/error.h"

namespace rowan::detail {

template <class T>
struct TypeTag {
  using type = T;
};

/// Calls f(TypeTag<T>{}) for the element type of a floating dtype: `[&](auto tag) { using T = typename
/// decltype(tag)::type; … }`.
template <class F>
decltype(auto) dispatch_floating(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat64:
      return std::forward<F>(f)(TypeTag<double>{});
    case DType::kFloat32:
      return std::forward<F>(f)(TypeTag<float>{});
    case DType::kBFloat16:
      return std::forward<F>(f)(TypeTag<BFloat16>{});
    case DType::kFloat16:
      return std::forward<F>(f)(TypeTag<Float16>{});
    default:
      throw Error(ErrorKind::kInvalidArgument, "expected a floating dtype");
  }
}

/// Element to arithmetic type and back, one rounding each way.
template <class To, class From>
inline To convert(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else {
    return static_cast<To>(value);
  }
}

}  // namespace rowan::detail
