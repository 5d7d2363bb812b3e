// exp in single precision that compilers vectorise (libm's is called one value at a time without -ffast-math).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace rowan::detail {

/// `condition ? a : b` without a branch: g++ turns chained conditionals into jumps, and then vectorises nothing.
template <class C>
inline C select(bool condition, C a, C b) noexcept {
  using Bits = std::conditional_t<std::is_same_v<C, float>, std::uint32_t, std::uint64_t>;
  const Bits mask = Bits{0} - static_cast<Bits>(condition);
  return std::bit_cast<C>((std::bit_cast<Bits>(a) & mask) | (std::bit_cast<Bits>(b) & ~mask));
}

/// exp(x) within 1 ulp for all x (tests/ops/float_exp_test.cpp), infinities, NaN and subnormal results included. The
/// method is that of Cephes' expf: x = n ln 2 + r, a polynomial in r, scaling by 2^n.
inline float vector_exp(float x) noexcept {
  x = select(x < -104.0f, -104.0f, x);  // NaN stays
  x = select(x > 89.0f, 89.0f, x);
  // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
  const float shifted = x * 1.44269504088896341f + 12582912.0f;
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  // 2^n in two factors: n may lie outside the range of one exponent.
  const std::int32_t exponent = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(shifted) - 0x4B400000u);
  const std::int32_t half = exponent >> 1;
  const auto power = [](std::int32_t e) { return std::bit_cast<float>((static_cast<std::uint32_t>(e) + 127u) << 23); };
  return p * power(half) * power(exponent - half);
}

/// The exponential that a CPU backend uses for its arithmetic type.
inline float exponential(float x) noexcept { return vector_exp(x); }
inline double exponential(double x) noexcept { return std::exp(x); }

}  // namespace rowan::detail
