// Small host matrices in float64: the oracle of matrix operations, and awkward memory layouts to feed them with.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "rowan/core/tensor.h"
#include "support/compare.h"

namespace rowan::test {

struct Matrix {
  std::int64_t rows = 0, cols = 0;
  std::vector<double> v;

  Matrix() = default;
  Matrix(std::int64_t r, std::int64_t c) : rows(r), cols(c), v(static_cast<std::size_t>(r * c)) {}
  double& at(std::int64_t i, std::int64_t j) { return v[static_cast<std::size_t>(i * cols + j)]; }
  double at(std::int64_t i, std::int64_t j) const { return v[static_cast<std::size_t>(i * cols + j)]; }
};

inline Matrix host(const Tensor& t, StreamRef stream) {
  Matrix m(t.size(0), t.size(1));
  m.v = values(t, stream);
  return m;
}

template <class F>
Matrix map(const Matrix& m, const F& f) {
  Matrix out = m;
  for (double& x : out.v) x = f(x);
  return out;
}
inline Matrix absolute(const Matrix& m) {
  return map(m, [](double x) { return std::abs(x); });
}
inline Matrix scaled(const Matrix& m, double s) {
  return map(m, [s](double x) { return s * x; });
}
inline Matrix transposed(const Matrix& m) {
  Matrix out(m.cols, m.rows);
  for (std::int64_t i = 0; i < m.rows; ++i) {
    for (std::int64_t j = 0; j < m.cols; ++j) out.at(j, i) = m.at(i, j);
  }
  return out;
}
inline Matrix sum(const Matrix& a, const Matrix& b) {
  Matrix out = a;
  for (std::size_t i = 0; i < out.v.size(); ++i) out.v[i] += b.v[i];
  return out;
}
inline Matrix times(const Matrix& a, const Matrix& b) {
  Matrix out(a.rows, b.cols);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t k = 0; k < a.cols; ++k) {
      const double x = a.at(i, k);
      for (std::int64_t j = 0; j < b.cols; ++j) out.at(i, j) += x * b.at(k, j);
    }
  }
  return out;
}

/// How much a sum of `terms` products may be off after accumulation in float32 (float64 for float64): 4 u sqrt(terms)
/// times the sum of the products' magnitudes. For sums of zero or one terms the product's own rounding remains.
inline double sum_error(DType accumulator, std::int64_t terms, double magnitude) {
  return 4 * unit_roundoff(accumulator) * std::sqrt(static_cast<double>(terms) + 1) * magnitude;
}
inline DType accumulator(DType dtype) { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

/// The error of a value that carries `error` from before and is rounded to `dtype`: that plus one ulp, taken where the
/// value may lie.
inline double rounded_error(DType dtype, double value, double error) {
  return error + ulp(dtype, std::abs(value) + error);
}

/// The same values in rows of `gap` spare elements, beginning `offset` elements into an allocation; all other elements
/// are NaN.
inline Tensor with_gaps(const Tensor& t, std::int64_t gap, std::int64_t offset, StreamRef stream) {
  const std::int64_t rows = t.size(0), cols = t.size(1), stride = cols + gap;
  std::vector<double> filler(static_cast<std::size_t>(offset + rows * stride), std::nan(""));
  const Tensor poison = Tensor::from_host({static_cast<std::int64_t>(filler.size())}, filler, StreamRef());
  const Tensor buffer = convert(poison, t.dtype(), StreamRef(), stream);
  const Tensor view = buffer.slice(0, offset, offset + rows * stride).reshape({rows, stride}).slice(1, 0, cols);
  view.copy_from(t, stream);
  return view;
}

/// The same values as a transposed view of [cols, rows] storage.
inline Tensor stored_transposed(const Tensor& t, StreamRef stream) {
  return t.transpose(0, 1).clone(stream).transpose(0, 1);
}

}  // namespace rowan::test
