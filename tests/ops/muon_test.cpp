#include "rowan/ops/muon.h"

#include <cmath>

#include "catch.h"
#include "rowan/core/error.h"
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
Tensor control_of(double factor, bool skip, StreamRef stream) {
  return Tensor::from_host<double>({4}, std::vector<double>{1, factor, skip ? 1.0 : 0.0, 0}, stream);
}

/// `u` of the arithmetic: float64 on the CPU, float32 on CUDA.
double arithmetic(StreamRef stream) { return stream.device().is_cpu() ? 0x1p-53 : 0x1p-24; }

void check_prepare(DType dtype, DType update_dtype, bool nesterov, StreamRef stream) {
  for (const Shape& shape : {Shape{1, 1}, Shape{33, 65}, Shape{300, 16}, Shape{0, 5}, Shape{7}}) {
    CAPTURE(to_string(shape), to_string(dtype), to_string(update_dtype), nesterov);
    Tensor gradient = random_normal(shape, dtype, 1, stream);
    if (shape.rank() == 2) {  // rows apart
      const Tensor wide = random_normal({shape[0], shape[1] + 3}, dtype, 1, stream);
      gradient = wide.slice(1, 2, 2 + shape[1]);
    }
    Tensor momentum = random_normal(shape, dtype, 2, stream);
    Tensor update = Tensor::zeros(shape, update_dtype, stream);
    const std::vector<double> g = values(gradient, stream), before = values(momentum, stream);
    muon_prepare(gradient, momentum, 0.95, nesterov, control_of(0.5, false, stream), update, stream);
    std::vector<double> m, u, m_bound, u_bound;
    for (std::size_t i = 0; i < g.size(); ++i) {
      m.push_back(0.95 * before[i] + 0.5 * g[i]);
      u.push_back(nesterov ? 0.5 * g[i] + 0.95 * m[i] : m[i]);
      const double terms = std::abs(before[i]) + std::abs(g[i]);
      m_bound.push_back(0.5 * test::ulp(dtype, m[i]) + 4 * arithmetic(stream) * terms);
      u_bound.push_back(0.5 * test::ulp(update_dtype, u[i]) + 8 * arithmetic(stream) * terms);
    }
    std::string message;
    if (!test::within(values(momentum, stream), m, m_bound, &message)) FAIL("momentum: " << message);
    if (!test::within(values(update, stream), u, u_bound, &message)) FAIL("update: " << message);
  }
}

void check_finish(DType dtype, DType update_dtype, DType value_dtype, StreamRef stream) {
  for (const Shape& shape : {Shape{1, 1}, Shape{33, 65}, Shape{300, 16}, Shape{0, 5}}) {
    CAPTURE(to_string(shape), to_string(dtype), to_string(update_dtype), to_string(value_dtype));
    const Tensor buffer = random_normal({shape[0], shape[1] + 7}, dtype, 3, stream);
    Tensor weight = buffer.slice(1, 5, 5 + shape[1]);
    const Tensor update = random_normal(shape, update_dtype, 4, stream);
    const Tensor value_buffer = random_normal({shape[0], shape[1] + 1}, value_dtype, 5, stream);
    Tensor value = value_buffer.slice(1, 0, shape[1]);
    const std::vector<double> w = values(weight, stream), o = values(update, stream);
    const std::vector<double> left = values(buffer.slice(1, 0, 5), stream),
                              right = values(value_buffer.slice(1, shape[1], shape[1] + 1), stream);
    muon_finish(weight, update, 1.6, rates_of(0.01, 0.1, stream), Tensor(), &value, stream);
    std::vector<double> expected, bound;
    for (std::size_t i = 0; i < w.size(); ++i) {
      expected.push_back(w[i] - 0.01 * (1.6 * o[i] + 0.1 * w[i]));
      bound.push_back(0.5 * test::ulp(dtype, expected[i]) +
                      arithmetic(stream) * 4 * (std::abs(w[i]) + 0.016 * std::abs(o[i])));
    }
    std::string message;
    if (!test::within(values(weight, stream), expected, bound, &message)) FAIL("weight: " << message);
    CHECK(values(value, stream) == values(test::convert(weight, value_dtype, stream, stream), stream));
    CHECK(values(buffer.slice(1, 0, 5), stream) == left);
    CHECK(values(value_buffer.slice(1, shape[1], shape[1] + 1), stream) == right);
  }
}

void check_keeps(StreamRef stream) {
  const Tensor gradient = random_normal({9, 5}, DType::kFloat32, 1, stream);
  Tensor momentum = random_normal({9, 5}, DType::kFloat32, 2, stream),
         update = random_normal({9, 5}, DType::kBFloat16, 3, stream);
  Tensor weight = random_normal({9, 5}, DType::kFloat32, 4, stream),
         value = random_normal({9, 5}, DType::kFloat16, 5, stream);
  const std::vector<double> m = values(momentum, stream), u = values(update, stream), w = values(weight, stream),
                            v = values(value, stream);
  muon_prepare(gradient, momentum, 0.9, true, control_of(1, true, stream), update, stream);
  muon_finish(weight, update, 1, rates_of(0.1, 0.1, stream), control_of(1, true, stream), &value, stream);
  CHECK(values(momentum, stream) == m);
  CHECK(values(update, stream) == u);
  CHECK(values(weight, stream) == w);
  CHECK(values(value, stream) == v);
  muon_finish(weight, update, 1, rates_of(0, 0.1, stream), Tensor(), nullptr, stream);
  CHECK(values(weight, stream) == w);
}

}  // namespace

TEST_CASE("muon_prepare keeps a heavy-ball momentum and looks ahead with Nesterov") {
  for (const bool nesterov : {false, true}) {
    check_prepare(DType::kFloat32, DType::kBFloat16, nesterov, kCpu);
    check_prepare(DType::kFloat32, DType::kFloat32, nesterov, kCpu);
    check_prepare(DType::kFloat64, DType::kFloat64, nesterov, kCpu);
  }
}

TEST_CASE("muon_finish steps rows apart from each other and rounds the 16-bit copy once") {
  check_finish(DType::kFloat32, DType::kBFloat16, DType::kBFloat16, kCpu);
  check_finish(DType::kFloat32, DType::kFloat32, DType::kFloat16, kCpu);
  check_finish(DType::kFloat64, DType::kFloat64, DType::kBFloat16, kCpu);
}

TEST_CASE("muon writes nothing in a skipped step, and keeps the weights' bits with a learning rate of 0") {
  check_keeps(kCpu);
}

TEST_CASE("muon refuses what does not fit, naming it") {
  const auto refused = [](auto call, const std::string& word) {
    try {
      call();
      FAIL("not refused: " << word);
    } catch (const Error& error) {
      CAPTURE(error.what());
      CHECK(error.kind() == ErrorKind::kInvalidArgument);
      CHECK(std::string(error.what()).find(word) != std::string::npos);
    }
  };
  const Tensor gradient = random_normal({4, 3}, DType::kFloat32, 1, kCpu), none;
  Tensor momentum = random_normal({4, 3}, DType::kFloat32, 2, kCpu),
         update = random_normal({4, 3}, DType::kBFloat16, 3, kCpu);
  Tensor other = random_normal({3, 4}, DType::kFloat32, 2, kCpu),
         wide = random_normal({4, 3}, DType::kFloat64, 2, kCpu);
  refused([&] { muon_prepare(gradient, other, 0.9, true, none, update, kCpu); },
          "muon_prepare: expected momentum of shape [4, 3], got [3, 4]");
  refused([&] { muon_prepare(gradient, momentum, 1, true, none, update, kCpu); }, "momentum in [0, 1), got 1");
  refused([&] { muon_prepare(gradient, momentum, 0.9, true, none, wide, kCpu); }, "float64");
  refused([&] { muon_prepare(gradient, momentum, 0.9, true, none, momentum, kCpu); }, "apart");
  refused([&] { muon_finish(other, update, 1, rates_of(1, 1, kCpu), none, nullptr, kCpu); },
          "muon_finish: expected update of shape [3, 4]");
  refused([&] { muon_finish(momentum, update, 1, none, none, nullptr, kCpu); }, "rates");
  refused([&] { muon_finish(momentum, update, 1, rates_of(1, 1, kCpu), none, &wide, kCpu); }, "value");
}

TEST_CASE("on CUDA muon_prepare keeps a heavy-ball momentum and looks ahead with Nesterov", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const bool nesterov : {false, true}) {
    check_prepare(DType::kFloat32, DType::kBFloat16, nesterov, stream);
    check_prepare(DType::kFloat32, DType::kFloat32, nesterov, stream);
  }
}

TEST_CASE("on CUDA muon_finish steps rows apart from each other and rounds the 16-bit copy once", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_finish(DType::kFloat32, DType::kBFloat16, DType::kBFloat16, stream);
  check_finish(DType::kFloat32, DType::kFloat32, DType::kFloat16, stream);
}

TEST_CASE("on CUDA muon writes nothing in a skipped step, and keeps the weights' bits with a learning rate of 0",
          "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_keeps(stream);
}
