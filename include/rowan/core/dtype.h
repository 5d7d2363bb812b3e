// Element types.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rowan/core/half.h"

namespace rowan {

/// Element type of a Tensor. Operations compute in float64 on the CPU only (oracles and
/// gradient checks); on CUDA float64 tensors hold step values and sums.
enum class DType : std::uint8_t { kFloat64, kFloat32, kBFloat16, kFloat16, kInt64, kInt32 };

/// Bytes of one element.
std::size_t size_of(DType dtype) noexcept;
/// "float32", "bfloat16", … as PyTorch and Transformers spell them.
const char* to_string(DType dtype) noexcept;
bool is_floating(DType dtype) noexcept;
/// Unit roundoff u (half an ulp of 1): 2^-53, 2^-24, 2^-8, 2^-11. Zero for integers.
double unit_roundoff(DType dtype) noexcept;

template <class T>
struct dtype_of;  // only the types below are element types
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::kFloat64;
};
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct dtype_of<BFloat16> {
  static constexpr DType value = DType::kBFloat16;
};
template <>
struct dtype_of<Float16> {
  static constexpr DType value = DType::kFloat16;
};
template <>
struct dtype_of<std::int64_t> {
  static constexpr DType value = DType::kInt64;
};
template <>
struct dtype_of<std::int32_t> {
  static constexpr DType value = DType::kInt32;
};

}  // namespace rowan
