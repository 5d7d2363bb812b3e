// 16-bit floating-point storage types for host code. Bit-compatible with CUDA's __nv_bfloat16 and __half.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace rowan {

namespace detail {

/// Nearest float below |x| in magnitude with the last bit set when inexact ("round to odd"): rounding the result once
/// more to a format of at most 22 significand bits equals rounding x directly.
inline float round_to_odd(double x) noexcept {
  const float nearest = static_cast<float>(x);
  if (!(std::isfinite(nearest)) && std::isfinite(x))
    return nearest;  // beyond float's range: rounds to infinity in 16 bits too
  const double back = nearest;
  if (back == x || std::isnan(x)) return nearest;
  auto bits = std::bit_cast<std::uint32_t>(nearest);
  const bool away = (x > 0) ? back > x : back < x;
  if (away) bits -= 1;  // toward zero; nearest is not zero, since |nearest| > |x|
  return std::bit_cast<float>(bits | 1u);
}

inline std::uint16_t bfloat16_bits(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (std::isnan(x)) return static_cast<std::uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline std::uint16_t float16_bits(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  if (magnitude >= 0x477FF000u) return static_cast<std::uint16_t>(sign | 0x7C00u);  // >= 65520 rounds to infinity
  if (magnitude < 0x38800000u) {                                                    // below 2^-14: subnormal or zero
    // Adding 0.5 aligns the value so that its last kept bit is 2^-24, rounded to nearest even by the addition itself.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3F000000u));
  }
  const std::uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<std::uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

inline float float16_value(std::uint16_t h) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1Fu;
  const std::uint32_t fraction = h & 0x3FFu;
  if (exponent == 0) {  // zero or subnormal: fraction * 2^-24, exact in float
    const float value = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  const std::uint32_t high = exponent == 31 ? 0x7F800000u : (exponent + 112u) << 23;
  return std::bit_cast<float>(sign | high | (fraction << 13));
}

}  // namespace detail

/// bfloat16: conversions round to nearest even, once, also from double.
struct BFloat16 {
  std::uint16_t bits = 0;
  BFloat16() = default;
  explicit BFloat16(float x) noexcept : bits(detail::bfloat16_bits(x)) {}
  explicit BFloat16(double x) noexcept : bits(detail::bfloat16_bits(detail::round_to_odd(x))) {}
  explicit operator float() const noexcept { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
  explicit operator double() const noexcept { return static_cast<float>(*this); }
};

/// IEEE binary16: conversions round to nearest even, once, also from double; subnormals are kept.
struct Float16 {
  std::uint16_t bits = 0;
  Float16() = default;
  explicit Float16(float x) noexcept : bits(detail::float16_bits(x)) {}
  explicit Float16(double x) noexcept : bits(detail::float16_bits(detail::round_to_odd(x))) {}
  explicit operator float() const noexcept { return detail::float16_value(bits); }
  explicit operator double() const noexcept { return static_cast<float>(*this); }
};

}  // namespace rowan
