#include "rowan/ops/adamw.h"

#include <cmath>
#include <limits>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/ops/step_control.h"
#include "support/compare.h"
#include "support/device.h"

using namespace rowan;
using rowan::test::random_normal;
using rowan::test::values;

namespace {

const StreamRef kCpu;

Tensor rates_of(double lr, double decay, StreamRef stream) {
  return Tensor::from_host<double>({2}, std::vector<double>{lr, decay}, stream);
}
Tensor step_of(std::int64_t t, StreamRef stream) {
  return Tensor::from_host<std::int64_t>({1}, std::vector<std::int64_t>{t}, stream);
}
Tensor control_of(double factor, bool skip, StreamRef stream) {
  return Tensor::from_host<double>({4}, std::vector<double>{1, factor, skip ? 1.0 : 0.0, 0}, stream);
}

AdamwArguments make_parameter(const Shape& shape, DType dtype, std::uint64_t seed, StreamRef stream, double lr = 1e-2,
                              double decay = 0.1, std::int64_t t = 3) {
  AdamwArguments a;
  a.master = random_normal(shape, dtype, seed, stream);
  a.gradient = random_normal(shape, dtype, seed + 1, stream);
  a.first_moment = random_normal(shape, dtype, seed + 2, stream, 0.3);
  a.second_moment = random_normal(shape, dtype, seed + 3, stream, 0.3);
  std::vector<double> squares = values(a.second_moment, stream);
  for (double& v : squares) v = v * v;
  const Tensor positive = Tensor::from_host<double>(shape, squares, kCpu);
  a.second_moment = test::convert(positive, dtype, kCpu, stream);
  a.rates = rates_of(lr, decay, stream);
  a.step = step_of(t, stream);
  return a;
}

/// torch.optim.AdamW for one element, in its own order of operations, in long double.
struct Oracle {
  long double lr, decay, beta1, beta2, epsilon, factor;
  std::int64_t t;
  void step(long double& p, long double g, long double& m, long double& v) const {
    g *= factor;
    p *= 1 - lr * decay;
    m = m + (1 - beta1) * (g - m);
    v = beta2 * v + (1 - beta2) * g * g;
    const long double correction1 = 1 - std::pow(beta1, static_cast<long double>(t));
    const long double correction2 = 1 - std::pow(beta2, static_cast<long double>(t));
    p -= lr / correction1 * m / (std::sqrt(v) / std::sqrt(correction2) + epsilon);
  }
};

/// Runs one step and compares each element of master and moments with the oracle applied to what they held before. The
/// bound is `ulps` ulps of the result plus `relative` of the terms that were added.
void check_against_oracle(AdamwArguments a, double factor, double ulps, double relative, StreamRef stream) {
  const std::vector<double> g = values(a.gradient, stream);
  std::vector<double> p = values(a.master, stream), m = values(a.first_moment, stream),
                      v = values(a.second_moment, stream);
  std::vector<double> p_bound, m_bound, v_bound;
  const std::vector<double> rates = values(a.rates, stream);
  const Oracle oracle{
      rates[0], rates[1], a.beta1, a.beta2, a.epsilon, factor, a.step.to_vector<std::int64_t>(stream)[0]};
  const DType dtype = a.master.dtype();
  // 1 - b^t is taken in float64 and loses bits while b^t is near 1.
  const double corrections = 0x1p-52 * (1 / (1 - a.beta1) + 1 / (1 - a.beta2));
  for (std::size_t i = 0; i < p.size(); ++i) {
    long double lp = p[i], lm = m[i], lv = v[i];
    oracle.step(lp, g[i], lm, lv);
    const double terms = a.beta1 * std::abs(m[i]) + (1 - a.beta1) * std::abs(factor * g[i]);
    const double denominator = std::sqrt(static_cast<double>(lv)) + a.epsilon;
    m_bound.push_back(ulps * test::ulp(dtype, static_cast<double>(lm)) + relative * terms);
    v_bound.push_back(ulps * test::ulp(dtype, static_cast<double>(lv)) + relative * static_cast<double>(lv));
    p_bound.push_back(ulps * test::ulp(dtype, static_cast<double>(lp)) +
                      relative * rates[0] * rates[1] * std::abs(p[i]) +
                      (relative + corrections) * rates[0] / (1 - a.beta1) * terms / denominator);
    p[i] = static_cast<double>(lp);
    m[i] = static_cast<double>(lm);
    v[i] = static_cast<double>(lv);
  }
  adamw_step(std::vector{a}, stream);
  std::string message;
  if (!test::within(values(a.master, stream), p, p_bound, &message)) FAIL("master: " + message);
  if (!test::within(values(a.first_moment, stream), m, m_bound, &message)) FAIL("first moment: " + message);
  if (!test::within(values(a.second_moment, stream), v, v_bound, &message)) FAIL("second moment: " + message);
}

/// One rounding each on the CPU; in float32 on CUDA about ten.
void check_oracle(DType dtype, StreamRef stream) {
  const double ulps = stream.device().is_cpu() ? 0.5000001 : 1;
  const double relative = stream.device().is_cpu() ? 16 * 0x1p-53 : 16 * 0x1p-24;
  for (const std::int64_t n : {1, 7, 4095, 4096, 4097, 9001}) {
    for (const std::int64_t t : {1, 2, 1000, 100000})
      check_against_oracle(make_parameter({n}, dtype, 11, stream, 1e-2, 0.1, t), 1, ulps, relative, stream);
  }
  AdamwArguments clipped = make_parameter({37, 5}, dtype, 21, stream);
  clipped.control = control_of(0.37, false, stream);
  check_against_oracle(clipped, 0.37, ulps, relative, stream);
  AdamwArguments small = make_parameter({64}, dtype, 31, stream, 1e-6, 0.01,
                                        5);  // 1 - lr w is 1 - 1e-8: decay must not be lost in float32
  check_against_oracle(small, 1, ulps, relative, stream);
}

struct Snapshot {
  std::vector<double> master, first, second;
  Snapshot(const AdamwArguments& a, StreamRef stream)
      : master(values(a.master, stream)),
        first(values(a.first_moment, stream)),
        second(values(a.second_moment, stream)) {}
  bool operator==(const Snapshot&) const = default;
};

void check_skip(StreamRef stream) {
  AdamwArguments a = make_parameter({1000}, DType::kFloat32, 1, stream);
  a.value = random_normal({1000}, DType::kBFloat16, 9, stream);
  a.control = control_of(1, true, stream);
  const Snapshot before(a, stream);
  const std::vector<double> value = values(a.value, stream);
  adamw_step(std::vector{a}, stream);
  CHECK(Snapshot(a, stream) == before);
  CHECK(values(a.value, stream) == value);
}

void check_zero_gradient(StreamRef stream) {
  AdamwArguments a = make_parameter({1000}, DType::kFloat32, 1, stream, 0.1, 0.0, 1);
  for (Tensor* t : {&a.gradient, &a.first_moment, &a.second_moment}) t->zero(stream);
  const Snapshot before(a, stream);
  adamw_step(std::vector{a}, stream);
  CHECK(Snapshot(a, stream) == before);
  AdamwArguments b = make_parameter({1000}, DType::kFloat32, 1, stream, 0.0, 0.5, 1);  // learning rate 0
  const std::vector<double> master = values(b.master, stream);
  adamw_step(std::vector{b}, stream);
  CHECK(values(b.master, stream) == master);
}

/// master, gradient and value as views with gaps give the same bits as contiguous ones, and nothing beside them is
/// written.
void check_strides(DType value_dtype, StreamRef stream) {
  AdamwArguments flat = make_parameter({300, 17}, DType::kFloat32, 5, stream);
  flat.value = Tensor::zeros({300, 17}, value_dtype, stream);
  AdamwArguments spread = flat;
  const auto bordered = [&](const Tensor& t, DType dtype, std::int64_t row, std::int64_t begin) {
    const Tensor buffer = random_normal({300, row}, dtype, 77, stream);
    const Tensor view = buffer.slice(1, begin, begin + 17);
    view.copy_from(t, stream);
    return std::pair(buffer, view);
  };
  const auto [master_buffer, master] = bordered(flat.master, DType::kFloat32, 81, 64);
  const auto [gradient_buffer, gradient] = bordered(flat.gradient, DType::kFloat32, 18, 1);
  const auto [value_buffer, value] = bordered(flat.value, value_dtype, 96, 3);
  spread.master = master;
  spread.gradient = gradient;
  spread.value = value;
  spread.first_moment = flat.first_moment.clone(stream);
  spread.second_moment = flat.second_moment.clone(stream);
  const std::vector<double> left = values(master_buffer.slice(1, 0, 64), stream);
  const std::vector<double> before = values(value_buffer.slice(1, 0, 3), stream),
                            after = values(value_buffer.slice(1, 20, 96), stream);
  adamw_step(std::vector{flat}, stream);
  adamw_step(std::vector{spread}, stream);
  CHECK(Snapshot(spread, stream) == Snapshot(flat, stream));
  CHECK(values(spread.value, stream) == values(flat.value, stream));
  CHECK(values(spread.value, stream) == values(test::convert(flat.master, value_dtype, stream, stream), stream));
  CHECK(values(master_buffer.slice(1, 0, 64), stream) == left);
  CHECK(values(value_buffer.slice(1, 0, 3), stream) == before);
  CHECK(values(value_buffer.slice(1, 20, 96), stream) == after);
}

/// One launch for parameters of all sizes equals one launch each.
void check_batch(StreamRef stream) {
  std::vector<AdamwArguments> together, alone;
  std::uint64_t seed = 1;
  for (const std::int64_t n : {5, 0, 0, 4096, 1, 4097, 12288, 3, 0}) {
    AdamwArguments a = make_parameter({n}, DType::kFloat32, seed, stream, 1e-2, 0.1, static_cast<std::int64_t>(seed));
    seed += 10;
    a.beta2 = seed % 20 == 1 ? 0.95 : 0.999;
    if (seed % 30 == 1) a.control = control_of(0.5, seed % 60 == 1, stream);
    if (seed % 20 == 1) a.value = Tensor::zeros({n}, DType::kFloat16, stream);
    AdamwArguments b = a;
    b.master = a.master.clone(stream);
    b.first_moment = a.first_moment.clone(stream);
    b.second_moment = a.second_moment.clone(stream);
    together.push_back(a);
    alone.push_back(b);
  }
  const AdamwBatch batch(together, stream);
  batch.run(stream);
  batch.run(stream);
  for (const AdamwArguments& b : alone) {
    adamw_step(std::vector{b}, stream);
    adamw_step(std::vector{b}, stream);
  }
  for (std::size_t i = 0; i < together.size(); ++i) {
    CAPTURE(i);
    CHECK(Snapshot(together[i], stream) == Snapshot(alone[i], stream));
  }
}

}  // namespace

TEST_CASE("adamw equals the formula of torch.optim.AdamW in float64") { check_oracle(DType::kFloat64, kCpu); }

TEST_CASE("adamw in float32 rounds moments and master once") { check_oracle(DType::kFloat32, kCpu); }

TEST_CASE("adamw writes nothing when the step is skipped") { check_skip(kCpu); }

TEST_CASE("adamw with no gradient and no history, or with a learning rate of 0, keeps the bits of the weights") {
  check_zero_gradient(kCpu);
}

TEST_CASE("adamw takes rows apart from each other and writes only its own elements") {
  check_strides(DType::kBFloat16, kCpu);
  check_strides(DType::kFloat16, kCpu);
}

TEST_CASE("adamw over many parameters at once equals one at a time") { check_batch(kCpu); }

TEST_CASE("adamw reads rates and step from the tensors at every run") {
  AdamwArguments a = make_parameter({50}, DType::kFloat32, 4, kCpu, 1e-2, 0.0, 1);
  const AdamwBatch batch(std::vector{a}, kCpu);
  batch.run(kCpu);
  const std::vector<double> first = values(a.master, kCpu);
  const std::vector<double> none = {0, 0};
  write_values(a.rates, std::span<const double>(none), kCpu);
  batch.run(kCpu);
  CHECK(values(a.master, kCpu) == first);
  const std::vector<double> decay_alone = {1e-30, 5e29};
  write_values(a.rates, std::span<const double>(decay_alone), kCpu);
  batch.run(kCpu);
  for (std::size_t i = 0; i < first.size(); ++i) CHECK(values(a.master, kCpu)[i] == static_cast<float>(0.5 * first[i]));
}

TEST_CASE("adamw passes NaN and infinity of a gradient on to its own element only") {
  AdamwArguments a = make_parameter({3}, DType::kFloat32, 4, kCpu);
  AdamwArguments clean = a;
  for (Tensor* t : {&clean.master, &clean.first_moment, &clean.second_moment, &clean.gradient}) *t = t->clone(kCpu);
  a.gradient.data<float>()[1] = NAN;
  adamw_step(std::vector{a}, kCpu);
  adamw_step(std::vector{clean}, kCpu);
  CHECK(std::isnan(values(a.master, kCpu)[1]));
  CHECK(values(a.master, kCpu)[0] == values(clean.master, kCpu)[0]);
  CHECK(values(a.master, kCpu)[2] == values(clean.master, kCpu)[2]);
}

TEST_CASE("adamw refuses what does not fit, naming it, and leaves every tensor untouched") {
  const AdamwArguments good = make_parameter({4, 6}, DType::kFloat32, 4, kCpu);
  const Snapshot before(good, kCpu);
  const auto refused = [&](auto change, const std::string& word) {
    AdamwArguments bad = good;
    change(bad);
    try {
      adamw_step(std::vector{good, bad}, kCpu);
      FAIL("not refused: " << word);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::kInvalidArgument);
      CAPTURE(error.what());
      CHECK(std::string(error.what()).find("adamw: ") == 0);
      CHECK(std::string(error.what()).find(word) != std::string::npos);
    }
  };
  refused([](AdamwArguments& a) { a.gradient = random_normal({4, 5}, DType::kFloat32, 1, kCpu); }, "[4, 5]");
  refused([](AdamwArguments& a) { a.gradient = random_normal({4, 6}, DType::kFloat64, 1, kCpu); }, "float64");
  refused(
      [](AdamwArguments& a) {
        a.gradient = random_normal({6, 4}, DType::kFloat32, 1, kCpu).transpose(0, 1);
      },
      "gradient");
  refused([](AdamwArguments& a) { a.gradient = Tensor(); }, "gradient");
  refused(
      [](AdamwArguments& a) {
        a.first_moment = random_normal({4, 9}, DType::kFloat32, 1, kCpu).slice(1, 0, 6);
      },
      "first_moment");
  refused([](AdamwArguments& a) { a.value = random_normal({4, 6}, DType::kFloat32, 1, kCpu); }, "value");
  refused([](AdamwArguments& a) { a.rates = random_normal({3}, DType::kFloat64, 1, kCpu); }, "rates");
  refused([](AdamwArguments& a) { a.step = random_normal({1}, DType::kFloat64, 1, kCpu); }, "step");
  refused([](AdamwArguments& a) { a.control = random_normal({3}, DType::kFloat64, 1, kCpu); }, "control");
  refused([](AdamwArguments& a) { a.beta1 = 1; }, "beta1");
  refused([](AdamwArguments& a) { a.beta2 = -0.1; }, "beta2");
  refused([](AdamwArguments& a) { a.epsilon = std::numeric_limits<double>::quiet_NaN(); }, "epsilon");
  CHECK(Snapshot(good, kCpu) == before);
  CHECK_THROWS_AS(AdamwBatch().run(kCpu), Error);
}

TEST_CASE("on CUDA adamw equals the formula of torch.optim.AdamW to float32 rounding", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_oracle(DType::kFloat32, stream);
}

TEST_CASE("on CUDA adamw writes nothing when the step is skipped", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_skip(stream);
}

TEST_CASE("on CUDA adamw with no gradient and no history, or with a learning rate of 0, keeps the bits of the weights",
          "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_zero_gradient(stream);
}

TEST_CASE("on CUDA adamw takes rows apart from each other and writes only its own elements", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_strides(DType::kBFloat16, stream);
  check_strides(DType::kFloat16, stream);
}

TEST_CASE("on CUDA adamw over many parameters at once equals one at a time", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_batch(stream);
}
