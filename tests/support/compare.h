// Random inputs, float64 copies and error bounds.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "rowan/core/rng.h"
#include "rowan/core/tensor.h"

namespace rowan::test {

/// Standard normal values times `scale`, rounded to the dtype, on the stream's device.
Tensor random_normal(const Shape& shape, DType dtype, std::uint64_t seed, StreamRef stream, double scale = 1.0);

/// Every element as double, in row-major order; any floating dtype, device and strides.
std::vector<double> values(const Tensor& t, StreamRef stream);

/// A float64 CPU tensor with the same values.
Tensor to_float64(const Tensor& t, StreamRef stream);

/// The same values on another device or in another dtype (one rounding), contiguous.
Tensor convert(const Tensor& t, DType dtype, StreamRef from, StreamRef to);

struct Difference {
  double max_absolute = 0;        ///< max |a - b|; infinity when one is NaN and the other is not, or shapes differ
  double max_reference = 0;       ///< max |b|
  double relative_frobenius = 0;  ///< ||a - b|| / ||b||
};
Difference difference(const std::vector<double>& a, const std::vector<double>& b);

/// True when |a - b| <= bound elementwise (NaN equals NaN; infinities must match); on failure `message` tells the worst
/// element.
bool within(const std::vector<double>& a, const std::vector<double>& b, const std::vector<double>& bound,
            std::string* message = nullptr);

/// One ulp of the dtype at |x| (the spacing of its numbers there; the smallest subnormal at 0).
double ulp(DType dtype, double x);

}  // namespace rowan::test
