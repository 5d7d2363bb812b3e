// The LoRA primitives in float64 on the host, with what a dtype's result may be off by.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "rowan/core/rng.h"
#include "rowan/ops/dropout.h"
#include "support/matrix.h"

namespace rowan::test {

/// A matrix and a bound for the error of each element.
struct Estimate {
  Matrix exact, error;
};

/// Values that are stored as they are.
inline Estimate stored(const Matrix& m) { return {m, Matrix(m.rows, m.cols)}; }

/// mask o m, with the factor 1 / (1 - p).
inline Matrix masked(const Matrix& m, const DropoutMask& mask) {
  Matrix out = m;
  for (std::size_t i = 0; i < out.v.size(); ++i) {
    const bool keep = philox(mask.seed, i / 4, mask.offset).word[i % 4] >= mask.p * 0x1p32;
    out.v[i] = mask.p == 0 ? m.v[i] : keep ? m.v[i] / (1 - mask.p) : 0.0;
  }
  return out;
}
inline Estimate masked(const Estimate& e, const DropoutMask* mask) {
  return mask ? Estimate{masked(e.exact, *mask), masked(e.error, *mask)} : e;
}

/// scale a b where both carry errors and sums are taken in `sums`; no rounding of the result.
inline Estimate product(const Estimate& a, const Estimate& b, double scale, DType sums) {
  Estimate out{scaled(times(a.exact, b.exact), scale), {}};
  const Matrix magnitude = times(absolute(a.exact), absolute(b.exact));
  const Matrix carried =
      sum(sum(times(a.error, absolute(b.exact)), times(absolute(a.exact), b.error)), times(a.error, b.error));
  out.error = Matrix(out.exact.rows, out.exact.cols);
  for (std::size_t i = 0; i < out.error.v.size(); ++i) {
    out.error.v[i] = std::abs(scale) * (carried.v[i] + sum_error(sums, a.exact.cols, magnitude.v[i] + carried.v[i]));
  }
  return out;
}
inline Estimate plus(const Estimate& a, const Estimate& b) { return {sum(a.exact, b.exact), sum(a.error, b.error)}; }
inline Estimate transposed(const Estimate& e) { return {transposed(e.exact), transposed(e.error)}; }

/// The result after one rounding.
inline Estimate rounded(Estimate e, DType dtype) {
  for (std::size_t i = 0; i < e.error.v.size(); ++i) e.error.v[i] = rounded_error(dtype, e.exact.v[i], e.error.v[i]);
  return e;
}

/// Whether a tensor lies within an estimate; `message` tells where not.
inline bool agrees(const Tensor& t, const Estimate& e, StreamRef stream, std::string* message) {
  return within(values(t, stream), e.exact.v, e.error.v, message);
}

inline Estimate shrink_estimate(const Matrix& wide, const Matrix& factor, double scale, DType dtype,
                                const DropoutMask* mask = nullptr) {
  return rounded(product(masked(stored(wide), mask), transposed(stored(factor)), scale, accumulator(dtype)), dtype);
}
inline Estimate expand_estimate(const Estimate& narrow, const Matrix& factor, DType dtype, DType out_dtype,
                                const Matrix* before = nullptr, const DropoutMask* mask = nullptr) {
  Estimate e = masked(product(narrow, stored(factor), 1, accumulator(dtype)), mask);
  if (before) e = plus(e, stored(*before));
  return rounded(e, out_dtype);
}
inline Estimate reduce_estimate(const Estimate& narrow, const Matrix& wide, DType dtype, const Matrix* before = nullptr,
                                const DropoutMask* mask = nullptr) {
  Estimate e = product(transposed(narrow), masked(stored(wide), mask), 1, accumulator(dtype));
  if (before) e = plus(e, stored(*before));
  return rounded(e, accumulator(dtype));
}

}  // namespace rowan::test
