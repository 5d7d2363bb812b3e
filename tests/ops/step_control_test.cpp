#include "rowan/ops/step_control.h"

#include <cmath>
#include <limits>

#include "catch.h"
#include "rowan/core/error.h"
#include "support/compare.h"
#include "support/device.h"

using namespace rowan;
using rowan::test::random_normal;
using rowan::test::values;

namespace {

const StreamRef kCpu;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor control_of(std::vector<double> elements, StreamRef stream) {
  return Tensor::from_host<double>({4}, elements, stream);
}

double exact_square_sum(const std::vector<Tensor>& gradients, StreamRef stream) {
  long double sum = 0;
  for (const Tensor& g : gradients) {
    if (!g.defined()) continue;
    for (const double v : values(g, stream)) sum += static_cast<long double>(v) * v;
  }
  return static_cast<double>(sum);
}

/// A float64 sum of n squares, each product and sum rounded.
double square_sum_bound(double sum, std::int64_t n) { return sum * static_cast<double>(n + 1) * 0x1p-53; }

std::vector<Tensor> awkward_gradients(StreamRef stream) {
  std::vector<Tensor> gradients;
  std::uint64_t seed = 1;
  for (const std::int64_t n : {1, 0, 7, 16383, 16384, 16385, 40000})
    gradients.push_back(random_normal({n}, DType::kFloat32, seed++, stream));
  gradients.push_back(Tensor());
  gradients.push_back(random_normal({33, 65}, DType::kFloat32, seed++, stream).slice(1, 1, 18));  // rows apart
  gradients.push_back(
      random_normal({2000, 80}, DType::kFloat32, seed++, stream).slice(1, 64, 80));  // a LoRA B in its border
  gradients.push_back(random_normal({70000, 1}, DType::kFloat32, seed++, stream));
  gradients.push_back(random_normal({3, 0}, DType::kFloat32, seed++, stream));
  return gradients;
}

void check_awkward_gradients(StreamRef stream) {
  const std::vector<Tensor> gradients = awkward_gradients(stream);
  Tensor control = control_of({5, 1, 0, 3}, stream);
  grad_square_sum(gradients, control, stream);
  const std::vector<double> once = values(control, stream);
  const double expected = exact_square_sum(gradients, stream);
  CHECK(std::abs(once[0] - expected) <= square_sum_bound(expected, 200000));
  CHECK(once[1] == 1);
  CHECK(once[2] == 0);
  CHECK(once[3] == 3);
  grad_square_sum(gradients, control, stream, true);
  CHECK(std::abs(values(control, stream)[0] - 2 * expected) <= 2 * square_sum_bound(expected, 200001));
  grad_square_sum(gradients, control, stream);
  CHECK(values(control, stream)[0] == once[0]);  // same bits again
}

void check_late_gradients(StreamRef stream) {
  const std::vector<Tensor> gradients = awkward_gradients(stream);
  std::vector<std::int32_t> flags(gradients.size(), 1);
  flags[4] = flags[9] = 0;
  Tensor active = Tensor::from_host<std::int32_t>({static_cast<std::int64_t>(flags.size())}, flags, stream);
  const GradSquareSum sum(gradients, active, stream);
  Tensor control = make_step_control(stream);
  gradients[9].copy_from(Tensor::from_host<float>({2000, 16}, std::vector<float>(32000, NAN), stream),
                         stream);  // not read
  std::vector<Tensor> counted = gradients;
  counted[4] = counted[9] = Tensor();
  sum.run(control, stream);
  const double expected = exact_square_sum(counted, stream);
  CHECK(std::abs(values(control, stream)[0] - expected) <= square_sum_bound(expected, 200000));
  flags[4] = 1;
  write_values(active, std::span<const std::int32_t>(flags), stream);
  counted[4] = gradients[4];
  sum.run(control, stream);
  const double more = exact_square_sum(counted, stream);
  CHECK(std::abs(values(control, stream)[0] - more) <= square_sum_bound(more, 200000));
}

void check_finish(StreamRef stream) {
  const auto finished = [&](double square_sum, double max_norm) {
    Tensor control = control_of({square_sum, 7, 7, 4}, stream);
    finish_step_control(control, max_norm, stream);
    return read_step_control(control, stream);
  };
  SECTION("a norm below the limit is kept") {
    const StepReport r = finished(9, 4);
    CHECK(r.gradient_norm == 3);
    CHECK(r.factor == 1);
    CHECK_FALSE(r.skipped);
    CHECK(r.skipped_steps == 4);
  }
  SECTION("a norm above the limit is scaled to it") {
    const StepReport r = finished(9, 0.5);
    CHECK(std::abs(r.factor - 0.5 / 3) <= 0x1p-54);
    CHECK_FALSE(r.skipped);
  }
  SECTION("a limit of 0 means no clipping") { CHECK(finished(1e20, 0).factor == 1); }
  SECTION("no gradient at all is a step") { CHECK_FALSE(finished(0, 1).skipped); }
  SECTION("what is not finite is skipped and counted, clipped or not") {
    for (const double sum : {kNan, kInfinity}) {
      for (const double max_norm : {0.0, 1.0}) {
        const StepReport r = finished(sum, max_norm);
        CHECK(r.skipped);
        CHECK(r.factor == 1);
        CHECK(r.skipped_steps == 5);
      }
    }
  }
  SECTION("a norm beyond 1e18 is skipped unless clipping brings it down") {
    CHECK_FALSE(finished(0.99e36, 0).skipped);
    CHECK(finished(1.01e36, 0).skipped);
    CHECK_FALSE(finished(1.01e36, 1).skipped);
    CHECK(finished(1e60, 1e19).skipped);
  }
}

void check_advance(StreamRef stream) {
  Tensor active = Tensor::from_host<std::int32_t>({3}, std::vector<std::int32_t>{1, 0, 1}, stream);
  Tensor steps = Tensor::from_host<std::int64_t>({3}, std::vector<std::int64_t>{0, 5, 1LL << 40}, stream);
  Tensor controls = Tensor::zeros({3, 4}, DType::kFloat64, stream);
  advance_steps(control_of({9, 0.25, 0, 2}, stream), active, steps, controls, stream);
  CHECK(steps.to_vector<std::int64_t>(stream) == std::vector<std::int64_t>{1, 5, (1LL << 40) + 1});
  CHECK(values(controls, stream) == std::vector<double>{9, 0.25, 0, 2, 9, 0.25, 1, 2, 9, 0.25, 0, 2});
  advance_steps(control_of({kNan, 1, 1, 3}, stream), active, steps, controls, stream);
  CHECK(steps.to_vector<std::int64_t>(stream) == std::vector<std::int64_t>{1, 5, (1LL << 40) + 1});
  for (std::int64_t p = 0; p < 3; ++p) CHECK(values(controls.select(0, p), stream)[2] == 1);
}

void check_write_values(StreamRef stream) {
  for (const std::int64_t n : {0, 1, 255, 256, 257, 1000}) {
    std::vector<double> wide;
    std::vector<std::int32_t> narrow;
    for (std::int64_t i = 0; i < n; ++i) {
      wide.push_back(1.0 / static_cast<double>(i + 3));
      narrow.push_back(static_cast<std::int32_t>(7 * i - 3));
    }
    Tensor a = Tensor::zeros({n}, DType::kFloat64, stream), b = Tensor::zeros({n}, DType::kInt32, stream);
    write_values(a, std::span<const double>(wide), stream);
    write_values(b, std::span<const std::int32_t>(narrow), stream);
    CHECK(a.to_vector<double>(stream) == wide);
    CHECK(b.to_vector<std::int32_t>(stream) == narrow);
  }
}

}  // namespace

TEST_CASE("the sum of squared gradients is right for every size and row stride, and the same bits twice") {
  check_awkward_gradients(kCpu);
}

TEST_CASE("a gradient whose flag is 0 is left out of the norm and not read") { check_late_gradients(kCpu); }

TEST_CASE("the step control clips and skips as its header says") { check_finish(kCpu); }

TEST_CASE("the count of a parameter grows only with its gradient and when the step is not skipped") {
  check_advance(kCpu);
}

TEST_CASE("write_values carries host values of any number to the device") { check_write_values(kCpu); }

TEST_CASE("one NaN or infinity among the gradients makes the square sum not finite") {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<Tensor> gradients = {random_normal({50}, DType::kFloat32, 1, kCpu),
                                     random_normal({20000}, DType::kFloat32, 2, kCpu)};
    gradients[1].data<float>()[19999] = bad;
    Tensor control = make_step_control(kCpu);
    grad_square_sum(gradients, control, kCpu);
    CHECK_FALSE(std::isfinite(values(control, kCpu)[0]));
    finish_step_control(control, 1.0, kCpu);
    CHECK(read_step_control(control, kCpu).skipped);
  }
}

TEST_CASE("squares of the smallest and largest float32 gradients neither vanish nor overflow") {
  for (const float size : {1e-45f, 1e-23f, 3e38f}) {
    const std::vector<Tensor> gradients = {Tensor::from_host<float>({4}, std::vector<float>(4, size), kCpu)};
    Tensor control = make_step_control(kCpu);
    grad_square_sum(gradients, control, kCpu);
    CHECK(values(control, kCpu)[0] == 4 * static_cast<double>(size) * static_cast<double>(size));
  }
}

TEST_CASE("float64 gradients are summed in float64") {
  const std::vector<Tensor> gradients = {random_normal({31, 9}, DType::kFloat64, 3, kCpu),
                                         random_normal({5}, DType::kFloat64, 4, kCpu)};
  Tensor control = make_step_control(kCpu);
  grad_square_sum(gradients, control, kCpu);
  const double expected = exact_square_sum(gradients, kCpu);
  CHECK(std::abs(values(control, kCpu)[0] - expected) <= square_sum_bound(expected, 284));
}

TEST_CASE("a step that the host gives up is counted as skipped") {
  Tensor control = control_of({9, 0.5, 0, 2}, kCpu);
  count_skipped_step(control, kCpu);
  CHECK(values(control, kCpu) == std::vector<double>{0, 1, 1, 3});
}

TEST_CASE("step control operations refuse what does not fit and leave the control untouched") {
  Tensor control = control_of({1, 2, 3, 4}, kCpu);
  const std::vector<Tensor> mixed = {random_normal({3}, DType::kFloat32, 1, kCpu),
                                     random_normal({3}, DType::kFloat64, 1, kCpu)};
  CHECK_THROWS_AS(grad_square_sum(mixed, control, kCpu), Error);
  const std::vector<Tensor> narrow = {random_normal({3}, DType::kBFloat16, 1, kCpu)};
  CHECK_THROWS_AS(grad_square_sum(narrow, control, kCpu), Error);
  const std::vector<Tensor> turned = {random_normal({3, 4}, DType::kFloat32, 1, kCpu).transpose(0, 1)};
  CHECK_THROWS_AS(grad_square_sum(turned, control, kCpu), Error);
  CHECK_THROWS_AS(finish_step_control(control, -1, kCpu), Error);
  CHECK_THROWS_AS(finish_step_control(control, kNan, kCpu), Error);
  Tensor steps = Tensor::zeros({2}, DType::kInt64, kCpu), controls = Tensor::zeros({2, 4}, DType::kFloat64, kCpu);
  CHECK_THROWS_AS(advance_steps(control, Tensor::zeros({3}, DType::kInt32, kCpu), steps, controls, kCpu), Error);
  Tensor short_one = Tensor::zeros({3}, DType::kFloat64, kCpu);
  CHECK_THROWS_AS(finish_step_control(short_one, 1, kCpu), Error);
  const std::vector<double> two = {1, 2};
  CHECK_THROWS_AS(write_values(control, std::span<const double>(two), kCpu), Error);
  CHECK_THROWS_AS(GradSquareSum().run(control, kCpu), Error);
  CHECK(values(control, kCpu) == std::vector<double>{1, 2, 3, 4});
}

TEST_CASE("on CUDA the sum of squared gradients is right for every size and row stride, and the same bits twice",
          "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_awkward_gradients(stream);
}

TEST_CASE("on CUDA a gradient whose flag is 0 is left out of the norm and not read", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_late_gradients(stream);
}

TEST_CASE("on CUDA the step control clips and skips as its header says", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_finish(stream);
}

TEST_CASE("on CUDA the count of a parameter grows only with its gradient and when the step is not skipped",
          "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_advance(stream);
}

TEST_CASE("on CUDA write_values carries host values of any number to the device", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_write_values(stream);
}
