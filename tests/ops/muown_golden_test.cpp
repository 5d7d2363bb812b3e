// Muown against the outputs of the public implementations (tests/data/goldens/README.md).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

#include "catch.h"
#include "rowan/ops/muown.h"
#include "rowan/ops/newton_schulz.h"
#include "support/compare.h"
#include "support/device.h"
#include "support/goldens.h"

namespace rowan {
namespace {

using test::Golden;

constexpr double kBound = 2e-6;

/// A golden's row tensor, [.., N, 1] or [.., 1, N], as [.., N].
Tensor row_tensor(const Golden& golden, const std::string& name, const Tensor& weight, bool transposed,
                  StreamRef stream) {
  std::vector<std::int64_t> extents(weight.shape().extents().begin(), weight.shape().extents().end());
  extents.erase(extents.end() - (transposed ? 2 : 1));
  return golden.tensor(name, stream).reshape(Shape(std::span<const std::int64_t>(extents)));
}

MuownOptions options_of(const Golden& golden, const char* momentum, const char* epsilon) {
  MuownOptions options;
  options.layout = golden.flag("transposed", false) ? MatrixLayout::kInOut : MatrixLayout::kOutIn;
  options.momentum = golden.number(momentum, 0.95);
  options.nesterov = golden.flag("nesterov", true);
  options.beta1 = golden.number("beta1", 0.9);
  options.beta2 = golden.number("beta2", 0.95);
  options.epsilon = golden.number(epsilon, 1e-8);
  options.cold_rows = ColdRows::kFloor;
  return options;
}

MuownStep step_values(double lr, double weight_decay, std::int64_t t, StreamRef stream) {
  return {Tensor::from_host({2}, std::vector<double>{lr, weight_decay}, stream),
          Tensor::from_host({1}, std::vector<std::int64_t>{t}, stream), Tensor()};
}

std::vector<double> absolute(std::vector<double> x) {
  for (double& v : x) v = std::abs(v);
  return x;
}

void check_close(const char* what, const std::vector<double>& got, const std::vector<double>& expected) {
  CAPTURE(what);
  const test::Difference d = test::difference(got, expected);
  CHECK(d.max_absolute <= kBound * d.max_reference);
}

/// One ulp of bfloat16 and 2e-6 of the row's maximum, and nearly all elements equal.
void check_update(const std::vector<double>& got, const std::vector<double>& expected, const Shape& shape,
                  bool transposed) {
  const std::int64_t lines = shape[-2], cols = shape[-1];
  std::vector<double> bound(expected.size());
  std::size_t different = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    const std::int64_t matrix = index / (lines * cols) * (lines * cols), line = index / cols % lines,
                       col = index % cols;
    double largest = 0;
    for (std::int64_t j = 0; j < (transposed ? lines : cols); ++j) {
      const std::int64_t other = transposed ? matrix + j * cols + col : matrix + line * cols + j;
      largest = std::max(largest, std::abs(expected[static_cast<std::size_t>(other)]));
    }
    bound[i] = test::ulp(DType::kBFloat16, std::max(std::abs(got[i]), std::abs(expected[i]))) + kBound * largest;
    if (got[i] != expected[i]) ++different;
  }
  std::string message;
  const bool close = test::within(got, expected, bound, &message);
  CAPTURE(message);
  CHECK(close);
  CHECK(different <= std::max<std::size_t>(1, expected.size() / 1000));
}

void check_rows_file(const std::filesystem::path& path, StreamRef stream) {
  const Golden golden(path);
  CAPTURE(golden.name());
  MuownOptions options = options_of(golden, "mu", "epsilon");
  const bool transposed = options.layout == MatrixLayout::kInOut;
  Tensor weight = golden.tensor("weight", stream);
  const Tensor gradient = golden.tensor("gradient", stream);
  const auto rows = [&](const char* name) { return row_tensor(golden, name, weight, transposed, stream); };
  MuownState state{rows("magnitude"), rows("norm"), golden.tensor("momentum", stream), rows("first_moment"),
                   rows("second_moment")};

  const DType update_dtype = golden.tensor("out_update").dtype();
  MuownUpdate out = muown_empty_update(weight, options, update_dtype, stream);
  out.direction = Tensor::empty(weight.shape(), weight.dtype(), stream);
  muown_prepare(weight, gradient, state, options, Tensor(), out, stream);
  check_close("direction", test::values(out.direction, stream), golden.values("out_direction"));
  check_close("momentum", test::values(state.momentum, stream), golden.values("out_momentum"));
  check_close("magnitude_grad", test::values(out.magnitude_grad, stream), golden.values("out_magnitude_grad"));
  if (update_dtype == DType::kBFloat16) {
    check_update(test::values(out.update, stream), golden.values("out_update"), weight.shape(), transposed);
  } else {
    check_close("update", test::values(out.update, stream), golden.values("out_update"));
  }

  const double decay = golden.number("weight_decay", 0);
  const MuownStep step = step_values(golden.number("lr", 0), decay, std::lround(golden.number("step", 1)), stream);
  options.update_scale =
      golden.number("scale", 1) / muown_scale(weight.size(transposed ? -1 : -2), weight.size(transposed ? -2 : -1));
  muown_finish(weight, gradient, state, golden.tensor("finish_update", stream), out.magnitude_grad, options, step,
               nullptr, stream);
  check_close("weight", test::values(weight, stream), golden.values("out_weight"));
  check_close("norm", test::values(state.norm, stream), golden.values("out_norm"));
  check_close("first_moment", test::values(state.first_moment, stream), golden.values("out_first_moment"));
  check_close("second_moment", test::values(state.second_moment, stream), golden.values("out_second_moment"));
  if (decay == 0) {
    check_close("magnitude", test::values(state.magnitude, stream), golden.values("out_magnitude"));
  } else {
    check_close("magnitude", absolute(test::values(state.magnitude, stream)), absolute(golden.values("out_magnitude")));
  }
}

/// "0.02*(1-s/25)" at step s, or a plain number.
double learning_rate(const std::string& text, int s) {
  double base = 0, length = 0;
  const int read = std::sscanf(text.c_str(), "%lf*(1-s/%lf)", &base, &length);
  if (read == 2) return base * (1 - s / length);
  if (read == 1 && text.find('*') == std::string::npos) return base;
  throw std::runtime_error("unknown learning rate " + text);
}

/// Each block of rows by itself; the exact polar factor takes a detour over the CPU.
Tensor orthogonalise(const Tensor& u, const MuownOptions& options, const NewtonSchulzOptions& ns, StreamRef stream) {
  const bool on_host = ns.path == NewtonSchulzPath::kSvd;
  const StreamRef at = on_host ? StreamRef() : stream;
  const Tensor in = on_host ? u.to(Device::cpu(), stream) : u;
  Tensor out = Tensor::empty(in.shape(), in.dtype(), at);
  if (options.row_blocks.empty()) {
    newton_schulz(in, out, ns, at);
  } else {
    const int dim = options.layout == MatrixLayout::kInOut ? in.rank() - 1 : in.rank() - 2;
    std::int64_t begin = 0;
    for (const RowBlock& block : options.row_blocks) {
      Tensor part = out.slice(dim, begin, begin + block.rows);
      newton_schulz(in.slice(dim, begin, begin + block.rows), part, ns, at);
      begin += block.rows;
    }
  }
  return on_host ? out.to(stream.device(), stream) : out;
}

struct Trajectory {
  double worst_weight = 0;  ///< relative Frobenius, over all steps
  MuownState state;
};

Trajectory run_trajectory(const Golden& golden, NewtonSchulzPath path, StreamRef stream) {
  MuownOptions options = options_of(golden, "momentum", "adam_eps");
  const bool transposed = options.layout == MatrixLayout::kInOut;
  Tensor weight = golden.tensor("w0", stream);
  const std::int64_t neurons = weight.size(transposed ? -1 : -2), inputs = weight.size(transposed ? -2 : -1);
  if (neurons == 3 * inputs) options.row_blocks = {{inputs}, {inputs}, {inputs}};
  NewtonSchulzOptions ns;
  ns.path = path;
  ns.steps = static_cast<int>(std::lround(golden.number("ns_steps", 5)));
  const Tensor gradients = golden.tensor("grads", stream), weights = golden.tensor("weights", stream);
  const DType dtype = path == NewtonSchulzPath::kSvd ? DType::kFloat32 : DType::kBFloat16;

  Trajectory result;
  result.state = muown_init(weight, options, stream);
  MuownUpdate out = muown_empty_update(weight, options, dtype, stream);
  for (int s = 0; s < static_cast<int>(gradients.size(0)); ++s) {
    const Tensor gradient = gradients.select(0, s);
    const MuownStep step =
        step_values(learning_rate(golden.text("lr"), s), golden.number("weight_decay", 0), s + 1, stream);
    muown_prepare(weight, gradient, result.state, options, Tensor(), out, stream);
    const Tensor update = orthogonalise(out.update, options, ns, stream);
    muown_finish(weight, gradient, result.state, update, out.magnitude_grad, options, step, nullptr, stream);
    const test::Difference d =
        test::difference(test::values(weight, stream), test::values(weights.select(0, s), stream));
    result.worst_weight = std::max(result.worst_weight, d.relative_frobenius);
  }
  return result;
}

void check_exact_trajectory(const Golden& golden, StreamRef stream) {
  const Trajectory run = run_trajectory(golden, NewtonSchulzPath::kSvd, stream);
  CHECK(run.worst_weight <= kBound);
  const bool decay = golden.number("weight_decay", 0) != 0;
  const auto error = [&](const Tensor& got, const char* name, bool sign) {
    const auto a = test::values(got, stream), b = golden.values(name);
    return sign ? test::difference(a, b).relative_frobenius
                : test::difference(absolute(a), absolute(b)).relative_frobenius;
  };
  CHECK(error(run.state.magnitude, "g", !decay) <= kBound);
  CHECK(error(run.state.norm, "v_norm", true) <= kBound);
  CHECK(error(run.state.momentum, "m_v", true) <= kBound);
  CHECK(error(run.state.first_moment, "m_g", true) <= kBound);
  CHECK(error(run.state.second_moment, "v_g", true) <= kBound);
}

void check_trajectory_file(const std::filesystem::path& path, StreamRef stream) {
  const Golden golden(path);
  CAPTURE(golden.name());
  if (golden.text("backend") == "svd") return check_exact_trajectory(golden, stream);
  const Tensor w0 = golden.tensor("w0");
  const std::int64_t shorter = std::min(w0.size(-1), w0.size(-2));
  CHECK(run_trajectory(golden, NewtonSchulzPath::kStandard, stream).worst_weight <= 2e-3);
  CHECK(run_trajectory(golden, shorter <= 64 ? NewtonSchulzPath::kSkinny : NewtonSchulzPath::kGram, stream)
            .worst_weight <= 2e-3);
}

}  // namespace

TEST_CASE("Muown rows agree with the golden files of NeMo Automodel", "[ops][golden]") {
  const auto files = test::golden_files("muown_rows");
  REQUIRE(files.size() >= 6);
  for (const auto& file : files) check_rows_file(file, StreamRef());
}

TEST_CASE("Muown trajectories agree with the golden files of the public Muown", "[ops][golden]") {
  const auto files = test::golden_files("muown_trajectory");
  REQUIRE(files.size() >= 3);
  for (const auto& file : files) check_trajectory_file(file, StreamRef());
}

TEST_CASE("Muown rows on CUDA agree with the golden files of NeMo Automodel", "[ops][golden][gpu]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const auto& file : test::golden_files("muown_rows")) check_rows_file(file, stream);
}

TEST_CASE("Muown trajectories on CUDA agree with the golden files of the public Muown", "[ops][golden][gpu]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const auto& file : test::golden_files("muown_trajectory")) check_trajectory_file(file, stream);
}

}  // namespace rowan
