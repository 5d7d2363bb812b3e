#include "support/compare.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace rowan::test {

namespace {

template <class T>
void append(const Tensor& t, StreamRef stream, std::vector<double>& out) {
  for (const T& v : t.to_vector<T>(stream)) out.push_back(static_cast<double>(v));
}

template <class T>
Tensor make(const Shape& shape, const std::vector<double>& values, StreamRef stream) {
  std::vector<T> typed;
  typed.reserve(values.size());
  for (const double v : values) typed.push_back(static_cast<T>(v));
  return Tensor::from_host(shape, typed, stream);
}

Tensor from_doubles(const Shape& shape, DType dtype, const std::vector<double>& values, StreamRef stream) {
  switch (dtype) {
    case DType::kFloat64:
      return make<double>(shape, values, stream);
    case DType::kFloat32:
      return make<float>(shape, values, stream);
    case DType::kBFloat16:
      return make<BFloat16>(shape, values, stream);
    case DType::kFloat16:
      return make<Float16>(shape, values, stream);
    case DType::kInt64:
      return make<std::int64_t>(shape, values, stream);
    case DType::kInt32:
      return make<std::int32_t>(shape, values, stream);
  }
  throw std::logic_error("unknown dtype");
}

}  // namespace

Tensor random_normal(const Shape& shape, DType dtype, std::uint64_t seed, StreamRef stream, double scale) {
  Rng rng(seed);
  std::vector<double> drawn(static_cast<std::size_t>(shape.elements()));
  for (double& v : drawn) v = scale * rng.normal();
  return from_doubles(shape, dtype, drawn, stream);
}

std::vector<double> values(const Tensor& t, StreamRef stream) {
  std::vector<double> out;
  out.reserve(static_cast<std::size_t>(t.elements()));
  switch (t.dtype()) {
    case DType::kFloat64:
      append<double>(t, stream, out);
      break;
    case DType::kFloat32:
      append<float>(t, stream, out);
      break;
    case DType::kBFloat16:
      append<BFloat16>(t, stream, out);
      break;
    case DType::kFloat16:
      append<Float16>(t, stream, out);
      break;
    case DType::kInt64:
      append<std::int64_t>(t, stream, out);
      break;
    case DType::kInt32:
      append<std::int32_t>(t, stream, out);
      break;
  }
  return out;
}

Tensor to_float64(const Tensor& t, StreamRef stream) { return convert(t, DType::kFloat64, stream, StreamRef()); }

Tensor convert(const Tensor& t, DType dtype, StreamRef from, StreamRef to) {
  return from_doubles(t.shape(), dtype, values(t, from), to);
}

Difference difference(const std::vector<double>& a, const std::vector<double>& b) {
  Difference d;
  const double infinity = std::numeric_limits<double>::infinity();
  if (a.size() != b.size()) {
    d.max_absolute = d.relative_frobenius = infinity;
    return d;
  }
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const double gap = (a[i] == b[i]) || (std::isnan(a[i]) && std::isnan(b[i])) ? 0.0 : std::abs(a[i] - b[i]);
    d.max_absolute = std::max(d.max_absolute, std::isnan(gap) ? infinity : gap);
    d.max_reference = std::max(d.max_reference, std::abs(b[i]));
    error += gap * gap;
    norm += b[i] * b[i];
  }
  d.relative_frobenius = error == 0 ? 0 : std::sqrt(error / norm);
  if (std::isnan(d.relative_frobenius)) d.relative_frobenius = infinity;
  return d;
}

bool within(const std::vector<double>& a, const std::vector<double>& b, const std::vector<double>& bound,
            std::string* message) {
  if (a.size() != b.size() || a.size() != bound.size()) {
    if (message) *message = "sizes differ";
    return false;
  }
  std::size_t worst = a.size(), count = 0;
  double worst_ratio = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
    const double gap = std::abs(a[i] - b[i]);
    if (gap <= bound[i]) continue;
    ++count;
    const double ratio = std::isnan(gap) || bound[i] == 0 ? std::numeric_limits<double>::infinity() : gap / bound[i];
    if (worst == a.size() || ratio > worst_ratio) {
      worst = i;
      worst_ratio = ratio;
    }
  }
  if (count == 0) return true;
  if (message) {
    *message = std::to_string(count) + " of " + std::to_string(a.size()) + " elements beyond the bound; worst at " +
               std::to_string(worst) + ": got " + std::to_string(a[worst]) + ", expected " + std::to_string(b[worst]) +
               " +- " + std::to_string(bound[worst]);
  }
  return false;
}

double ulp(DType dtype, double x) {
  int digits = 0, least = 0;  // significand bits, exponent of the smallest subnormal
  switch (dtype) {
    case DType::kFloat64:
      digits = 53, least = -1074;
      break;
    case DType::kFloat32:
      digits = 24, least = -149;
      break;
    case DType::kBFloat16:
      digits = 8, least = -133;
      break;
    case DType::kFloat16:
      digits = 11, least = -24;
      break;
    default:
      return 1;
  }
  if (x == 0 || !std::isfinite(x)) return std::ldexp(1.0, least);
  return std::ldexp(1.0, std::max(std::ilogb(x) - digits + 1, least));
}

}  // namespace rowan::test
