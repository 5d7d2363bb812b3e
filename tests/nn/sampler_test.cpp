#include "rowan/nn/sampler.h"

#include <cmath>
#include <limits>
#include <vector>

#include "catch.h"
#include "rowan/core/error.h"

namespace rowan {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor logits(const std::vector<double>& values) {
  return Tensor::from_host({1, static_cast<std::int64_t>(values.size())}, values, StreamRef());
}

/// How often each token is drawn.
std::vector<int> counts(const std::vector<double>& values, const SamplingOptions& options, int draws) {
  Sampler sampler(options);
  std::vector<int> counts(values.size());
  for (int i = 0; i < draws; ++i) ++counts[static_cast<std::size_t>(sampler.pick(logits(values), StreamRef()))];
  return counts;
}

}  // namespace

TEST_CASE("Without a temperature the most likely token is picked, the first of equals") {
  Sampler sampler({});
  CHECK(sampler.pick(logits({0, 3, 1, 3}), StreamRef()) == 1);
  CHECK(sampler.pick(logits({-kInfinity, -5}), StreamRef()) == 1);
}

TEST_CASE("Tokens are drawn as often as their probabilities say") {
  const std::vector<double> values{std::log(0.5), std::log(0.3), std::log(0.2), -kInfinity};
  const auto plain = counts(values, {.temperature = 1}, 20000);
  CHECK(std::abs(plain[0] - 10000) < 350);  // 5 standard deviations
  CHECK(std::abs(plain[1] - 6000) < 325);
  CHECK(plain[3] == 0);
  const auto cold = counts(values, {.temperature = 0.5}, 20000);  // 25 : 9 : 4
  CHECK(std::abs(cold[0] - 20000 * 25 / 38) < 340);
  CHECK(counts(values, {.temperature = 1e-300}, 10)[0] == 10);
}

TEST_CASE("top_k and top_p leave the most likely tokens") {
  const std::vector<double> values{std::log(0.2), std::log(0.5), std::log(0.3)};
  const auto two = counts(values, {.temperature = 1, .top_k = 2}, 20000);
  CHECK(two[0] == 0);
  CHECK(std::abs(two[1] - 12500) < 345);
  CHECK(counts(values, {.temperature = 1, .top_p = 0.5}, 100)[1] == 100);
  CHECK(counts(values, {.temperature = 1, .top_p = 0.51}, 2000)[0] == 0);
  CHECK(counts(values, {.temperature = 1, .top_p = 0.51}, 2000)[2] > 0);
  CHECK(counts(values, {.temperature = 1, .top_p = 0.81}, 2000)[0] > 0);
  // Of the two that top_k leaves (0.625, 0.375) top_p leaves one.
  CHECK(counts(values, {.temperature = 1, .top_k = 2, .top_p = 0.6}, 100)[1] == 100);
  CHECK(counts(values, {.temperature = 1, .top_k = 1}, 100)[1] == 100);
  CHECK(counts(values, {.temperature = 1, .top_k = 50}, 2000)[0] > 0);
}

TEST_CASE("Equal seeds draw equal tokens") {
  const std::vector<double> values(50, 1.0);
  Sampler a({.temperature = 1, .seed = 4}), b({.temperature = 1, .seed = 4}), c({.temperature = 1, .seed = 5});
  int differing = 0;
  for (int i = 0; i < 50; ++i) {
    const auto picked = a.pick(logits(values), StreamRef());
    CHECK(b.pick(logits(values), StreamRef()) == picked);
    differing += c.pick(logits(values), StreamRef()) != picked;
  }
  CHECK(differing > 25);
}

TEST_CASE("Sampling refuses options out of range and logits that are not finite") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS_AS(Sampler({.temperature = -1}), Error);
  CHECK_THROWS_AS(Sampler({.temperature = nan}), Error);
  CHECK_THROWS_AS(Sampler({.top_k = -1}), Error);
  CHECK_THROWS_AS(Sampler({.top_p = 0}), Error);
  CHECK_THROWS_AS(Sampler({.top_p = 1.5}), Error);
  Sampler sampler({.temperature = 1});
  CHECK_THROWS_AS(sampler.pick(logits({nan, 1}), StreamRef()), Error);
  CHECK_THROWS_AS(sampler.pick(logits({kInfinity, 1}), StreamRef()), Error);
  CHECK_THROWS_AS(sampler.pick(logits({-kInfinity}), StreamRef()), Error);
  CHECK_THROWS_AS(sampler.pick(Tensor::zeros({2, 3}, DType::kFloat32, StreamRef()), StreamRef()), Error);
}

}  // namespace rowan
