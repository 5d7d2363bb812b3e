#include "rowan/ops/dropout.h"

#include <cmath>
#include <limits>
#include <vector>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/core/rng.h"
#include "rowan/ops/elementwise.h"
#include "support/device.h"
#include "support/matrix.h"

using namespace rowan;
using namespace rowan::test;

namespace {

const std::vector<DType> kAll = {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16};
const std::vector<DType> kCuda = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

bool kept(const DropoutMask& mask, std::uint64_t offset, std::int64_t index) {
  const auto i = static_cast<std::uint64_t>(index);
  return philox(mask.seed, i / 4, offset).word[i % 4] >= mask.p * 0x1p32;
}

void check_definition(DType dtype, StreamRef stream) {
  for (const std::int64_t cols : {1, 3, 8, 33}) {
    for (const double p : {0.0, 0.25, 0.5, 0.9}) {
      const DropoutMask mask{p, 77, 5, {}};
      const Tensor x = with_gaps(random_normal({13, cols}, dtype, 1, stream), 3, 1, stream);
      Tensor y = with_gaps(x, 2, 5, stream);
      fill(y, std::nan(""), stream);
      dropout_forward(x, mask, y, stream);
      const std::vector<double> before = values(x, stream), after = values(y, stream);
      for (std::size_t i = 0; i < before.size(); ++i) {
        const double exact = kept(mask, mask.offset, static_cast<std::int64_t>(i)) ? before[i] / (1 - p) : 0.0;
        const double tolerance = exact == 0 ? 0 : 2 * ulp(dtype, exact);
        REQUIRE(std::abs(after[i] - exact) <= tolerance);
      }
    }
  }
}

void check_counter(StreamRef stream) {
  const Tensor x = random_normal({8, 16}, DType::kFloat32, 1, stream);
  Tensor counted = Tensor::empty({8, 16}, DType::kFloat32, stream),
         plain = Tensor::empty({8, 16}, DType::kFloat32, stream);
  const Tensor counter = Tensor::from_host({1}, std::vector<std::int64_t>{4}, stream);
  dropout_forward(x, {0.5, 9, 3, counter}, counted, stream);
  dropout_forward(x, {0.5, 9, 7, {}}, plain, stream);
  CHECK(values(counted, stream) == values(plain, stream));
  dropout_forward(x, {0.5, 9, 3, {}}, plain, stream);
  CHECK(values(counted, stream) != values(plain, stream));
}

void check_all_dropped(StreamRef stream) {
  Tensor x = random_normal({4, 9}, DType::kFloat32, 1, stream);
  fill(x, std::numeric_limits<double>::infinity(), stream);
  dropout_forward(x, {1, 3, 0, {}}, x, stream);  // in place
  CHECK(values(x, stream) == std::vector<double>(36, 0));
}

}  // namespace

TEST_CASE("dropout keeps exactly the elements that its definition keeps, divided by 1 - p") {
  for (const DType dtype : kAll) check_definition(dtype, {});
}

TEST_CASE("dropout adds the counter on the device to the offset") { check_counter({}); }

TEST_CASE("dropout with p = 1 gives exact zeros, even for infinities") { check_all_dropped({}); }

TEST_CASE("dropout drops about the fraction p of the elements") {
  const Tensor x = Tensor::from_host({500, 400}, std::vector<float>(200000, 1.0f), {});
  Tensor y = Tensor::empty({500, 400}, DType::kFloat32, {});
  dropout_forward(x, {0.3, 1, 0, {}}, y, {});
  std::int64_t dropped = 0;
  for (const double v : values(y, {})) dropped += v == 0 ? 1 : 0;
  // Five standard deviations of a binomial with 200,000 trials.
  CHECK(std::abs(static_cast<double>(dropped) - 60000) < 5 * std::sqrt(200000 * 0.3 * 0.7));
}

TEST_CASE("dropout refuses probabilities outside [0, 1] and shapes that differ, and leaves y untouched") {
  const Tensor x = random_normal({4, 6}, DType::kFloat32, 1, {});
  Tensor y = random_normal({4, 6}, DType::kFloat32, 2, {}), narrow = Tensor::empty({4, 5}, DType::kFloat32, {});
  const std::vector<double> before = values(y, {});
  for (const double p : {-0.1, 1.5, std::nan("")}) CHECK_THROWS_AS(dropout_forward(x, {p, 0, 0, {}}, y, {}), Error);
  CHECK_THROWS_AS(dropout_forward(x, {0.5, 0, 0, {}}, narrow, {}), Error);
  CHECK_THROWS_AS(dropout_forward(x, {0.5, 0, 0, Tensor::zeros({1}, DType::kInt32, {})}, y, {}), Error);
  CHECK(values(y, {}) == before);
}

TEST_CASE("dropout on CUDA draws the same masks as its definition", "[gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType dtype : kCuda) check_definition(dtype, stream);
  check_counter(stream);
  check_all_dropped(stream);
}
