// Pieces that the CPU backends share.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/dispatch.h"
#include "ops/float_exp.h"

namespace rowan::detail {

/// Element-wise arithmetic of a dtype: float, as in the CUDA kernels; double for float64.
template <class T>
using ComputeType = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// What per-row statistics and accumulated gradients of a dtype are stored as.
template <class T>
using StatisticType = ComputeType<T>;

/// f(0) + … + f(n - 1) in double, as eight interleaved sums: a fixed order that compilers can vectorise.
template <class F>
double lane_sum(std::int64_t n, F&& f) {
  double lanes[8] = {};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int l = 0; l < 8; ++l) lanes[l] += static_cast<double>(f(i + l));
  }
  for (int l = 0; i < n; ++i, ++l) lanes[l] += static_cast<double>(f(i));
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/// The largest of n >= 1 values; NaN is passed over (sums of exponentials see it).
template <class C>
C lane_max(std::int64_t n, const C* values) {
  C lanes[8];
  for (C& lane : lanes) lane = values[0];
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int l = 0; l < 8; ++l) lanes[l] = select(values[i + l] > lanes[l], values[i + l], lanes[l]);
  }
  for (; i < n; ++i) lanes[0] = values[i] > lanes[0] ? values[i] : lanes[0];
  for (int l = 1; l < 8; ++l) lanes[0] = lanes[l] > lanes[0] ? lanes[l] : lanes[0];
  return lanes[0];
}

template <class To, class From>
void convert_row(const From* from, To* to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = convert<To>(from[i]);
}

}  // namespace rowan::detail
