#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "catch.h"
#include "rowan/core/dtype.h"
#include "rowan/core/rng.h"

using rowan::BFloat16;
using rowan::Float16;

namespace {

/// Every finite value of a 16-bit format with its bits, by its definition; positive half.
std::vector<double> grid(int exponent_bits, int fraction_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  std::vector<double> all;
  for (int e = 0; e < (1 << exponent_bits) - 1; ++e) {
    for (int f = 0; f < (1 << fraction_bits); ++f) {
      const double significand = std::ldexp(f, -fraction_bits) + (e > 0 ? 1 : 0);
      all.push_back(std::ldexp(significand, (e > 0 ? e : 1) - bias));
    }
  }
  return all;
}

template <class Half>
void check_rounding(const std::vector<double>& values) {
  int wrong = 0;
  for (std::size_t bits = 0; bits < values.size(); ++bits) {
    const double here = values[bits];
    Half exact;
    exact.bits = static_cast<std::uint16_t>(bits);
    wrong += static_cast<double>(exact) != here;
    wrong += Half(here).bits != bits;
    wrong += Half(-here).bits != (bits | 0x8000u);
    if (bits + 1 == values.size()) break;
    const double middle = here + (values[bits + 1] - here) / 2;
    const auto even = static_cast<std::uint16_t>((bits % 2 == 0) ? bits : bits + 1);
    wrong += Half(middle).bits != even;
    wrong += Half(std::nextafter(middle, 0.0)).bits != bits;  // a double closer to one side by the last bit: a detour
    wrong += Half(std::nextafter(middle, 1e300)).bits != bits + 1;  // through float would round it to the middle first
    wrong += Half(static_cast<float>(middle)).bits != even;
  }
  CHECK(wrong == 0);
}

}  // namespace

TEST_CASE("bfloat16 rounds float and double to nearest even in one step") { check_rounding<BFloat16>(grid(8, 7)); }

TEST_CASE("float16 rounds float and double to nearest even in one step, subnormals included") {
  check_rounding<Float16>(grid(5, 10));
}

TEST_CASE("16-bit formats carry infinities, overflow and NaN") {
  const double infinity = std::numeric_limits<double>::infinity();
  CHECK(static_cast<double>(BFloat16(infinity)) == infinity);
  CHECK(static_cast<double>(Float16(-infinity)) == -infinity);
  CHECK(static_cast<double>(Float16(65519.999)) == 65504);
  CHECK(static_cast<double>(Float16(65520.0)) == infinity);
  CHECK(static_cast<double>(Float16(1e300)) == infinity);
  CHECK(static_cast<double>(BFloat16(1e300)) == infinity);
  CHECK(std::isnan(static_cast<double>(BFloat16(std::nan("")))));
  CHECK(std::isnan(static_cast<float>(Float16(std::nanf("")))));
  CHECK(static_cast<double>(Float16(1e-300)) == 0);
}

TEST_CASE("dtypes know their size, name and unit roundoff") {
  CHECK(rowan::size_of(rowan::DType::kBFloat16) == 2);
  CHECK(std::string(rowan::to_string(rowan::DType::kFloat16)) == "float16");
  CHECK(rowan::unit_roundoff(rowan::DType::kBFloat16) == 0x1p-8);
  CHECK_FALSE(rowan::is_floating(rowan::DType::kInt64));
}
