// Pieces that the tests of the transformer operations share.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "catch.h"
#include "rowan/core/allocator.h"
#include "rowan/core/error.h"
#include "support/device.h"
#include "support/matrix.h"

extern "C" void omp_set_num_threads(int);
extern "C" int omp_get_max_threads();

namespace rowan::test {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline const std::vector<DType> kCpuDtypes = {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16};
inline const std::vector<DType> kGpuDtypes = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

/// New tensors of the device hold NaN, and writes beyond them are found, while this lives.
class PoisonedMemory {
 public:
  explicit PoisonedMemory(Device device)
      : poison_(std::make_shared<PoisonAllocator>(current_allocator(device))), scope_(poison_) {}
  std::size_t violations() const { return poison_->violations(); }

 private:
  std::shared_ptr<PoisonAllocator> poison_;
  ScopedAllocator scope_;
};

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

inline void check_within(const std::vector<double>& actual, const std::vector<double>& expected,
                         const std::vector<double>& bound) {
  std::string message;
  const bool good = within(actual, expected, bound, &message);
  INFO(message);
  CHECK(good);
}

inline std::vector<double> constant(std::size_t n, double value) { return std::vector<double>(n, value); }

/// Element by element the same bits; NaN equals NaN.
inline bool same_values(const Tensor& a, const Tensor& b, StreamRef stream) {
  const std::vector<double> left = values(a, stream), right = values(b, stream);
  return left.size() == right.size() && std::memcmp(left.data(), right.data(), left.size() * sizeof(double)) == 0;
}

/// Rows apart, the base off by one element, NaN in between. Rank 2 or 3.
inline Tensor apart(const Tensor& t, StreamRef stream, std::int64_t gap = 3) {
  if (t.rank() == 2) return with_gaps(t, gap, 1, stream);
  const std::int64_t columns = t.size(1) * t.size(2);
  return with_gaps(t.reshape({t.size(0), columns}), gap, 1, stream).reshape(t.shape());
}

/// The gradient of a scalar `loss` with respect to a float64 CPU tensor against fourth-order central differences with
/// step h = 1e-3: truncation h^4 / 30 times the fifth derivative and rounding u |loss| / h stay below 1e-9 of the
/// magnitudes at hand.
inline void check_gradient(const std::function<double()>& loss, const Tensor& x, const std::vector<double>& gradient) {
  REQUIRE(x.is_contiguous());
  REQUIRE(gradient.size() == at(x.elements()));
  constexpr double h = 1e-3;
  double* const data = x.data<double>();
  const double magnitude = 1 + std::abs(loss());
  std::vector<double> numeric(gradient.size()), bound(gradient.size());
  for (std::size_t i = 0; i < numeric.size(); ++i) {
    const double before = data[i];
    const auto moved = [&](double step) {
      data[i] = before + step;
      return loss();
    };
    numeric[i] = (8 * (moved(h) - moved(-h)) - (moved(2 * h) - moved(-2 * h))) / (12 * h);
    data[i] = before;
    bound[i] = 1e-9 * (magnitude + std::abs(gradient[i]));
  }
  check_within(gradient, numeric, bound);
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// Runs f with one thread and with four, and returns whether what it produces is the same.
inline bool same_with_any_threads(const std::function<std::vector<double>()>& f) {
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const std::vector<double> one = f();
  omp_set_num_threads(4);
  const std::vector<double> four = f();
  omp_set_num_threads(threads);
  return one.size() == four.size() && std::memcmp(one.data(), four.data(), one.size() * sizeof(double)) == 0;
}

inline void check_throws(ErrorKind kind, const std::string& part, const std::function<void()>& f) {
  try {
    f();
    FAIL_CHECK("expected an error holding: " << part);
  } catch (const Error& error) {
    INFO(error.what());
    CHECK(error.kind() == kind);
    CHECK(std::string(error.what()).find(part) != std::string::npos);
  }
}

inline Tensor ids32(const std::vector<std::int32_t>& ids, StreamRef stream) {
  return Tensor::from_host({static_cast<std::int64_t>(ids.size())}, ids, stream);
}
inline Tensor ids64(const std::vector<std::int64_t>& ids, StreamRef stream) {
  return Tensor::from_host({static_cast<std::int64_t>(ids.size())}, ids, stream);
}

}  // namespace rowan::test
