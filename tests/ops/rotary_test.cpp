#include "rowan/ops/rotary.h"

#include <numbers>

#include "ops/op_test.h"

using namespace rowan;
using namespace rowan::test;

namespace {

RotaryConfig config_of(std::int64_t head_dim, RotaryType type = RotaryType::kDefault) {
  RotaryConfig config;
  config.head_dim = head_dim;
  config.type = type;
  return config;
}

std::vector<std::int32_t> random_positions(std::int64_t tokens, std::int64_t bound) {
  Rng rng(7);
  std::vector<std::int32_t> positions;
  for (std::int64_t i = 0; i < tokens; ++i) {
    positions.push_back(static_cast<std::int32_t>(rng.below(static_cast<std::uint64_t>(bound))));
  }
  return positions;
}

/// Rotates pairs (j, j + d / 2) as complex numbers by position * theta^(-2j / d).
void check_rotation(const Shape& shape, DType dtype, bool inverse, StreamRef stream) {
  CAPTURE(to_string(shape), dtype, inverse);
  constexpr std::int64_t kPositions = 300;
  const std::int64_t d = shape[2], half = d / 2;
  const Tensor table = rotary_table(config_of(d), kPositions, stream);
  const std::vector<std::int32_t> positions = random_positions(shape[0], kPositions);
  Tensor x = apart(random_normal(shape, dtype, 1, stream), stream);
  const std::vector<double> before = values(x, stream);
  std::vector<double> expected = before, bound = before;
  for (std::int64_t i = 0; i < shape[0]; ++i) {
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      const std::int64_t row = (i * shape[1] + h) * d;
      for (std::int64_t j = 0; j < half; ++j) {
        const double angle = (inverse ? -1.0 : 1.0) * positions[at(i)] *
                             std::pow(10000.0, -2.0 * static_cast<double>(j) / static_cast<double>(d));
        const double a = before[at(row + j)], b = before[at(row + j + half)];
        expected[at(row + j)] = a * std::cos(angle) - b * std::sin(angle);
        expected[at(row + j + half)] = b * std::cos(angle) + a * std::sin(angle);
        // The table is float32 for every dtype.
        const double error = 4 * unit_roundoff(DType::kFloat32) * (std::abs(a) + std::abs(b));
        bound[at(row + j)] = rounded_error(dtype, expected[at(row + j)], error);
        bound[at(row + j + half)] = rounded_error(dtype, expected[at(row + j + half)], error);
      }
    }
  }
  rotary_apply(x, ids32(positions, stream), table, stream, inverse);
  check_within(values(x, stream), expected, bound);
}

const std::vector<Shape> kShapes = {{1, 1, 2}, {5, 3, 16}, {129, 4, 32}, {33, 2, 128}, {7, 5, 6}};

void check_beside_untouched(StreamRef stream) {
  const Tensor fused = random_normal({9, 40}, DType::kFloat32, 3, stream);
  const Matrix before = host(fused, stream);
  Tensor q = fused.slice(1, 8, 24).reshape({9, 2, 8});
  rotary_apply(q, ids32(random_positions(9, 20), stream), rotary_table(config_of(8), 20, stream), stream);
  const Matrix after = host(fused, stream);
  for (std::int64_t i = 0; i < 9; ++i) {
    for (std::int64_t j = 0; j < 40; ++j) {
      if (j < 8 || j >= 24) CHECK(after.at(i, j) == before.at(i, j));
    }
  }
}

}  // namespace

TEST_CASE("Rotary embedding rotates each pair by its position's angle", "[ops][rotary]") {
  for (const DType dtype : kCpuDtypes) {
    for (const Shape& shape : kShapes) {
      for (const bool inverse : {false, true}) check_rotation(shape, dtype, inverse, StreamRef());
    }
  }
  check_beside_untouched(StreamRef());
}

TEST_CASE("Rotary frequencies of the default type are powers of theta", "[ops][rotary]") {
  RotaryConfig config = config_of(8);
  config.theta = 500000;
  const std::vector<double> frequencies = rotary_frequencies(config);
  REQUIRE(frequencies.size() == 4);
  for (int j = 0; j < 4; ++j) {
    CHECK(std::abs(frequencies[at(j)] - std::pow(500000.0, -j / 4.0)) <= 1e-15);
  }
}

TEST_CASE("Rotary frequencies of type llama3 keep fast, stretch slow and blend what lies between", "[ops][rotary]") {
  RotaryConfig plain = config_of(128);
  plain.theta = 500000;
  RotaryConfig scaled = plain;
  scaled.type = RotaryType::kLlama3;
  scaled.factor = 32, scaled.low_freq_factor = 1, scaled.high_freq_factor = 4, scaled.original_max_position = 8192;
  const std::vector<double> before = rotary_frequencies(plain), after = rotary_frequencies(scaled);
  int kept = 0, stretched = 0, blended = 0;
  for (std::size_t j = 0; j < before.size(); ++j) {
    const double wavelength = 2 * std::numbers::pi / before[j];
    double expected = 0;
    if (wavelength < 8192.0 / 4) {
      expected = before[j], ++kept;
    } else if (wavelength > 8192.0) {
      expected = before[j] / 32, ++stretched;
    } else {  // a share t of the original and 1 - t of the stretched frequency, t linear in 8192 / wavelength from 1 to
              // 4
      const double t = (8192 / wavelength - 1) / 3;
      expected = t * before[j] + (1 - t) * before[j] / 32, ++blended;
    }
    CHECK(std::abs(after[j] - expected) <= 1e-15 * expected);
  }
  CHECK(kept > 0);
  CHECK(stretched > 0);
  CHECK(blended > 0);
}

TEST_CASE("The inverse rotation undoes the rotation and is its transpose", "[ops][rotary]") {
  const StreamRef cpu;
  const Shape shape = {6, 2, 8};
  const Tensor table = rotary_table(config_of(8), 50, cpu), positions = ids32({0, 1, 2, 49, 7, 3}, cpu);
  const Tensor x = random_normal(shape, DType::kFloat64, 1, cpu), w = random_normal(shape, DType::kFloat64, 2, cpu);
  Tensor there = x.clone(cpu), back = w.clone(cpu);
  rotary_apply(there, positions, table, cpu);
  rotary_apply(back, positions, table, cpu, true);
  const double left = dot(values(there, cpu), values(w, cpu)), right = dot(values(x, cpu), values(back, cpu));
  CHECK(std::abs(left - right) <= 1e-13 * (1 + std::abs(left)));
  rotary_apply(there, positions, table, cpu, true);
  // cos^2 + sin^2 of the float32 table is 1 to 4 of its roundings.
  check_within(values(there, cpu), values(x, cpu), constant(at(x.elements()), 16 * unit_roundoff(DType::kFloat32)));
}

TEST_CASE("Rotary embedding's backward agrees with finite differences", "[ops][rotary]") {
  const StreamRef cpu;
  const Shape shape = {3, 2, 4};
  const Tensor table = rotary_table(config_of(4), 9, cpu), positions = ids32({0, 8, 3}, cpu);
  const Tensor x = random_normal(shape, DType::kFloat64, 1, cpu), w = random_normal(shape, DType::kFloat64, 2, cpu);
  Tensor dx = w.clone(cpu);
  rotary_apply(dx, positions, table, cpu, true);
  check_gradient(
      [&] {
        Tensor y = x.clone(cpu);
        rotary_apply(y, positions, table, cpu);
        return dot(values(y, cpu), values(w, cpu));
      },
      x, values(dx, cpu));
}

TEST_CASE("Rotary embedding of no tokens does nothing", "[ops][rotary]") {
  const StreamRef cpu;
  Tensor x = Tensor::empty({0, 2, 4}, DType::kFloat32, cpu);
  rotary_apply(x, ids32({}, cpu), rotary_table(config_of(4), 4, cpu), cpu);
  CHECK(x.elements() == 0);
}

TEST_CASE("Rotary embedding refuses positions beyond its table and shapes that do not fit", "[ops][rotary]") {
  const StreamRef cpu;
  const Tensor table = rotary_table(config_of(4), 5, cpu), before = random_normal({2, 1, 4}, DType::kFloat32, 1, cpu);
  const auto refuse = [](const std::string& part, const std::function<void()>& f) {
    check_throws(ErrorKind::kInvalidArgument, part, f);
  };
  Tensor x = before.clone(cpu);
  refuse("positions in [0, 5), got 5 at index 1", [&] { rotary_apply(x, ids32({0, 5}, cpu), table, cpu); });
  refuse("positions in [0, 5), got -1", [&] { rotary_apply(x, ids32({-1, 0}, cpu), table, cpu); });
  refuse("expected positions of shape [2], got [1]", [&] { rotary_apply(x, ids32({1}, cpu), table, cpu); });
  refuse("expected table of shape [5, 2, 2], got [5, 4, 2]", [&] {
    rotary_apply(x, ids32({0, 1}, cpu), rotary_table(config_of(8), 5, cpu), cpu);
  });
  Tensor odd = random_normal({2, 1, 3}, DType::kFloat32, 1, cpu);
  refuse("even head_dim", [&] { rotary_apply(odd, ids32({0, 1}, cpu), table, cpu); });
  CHECK(same_values(x, before, cpu));
  refuse("even head_dim >= 2, got 3", [&] { rotary_table(config_of(3), 5, cpu); });
  RotaryConfig bad = config_of(4);
  bad.theta = 0;
  refuse("theta > 0, got 0", [&] { rotary_frequencies(bad); });
  bad = config_of(64);
  bad.theta = 1e-320;  // its powers have no reciprocal
  refuse("finite frequencies", [&] { rotary_frequencies(bad); });
  bad = config_of(4, RotaryType::kLlama3);
  bad.low_freq_factor = 4;
  refuse("low_freq_factor < high_freq_factor, got 4 and 4", [&] { rotary_frequencies(bad); });
}

TEST_CASE("Rotary embedding rotates each pair by its position's angle on the GPU", "[ops][rotary][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  for (const DType dtype : kGpuDtypes) {
    for (const Shape& shape : kShapes) {
      for (const bool inverse : {false, true}) check_rotation(shape, dtype, inverse, gpu);
    }
  }
  check_beside_untouched(gpu);
}

TEST_CASE("Rotary embedding takes more than 65535 tokens on the GPU", "[ops][rotary][gpu]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  check_rotation({70000, 1, 4}, DType::kBFloat16, false, gpu);
}

TEST_CASE("On the GPU a position beyond the table gives NaN", "[ops][rotary][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  Tensor x = random_normal({3, 1, 4}, DType::kFloat32, 1, gpu);
  rotary_apply(x, ids32({4, 5, -1}, gpu), rotary_table(config_of(4), 5, gpu), gpu);
  const std::vector<double> out = values(x, gpu);
  for (std::size_t j = 0; j < 12; ++j) CHECK(std::isnan(out[j]) == (j >= 4));
}
