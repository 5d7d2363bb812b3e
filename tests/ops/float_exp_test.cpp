#include "ops/float_exp.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "catch.h"
#include "rowan/core/dtype.h"
#include "support/compare.h"

using rowan::detail::vector_exp;

TEST_CASE("The vectorised exp is within one ulp over the whole range of float", "[ops][float_exp]") {
  double worst = 0;
  for (std::uint64_t bits = 0; bits <= 0xFFFFFFFFull; bits += 1009) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
    if (std::isnan(x)) continue;
    const double exact = std::exp(static_cast<double>(x));
    const float y = vector_exp(x);
    if (exact > static_cast<double>(std::numeric_limits<float>::max())) {
      if (!std::isinf(y)) CHECK(y > 3.4e38f);
      continue;
    }
    worst = std::max(worst, std::abs(static_cast<double>(y) - exact) / rowan::test::ulp(rowan::DType::kFloat32, exact));
  }
  CHECK(worst <= 1.0);
}

TEST_CASE("The vectorised exp keeps zero, infinities and NaN", "[ops][float_exp]") {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(vector_exp(0.0f) == 1.0f);
  CHECK(vector_exp(-0.0f) == 1.0f);
  CHECK(vector_exp(infinity) == infinity);
  CHECK(vector_exp(-infinity) == 0.0f);
  CHECK(std::isnan(vector_exp(std::numeric_limits<float>::quiet_NaN())));
}
