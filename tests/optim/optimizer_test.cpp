#include "rowan/optim/optimizer.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/ops/adamw.h"
#include "rowan/ops/muown.h"
#include "rowan/ops/newton_schulz.h"
#include "support/compare.h"
#include "support/device.h"

using namespace rowan;
using rowan::test::random_normal;
using rowan::test::values;
using Role = Parameter::Role;

namespace {

const StreamRef kCpu;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// ---- models of a few parameters ----

Parameter make_parameter(const std::string& name, Role role, const Shape& shape, DType dtype, std::uint64_t seed,
                         StreamRef stream) {
  Parameter p;
  p.name = name;
  p.role = role;
  p.trainable = true;
  p.value = random_normal(shape, dtype, seed, stream, 0.5);
  const DType wide = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
  p.grad = Tensor::zeros(shape, wide, stream);
  return p;
}

/// Every role, two matrices of one shape, a LoRA pair whose B is zero, and a frozen weight.
std::vector<Parameter> small_model(DType dtype, StreamRef stream) {
  std::vector<Parameter> model;
  model.push_back(make_parameter("embed_tokens.weight", Role::kEmbedding, {40, 12}, dtype, 1, stream));
  model.push_back(make_parameter("q_proj.weight", Role::kMatrix, {24, 12}, dtype, 2, stream));
  model.push_back(make_parameter("v_proj.weight", Role::kMatrix, {24, 12}, dtype, 3, stream));
  model.push_back(make_parameter("down_proj.weight", Role::kMatrix, {12, 31}, dtype, 4, stream));
  model.push_back(make_parameter("q_proj.lora_A.weight", Role::kLoraA, {4, 12}, dtype, 5, stream));
  model.push_back(make_parameter("q_proj.lora_B.weight", Role::kLoraB, {24, 4}, dtype, 6, stream));
  model.back().value.zero(stream);
  model.push_back(make_parameter("frozen.weight", Role::kMatrix, {5, 5}, dtype, 7, stream));
  model.back().trainable = false;
  model.back().grad = Tensor();
  model.push_back(make_parameter("norm.weight", Role::kNorm, {12}, dtype, 8, stream));
  model.push_back(make_parameter("q_proj.bias", Role::kBias, {24}, dtype, 9, stream));
  model.push_back(make_parameter("lm_head.weight", Role::kHead, {40, 12}, dtype, 10, stream));
  return model;
}

/// The gradients of step `step`: the same numbers on every device.
void draw_gradients(std::vector<Parameter>& model, std::uint64_t step, StreamRef stream) {
  for (std::size_t i = 0; i < model.size(); ++i) {
    Parameter& p = model[i];
    if (!p.grad.defined()) continue;
    p.grad.copy_from(random_normal(p.grad.shape(), p.grad.dtype(), 1000 * step + i, stream), stream);
  }
}

void step(Optimizer& optimizer, const std::vector<Parameter>& model, double lr, StreamRef stream) {
  SingleCommunicator single;
  optimizer.step(model, {lr, 1.0}, stream, single);
}

OptimizerOptions options_for(Algorithm algorithm, double decay = 0.1) {
  OptimizerOptions options;
  options.groups = default_groups(algorithm, decay);
  return options;
}

// ---- everything that a step may change, as numbers by name ----

using Snapshot = std::map<std::string, std::vector<double>>;

Snapshot snapshot(const Optimizer& optimizer, const std::vector<Parameter>& model, StreamRef stream) {
  Snapshot all;
  for (const Parameter& p : model) all["value." + p.name] = values(p.value, stream);
  for (const NamedTensor& t : optimizer.state()) all[t.name] = values(t.tensor, stream);
  return all;
}

/// Without what the last step left for the next to overwrite.
Snapshot lasting(Snapshot all) {
  all["step_control"] = {all["step_control"][StepControl::kSkipCount]};
  return all;
}

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](double x, double y) { return x == y || (std::isnan(x) && std::isnan(y)); });
}

void check_same(const Snapshot& a, const Snapshot& b) {
  REQUIRE(a.size() == b.size());
  for (const auto& [name, numbers] : a) {
    CAPTURE(name);
    REQUIRE(b.count(name) == 1);
    CHECK(same_bits(numbers, b.at(name)));
  }
}

Tensor find(const std::vector<NamedTensor>& state, const std::string& name) {
  for (const NamedTensor& t : state) {
    if (t.name == name) return t.tensor;
  }
  FAIL("no state named " << name);
  return {};
}

std::int64_t count_of(const Optimizer& optimizer, const std::string& parameter, StreamRef stream) {
  return find(optimizer.state(), "step." + parameter).to_vector<std::int64_t>(stream)[0];
}

const std::vector<Algorithm> kAlgorithms = {Algorithm::kMuown, Algorithm::kMuon, Algorithm::kAdamW};

// ---- linear algebra for the checks ----

/// Singular values of a rows x cols matrix, by one-sided Jacobi on the shorter side, largest first.
std::vector<double> singular_values(std::vector<double> a, std::int64_t rows, std::int64_t cols) {
  std::vector<std::vector<double>> lines(static_cast<std::size_t>(std::min(rows, cols)));
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < cols; ++j) {
      lines[static_cast<std::size_t>(rows <= cols ? i : j)].push_back(a[static_cast<std::size_t>(i * cols + j)]);
    }
  }
  const auto dot = [](const std::vector<double>& x, const std::vector<double>& y) {
    double sum = 0;
    for (std::size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
    return sum;
  };
  for (int sweep = 0; sweep < 40; ++sweep) {
    for (std::size_t p = 0; p < lines.size(); ++p) {
      for (std::size_t q = p + 1; q < lines.size(); ++q) {
        const double product = dot(lines[p], lines[q]);
        if (product == 0) continue;
        const double zeta = (dot(lines[q], lines[q]) - dot(lines[p], lines[p])) / (2 * product);
        const double t = (zeta >= 0 ? 1 : -1) / (std::abs(zeta) + std::sqrt(1 + zeta * zeta));
        const double c = 1 / std::sqrt(1 + t * t), s = c * t;
        for (std::size_t i = 0; i < lines[p].size(); ++i) {
          const double x = lines[p][i], y = lines[q][i];
          lines[p][i] = c * x - s * y;
          lines[q][i] = s * x + c * y;
        }
      }
    }
  }
  std::vector<double> sigma;
  for (const auto& line : lines) sigma.push_back(std::sqrt(dot(line, line)));
  std::sort(sigma.rbegin(), sigma.rend());
  return sigma;
}

// ---- checks that run on either device ----

/// Every parameter steps as the operations called by hand, one parameter at a time, step it.
void check_against_operations(DType dtype, StreamRef stream) {
  std::vector<Parameter> model = small_model(dtype, stream), twin = small_model(dtype, stream);
  const OptimizerOptions options = options_for(Algorithm::kMuown);
  const auto optimizer = make_optimizer(options, model, stream);
  Tensor rates = Tensor::from_host<double>({2}, std::vector<double>{0.01, 0.1}, stream);
  Tensor no_decay = Tensor::from_host<double>({2}, std::vector<double>{0.01, 0}, stream);
  struct Own {
    AdamwArguments adamw;
    MuownOptions muown;
    MuownState state;
    MuownUpdate update;
  };
  std::map<std::string, Own> own;
  for (Parameter& p : twin) {
    if (!p.trainable) continue;
    const bool wide = p.value.dtype() == DType::kFloat32;
    p.master = wide ? p.value : test::convert(p.value, DType::kFloat32, stream, stream);
    Own& o = own[p.name];
    if (p.role == Role::kMatrix || p.role == Role::kLoraA || p.role == Role::kLoraB) {
      o.muown.cold_rows = p.role == Role::kMatrix ? ColdRows::kFloor : ColdRows::kWarm;
      o.state = muown_init(p.master, o.muown, stream);
      o.update = muown_empty_update(p.master, o.muown, DType::kBFloat16, stream);
    } else {
      o.adamw.master = p.master;
      o.adamw.gradient = p.grad;
      if (!wide) o.adamw.value = p.value;
      o.adamw.first_moment = Tensor::zeros(p.value.shape(), DType::kFloat32, stream);
      o.adamw.second_moment = Tensor::zeros(p.value.shape(), DType::kFloat32, stream);
      o.adamw.beta2 = 0.95;
      o.adamw.rates = p.role == Role::kNorm || p.role == Role::kBias ? no_decay : rates;
    }
  }
  for (std::int64_t t = 1; t <= 3; ++t) {
    draw_gradients(model, static_cast<std::uint64_t>(t), stream);
    draw_gradients(twin, static_cast<std::uint64_t>(t), stream);
    step(*optimizer, model, 0.01, stream);
    const Tensor count = Tensor::from_host<std::int64_t>({1}, std::vector<std::int64_t>{t}, stream);
    for (Parameter& p : twin) {
      if (!p.trainable) continue;
      Own& o = own[p.name];
      if (!o.state.momentum.defined()) {
        o.adamw.step = count;
        adamw_step(std::vector{o.adamw}, stream);
        continue;
      }
      muown_prepare(p.master, p.grad, o.state, o.muown, Tensor(), o.update, stream);
      Tensor orthogonal = Tensor::zeros(p.value.shape(), DType::kBFloat16, stream);
      newton_schulz(o.update.update, orthogonal, {}, stream, &o.update.row_square_sum);
      muown_finish(p.master, p.grad, o.state, orthogonal, o.update.magnitude_grad, o.muown, {rates, count, Tensor()},
                   p.value.dtype() == DType::kFloat32 ? nullptr : &p.value, stream);
    }
    for (std::size_t i = 0; i < model.size(); ++i) {
      CAPTURE(model[i].name, t);
      CHECK(same_bits(values(model[i].value, stream), values(twin[i].value, stream)));
      CHECK(count_of(*optimizer, "norm.weight", stream) == t);
    }
  }
}

/// What is not finite skips the step: nothing but the skip count changes, and the next step goes on as if it had not
/// been.
void check_skipped(Algorithm algorithm, DType dtype, StreamRef stream) {
  for (const float bad : {kNan, std::numeric_limits<float>::infinity()}) {
    CAPTURE(to_string(algorithm), to_string(dtype), bad);
    std::vector<Parameter> model = small_model(dtype, stream), straight = small_model(dtype, stream);
    const auto optimizer = make_optimizer(options_for(algorithm), model, stream);
    const auto other = make_optimizer(options_for(algorithm), straight, stream);
    draw_gradients(model, 1, stream);
    step(*optimizer, model, 0.01, stream);
    const Snapshot before = snapshot(*optimizer, model, stream);
    draw_gradients(model, 2, stream);
    model[4].grad.slice(0, 1, 2).slice(1, 3, 4).copy_from(
        Tensor::from_host<float>({1, 1}, std::vector<float>{bad}, stream), stream);
    step(*optimizer, model, 0.01, stream);
    CHECK(optimizer->report(stream).skipped);
    Snapshot after = snapshot(*optimizer, model, stream);
    CHECK(after["step_control"][StepControl::kSkipCount] == 1);
    after["step_control"] = before.at("step_control");
    check_same(after, before);
    draw_gradients(model, 3, stream);
    step(*optimizer, model, 0.01, stream);
    CHECK_FALSE(optimizer->report(stream).skipped);
    CHECK(optimizer->report(stream).skipped_steps == 1);
    for (const std::uint64_t s : {1u, 3u}) {
      draw_gradients(straight, s, stream);
      step(*other, straight, 0.01, stream);
    }
    Snapshot a = lasting(snapshot(*optimizer, model, stream)), b = lasting(snapshot(*other, straight, stream));
    b["step_control"][0] = 1;
    check_same(a, b);
  }
}

/// A parameter without a gradient for three steps: untouched, and its first step is that of a fresh optimizer.
void check_late(Algorithm algorithm, bool flagged, StreamRef stream) {
  CAPTURE(to_string(algorithm), flagged);
  std::vector<Parameter> model = small_model(DType::kFloat32, stream), fresh = small_model(DType::kFloat32, stream);
  const auto optimizer = make_optimizer(options_for(algorithm), model, stream);
  std::vector<Tensor> kept;
  const std::vector<std::size_t> late = {0, 2, 5, 7};
  const Snapshot start = snapshot(*optimizer, model, stream);
  for (std::uint64_t s = 1; s <= 3; ++s) {
    draw_gradients(model, s, stream);
    std::vector<Parameter> part = model;
    for (const std::size_t i : late) {
      part[i].grad.copy_from(
          Tensor::from_host<float>(part[i].grad.shape(),
                                   std::vector<float>(static_cast<std::size_t>(part[i].grad.elements()), kNan), stream),
          stream);
      if (flagged) {
        part[i].has_grad = false;
      } else {
        part[i].grad = Tensor();
      }
    }
    step(*optimizer, part, 0.01, stream);
    CHECK_FALSE(optimizer->report(stream).skipped);
  }
  const Snapshot now = snapshot(*optimizer, model, stream);
  for (const auto& [name, numbers] : now) {
    for (const std::size_t i : late) {
      const std::string& p = model[i].name;
      if (name.size() <= p.size() || name.substr(name.size() - p.size() - 1) != "." + p) continue;
      CAPTURE(name);
      CHECK(same_bits(numbers, start.at(name)));
    }
  }
  CHECK(count_of(*optimizer, "q_proj.weight", stream) == 3);
  const auto other = make_optimizer(options_for(algorithm), fresh, stream);
  draw_gradients(model, 4, stream);
  draw_gradients(fresh, 4, stream);
  step(*optimizer, model, 0.01, stream);
  step(*other, fresh, 0.01, stream);
  for (const std::size_t i : late) {
    CAPTURE(model[i].name);
    CHECK(count_of(*optimizer, model[i].name, stream) == 1);
    CHECK(same_bits(values(model[i].value, stream), values(fresh[i].value, stream)));
  }
  CHECK(count_of(*optimizer, "q_proj.weight", stream) == 4);
}

/// Two steps, save, two steps; and the same two from the saved state in a new optimizer.
void check_restored(Algorithm algorithm, DType dtype, StreamRef stream) {
  CAPTURE(to_string(algorithm), to_string(dtype));
  std::vector<Parameter> model = small_model(dtype, stream);
  const auto optimizer = make_optimizer(options_for(algorithm), model, stream);
  const auto run = [&](Optimizer& o, std::vector<Parameter>& m, std::uint64_t first) {
    for (std::uint64_t s = first; s < first + 2; ++s) {
      draw_gradients(m, s, stream);
      if (s == 2)
        m[1].grad.copy_from(Tensor::from_host<float>({24, 12}, std::vector<float>(288, kNan), stream), stream);
      step(o, m, 0.01 / static_cast<double>(s), stream);
    }
  };
  run(*optimizer, model, 1);  // the second one is skipped
  std::vector<NamedTensor> saved;
  for (const NamedTensor& t : optimizer->state())
    saved.push_back({t.name, t.tensor.clone(stream).to(Device::cpu(), stream)});
  std::vector<Parameter> other = small_model(dtype, stream);
  for (std::size_t i = 0; i < model.size(); ++i) other[i].value.copy_from(model[i].value, stream);
  const auto restored = make_optimizer(options_for(algorithm), other, stream);
  // A checkpoint of 16-bit parameters may hold their masters alone.
  if (dtype != DType::kFloat32) other[5].value.zero(stream);
  restored->load_state(saved, stream);
  check_same(snapshot(*restored, other, stream), snapshot(*optimizer, model, stream));
  run(*optimizer, model, 3);
  run(*restored, other, 3);
  check_same(snapshot(*restored, other, stream), snapshot(*optimizer, model, stream));
  CHECK(restored->report(stream).skipped_steps == 1);
  CHECK(count_of(*restored, "lm_head.weight", stream) == 3);
}

void check_zero_gradient(Algorithm algorithm, DType dtype, StreamRef stream) {
  CAPTURE(to_string(algorithm), to_string(dtype));
  std::vector<Parameter> model = small_model(dtype, stream);
  const auto optimizer = make_optimizer(options_for(algorithm, 0.0), model, stream);
  std::vector<std::vector<double>> before;
  for (const Parameter& p : model) before.push_back(values(p.value, stream));
  for (int s = 0; s < 3; ++s) step(*optimizer, model, 0.1, stream);
  for (std::size_t i = 0; i < model.size(); ++i) {
    CAPTURE(model[i].name);
    CHECK(values(model[i].value, stream) == before[i]);
  }
}

/// Factors inside a bordered weight step as contiguous ones do, and nothing else in the buffer changes.
void check_border(Algorithm algorithm, DType dtype, StreamRef stream) {
  CAPTURE(to_string(algorithm), to_string(dtype));
  // 20 x 12 weight, rank 3: A in the rows below, B in the columns beside.
  const Tensor buffer = random_normal({36, 76}, dtype, 1, stream);
  Parameter a = make_parameter("lora_A.weight", Role::kLoraA, {3, 12}, dtype, 2, stream);
  Parameter b = make_parameter("lora_B.weight", Role::kLoraB, {20, 3}, dtype, 3, stream);
  std::vector<Parameter> flat = {a, b}, bordered = {a, b};
  bordered[0].value = buffer.slice(0, 20, 23).slice(1, 0, 12);
  bordered[1].value = buffer.slice(0, 0, 20).slice(1, 12, 15);
  bordered[0].grad = Tensor::zeros({3, 12}, DType::kFloat32, stream);
  bordered[1].grad = Tensor::zeros({20, 5}, DType::kFloat32, stream).slice(1, 1, 4);
  const Tensor zero_row = b.value.slice(0, 4, 5);
  zero_row.zero(stream);
  for (std::size_t i = 0; i < 2; ++i) bordered[i].value.copy_from(flat[i].value, stream);
  const auto one = make_optimizer(options_for(algorithm), flat, stream);
  const auto two = make_optimizer(options_for(algorithm), bordered, stream);
  const std::vector<double> before = values(buffer, stream);
  for (std::uint64_t s = 1; s <= 3; ++s) {
    draw_gradients(flat, s, stream);
    draw_gradients(bordered, s, stream);
    step(*one, flat, 0.02, stream);
    step(*two, bordered, 0.02, stream);
  }
  check_same(snapshot(*two, bordered, stream), snapshot(*one, flat, stream));
  const std::vector<double> after = values(buffer, stream);
  std::size_t changed_outside = 0, changed_inside = 0;
  for (std::size_t i = 0; i < after.size(); ++i) {
    const std::size_t row = i / 76, col = i % 76;
    const bool inside = (row >= 20 && row < 23 && col < 12) || (row < 20 && col >= 12 && col < 15);
    if (before[i] != after[i]) ++(inside ? changed_inside : changed_outside);
  }
  CHECK(changed_outside == 0);
  CHECK(changed_inside > 50);
}

void check_clipping(StreamRef stream) {
  std::vector<Parameter> model = small_model(DType::kFloat32, stream);
  OptimizerOptions options = options_for(Algorithm::kMuon);
  options.max_gradient_norm = 0.5;
  const auto optimizer = make_optimizer(options, model, stream);
  draw_gradients(model, 1, stream);
  double square_sum = 0;
  for (const Parameter& p : model) {
    if (!p.trainable) continue;
    for (const double g : values(p.grad, stream)) square_sum += g * g;
  }
  step(*optimizer, model, 0.01, stream);
  const StepReport report = optimizer->report(stream);
  CHECK(std::abs(report.gradient_norm - std::sqrt(square_sum)) <= 1e-12 * report.gradient_norm);
  CHECK(std::abs(report.factor * report.gradient_norm - 0.5) <= 1e-12);
  const std::vector<double> momentum = values(find(optimizer->state(), "momentum.q_proj.weight"), stream);  // mu 0 + G
  const std::vector<double> first = values(find(optimizer->state(), "first_moment.norm.weight"), stream);   // 0.1 G
  const std::vector<double> g_matrix = values(model[1].grad, stream), g_norm = values(model[7].grad, stream);
  for (std::size_t i = 0; i < momentum.size(); ++i)
    CHECK(std::abs(momentum[i] - report.factor * g_matrix[i]) <= 0x1p-22 * std::abs(momentum[i]));
  for (std::size_t i = 0; i < first.size(); ++i)
    CHECK(std::abs(first[i] - 0.1 * report.factor * g_norm[i]) <= 0x1p-22 * std::abs(first[i]));
}

}  // namespace

// ---- what the optimizer computes ----

TEST_CASE("the optimizer steps every parameter as Muown's and AdamW's operations do one at a time") {
  check_against_operations(DType::kFloat32, kCpu);
  check_against_operations(DType::kBFloat16, kCpu);
}

TEST_CASE("the Muon group follows its formula in float64 with the exact polar factor") {
  std::vector<Parameter> model = {make_parameter("w", Role::kMatrix, {6, 9}, DType::kFloat64, 1, kCpu)};
  OptimizerOptions options = options_for(Algorithm::kMuon, 0.1);
  options.groups[0].newton_schulz.path = NewtonSchulzPath::kSvd;
  const auto optimizer = make_optimizer(options, model, kCpu);
  std::vector<double> w = values(model[0].value, kCpu), m(54, 0.0);
  for (std::uint64_t s = 1; s <= 4; ++s) {
    draw_gradients(model, s, kCpu);
    const std::vector<double> g = values(model[0].grad, kCpu);
    std::vector<double> u;
    for (std::size_t i = 0; i < g.size(); ++i) {
      m[i] = 0.95 * m[i] + g[i];
      u.push_back(g[i] + 0.95 * m[i]);
    }
    Tensor o = Tensor::zeros({6, 9}, DType::kFloat64, kCpu);
    newton_schulz(Tensor::from_host<double>({6, 9}, u, kCpu), o, options.groups[0].newton_schulz, kCpu);
    const std::vector<double> orthogonal = values(o, kCpu);
    for (std::size_t i = 0; i < w.size(); ++i) w[i] -= 0.02 * (0.2 * 3.0 * orthogonal[i] + 0.1 * w[i]);
    step(*optimizer, model, 0.02, kCpu);
    const std::vector<double> got = values(model[0].value, kCpu);
    for (std::size_t i = 0; i < w.size(); ++i) CHECK(std::abs(got[i] - w[i]) <= 1e-13);
  }
}

TEST_CASE("the optimizer really is Muown: an update's singular values lie in the Newton-Schulz interval") {
  const auto role = GENERATE(Role::kMatrix, Role::kLoraA, Role::kLoraB);
  const auto shape = role == Role::kMatrix ? Shape{40, 24} : role == Role::kLoraA ? Shape{8, 50} : Shape{50, 8};
  CAPTURE(to_string(role));
  std::vector<Parameter> model = {make_parameter("w", role, shape, DType::kFloat64, 1, kCpu)};
  const auto optimizer = make_optimizer(options_for(Algorithm::kMuown, 0.0), model, kCpu);
  draw_gradients(model, 1, kCpu);
  const std::vector<double> before = values(model[0].value, kCpu);
  step(*optimizer, model, 0.01, kCpu);
  // At the first step r = g, so d = W - lr c O; afterwards W' = g' d / ||d|| and r' = ||d||.
  const std::vector<double> after = values(model[0].value, kCpu);
  const std::vector<double> magnitude = values(find(optimizer->state(), "magnitude.w"), kCpu);
  const std::vector<double> norm = values(find(optimizer->state(), "norm.w"), kCpu);
  const double c = 0.2 * std::sqrt(static_cast<double>(std::max(shape[0], shape[1])));
  std::vector<double> orthogonal;
  for (std::size_t i = 0; i < after.size(); ++i) {
    const std::size_t row = i / static_cast<std::size_t>(shape[1]);
    orthogonal.push_back((before[i] - after[i] * norm[row] / magnitude[row]) / (0.01 * c));
  }
  const std::vector<double> sigma = singular_values(orthogonal, shape[0], shape[1]);
  // 0.682 to 1.134 for the exact polynomial; O is bfloat16, and rounding its elements moves a singular value by at most
  // 2^-8 ||O||_F.
  const double slack = 0x1p-8 * std::sqrt(static_cast<double>(sigma.size())) * 1.134;
  CHECK(sigma.front() <= 1.134 + slack);
  CHECK(sigma.back() >= 0.682 - slack);
}

TEST_CASE("a row of B that wakes late takes less than a tenth of the next update") {
  std::vector<Parameter> model = {make_parameter("lora_B.weight", Role::kLoraB, {256, 8}, DType::kFloat32, 1, kCpu)};
  model[0].value.zero(kCpu);
  const auto optimizer = make_optimizer(options_for(Algorithm::kMuown, 0.0), model, kCpu);
  draw_gradients(model, 1, kCpu);
  for (int j = 0; j < 8; ++j) model[0].grad.data<float>()[j] *= 1e-5f;
  step(*optimizer, model, 3e-4, kCpu);
  const std::vector<double> old_momentum = values(find(optimizer->state(), "momentum.lora_B.weight"), kCpu);
  draw_gradients(model, 2, kCpu);
  step(*optimizer, model, 3e-4, kCpu);
  const std::vector<double> momentum = values(find(optimizer->state(), "momentum.lora_B.weight"), kCpu);
  double all = 0, late = 0;
  for (std::size_t i = 0; i < momentum.size(); ++i) {
    const double u = momentum[i] - 0.95 * old_momentum[i] + 0.95 * momentum[i];  // U = D + mu M'
    all += u * u;
    if (i < 8) late += u * u;
  }
  CHECK(all > 0);
  CHECK(std::sqrt(late / all) < 0.1);
}

TEST_CASE("each row block of a fused weight steps as a weight of its own") {
  for (const Algorithm algorithm : {Algorithm::kMuown, Algorithm::kMuon}) {
    for (const MatrixLayout layout : {MatrixLayout::kOutIn, MatrixLayout::kInOut}) {
      CAPTURE(to_string(algorithm), static_cast<int>(layout));
      const std::vector<std::int64_t> rows = {24, 8, 8};
      const bool out_in = layout == MatrixLayout::kOutIn;
      Parameter fused =
          make_parameter("qkv.weight", Role::kMatrix, out_in ? Shape{40, 12} : Shape{12, 40}, DType::kFloat32, 1, kCpu);
      fused.layout = layout;
      std::vector<Parameter> parts;
      std::int64_t begin = 0;
      for (const std::int64_t n : rows) {
        Parameter part = fused;
        part.name = "part" + std::to_string(begin);
        part.value = fused.value.slice(out_in ? 0 : 1, begin, begin + n).clone(kCpu);
        part.grad = fused.grad.slice(out_in ? 0 : 1, begin, begin + n);
        parts.push_back(part);
        begin += n;
      }
      OptimizerOptions together = options_for(algorithm), apart = together;
      together.groups[0].row_blocks = rows;
      std::vector<Parameter> whole = {fused};
      const auto one = make_optimizer(together, whole, kCpu);
      const auto three = make_optimizer(apart, parts, kCpu);
      for (std::uint64_t s = 1; s <= 3; ++s) {
        draw_gradients(whole, s, kCpu);
        step(*one, whole, 0.02, kCpu);
        step(*three, parts, 0.02, kCpu);
      }
      begin = 0;
      for (std::size_t i = 0; i < rows.size(); ++i) {
        const Tensor part = fused.value.slice(out_in ? 0 : 1, begin, begin + rows[i]);
        const test::Difference d = test::difference(values(part, kCpu), values(parts[i].value, kCpu));
        CHECK(d.max_absolute <= 1e-6 * d.max_reference);
        begin += rows[i];
      }
    }
  }
}

TEST_CASE("a weight stored [in, out] steps as its transpose") {
  for (const Algorithm algorithm : kAlgorithms) {
    CAPTURE(to_string(algorithm));
    std::vector<Parameter> plain = {make_parameter("w", Role::kMatrix, {30, 14}, DType::kFloat32, 1, kCpu)},
                           turned = plain;
    turned[0].layout = MatrixLayout::kInOut;
    turned[0].value = plain[0].value.transpose(0, 1).clone(kCpu);
    turned[0].grad = Tensor::zeros({14, 30}, DType::kFloat32, kCpu);
    const auto one = make_optimizer(options_for(algorithm), plain, kCpu);
    const auto two = make_optimizer(options_for(algorithm), turned, kCpu);
    for (std::uint64_t s = 1; s <= 3; ++s) {
      draw_gradients(plain, s, kCpu);
      turned[0].grad.copy_from(plain[0].grad.transpose(0, 1), kCpu);
      step(*one, plain, 0.02, kCpu);
      step(*two, turned, 0.02, kCpu);
    }
    const test::Difference d =
        test::difference(values(turned[0].value.transpose(0, 1), kCpu), values(plain[0].value, kCpu));
    CHECK(d.max_absolute <=
          1e-3 * 0.02);  // bfloat16 U and O may round differently where sums were taken in another order
  }
}

TEST_CASE("gradients are scaled to the global norm") { check_clipping(kCpu); }

TEST_CASE("bfloat16 adapters move although each step is below their spacing") {
  for (const Algorithm algorithm : kAlgorithms) {
    CAPTURE(to_string(algorithm));
    const DType dtype = DType::kBFloat16;
    std::vector<Parameter> model = {make_parameter("lora_A.weight", Role::kLoraA, {4, 16}, dtype, 1, kCpu),
                                    make_parameter("lora_B.weight", Role::kLoraB, {16, 4}, dtype, 2, kCpu)};
    std::vector<std::vector<double>> before;
    for (const Parameter& p : model) before.push_back(values(p.value, kCpu));
    const auto optimizer = make_optimizer(options_for(algorithm, 0.0), model, kCpu);
    draw_gradients(model, 1, kCpu);  // the same gradient at every step
    for (int s = 0; s < 1000; ++s) step(*optimizer, model, 1e-5, kCpu);
    for (std::size_t p = 0; p < model.size(); ++p) {
      CAPTURE(model[p].name);
      const std::vector<double> after = values(model[p].value, kCpu);
      const std::vector<double> master = values(find(optimizer->state(), "master." + model[p].name), kCpu);
      double moved = 0;
      for (std::size_t i = 0; i < after.size(); ++i) {
        moved += std::abs(after[i] - before[p][i]);
        CHECK(std::abs(after[i] - master[i]) <= 0.5 * test::ulp(dtype, master[i]));
      }
      // 1000 steps of about 1e-5 each; a tenth of it leaves room for rows that turn back.
      CHECK(moved / static_cast<double>(after.size()) > 1e-3);
    }
  }
}

TEST_CASE("without a gradient and without decay the weights keep their bits") {
  for (const Algorithm algorithm : kAlgorithms) {
    check_zero_gradient(algorithm, DType::kFloat32, kCpu);
    check_zero_gradient(algorithm, DType::kBFloat16, kCpu);
  }
}

TEST_CASE("a step with a NaN or an infinity changes nothing but the skip count") {
  for (const Algorithm algorithm : kAlgorithms) {
    check_skipped(algorithm, DType::kFloat32, kCpu);
    check_skipped(algorithm, DType::kBFloat16, kCpu);
  }
}

TEST_CASE("a parameter's count starts at its first gradient") {
  for (const Algorithm algorithm : kAlgorithms) {
    check_late(algorithm, false, kCpu);
    check_late(algorithm, true, kCpu);
  }
}

TEST_CASE("LoRA factors inside a bordered weight step as contiguous ones, and nothing else in the buffer changes") {
  for (const Algorithm algorithm : kAlgorithms) {
    check_border(algorithm, DType::kFloat32, kCpu);
    check_border(algorithm, DType::kBFloat16, kCpu);
  }
}

TEST_CASE("learning rate and decay of each step are the ones staged for it") {
  for (const Algorithm algorithm : kAlgorithms) {
    CAPTURE(to_string(algorithm));
    std::vector<Parameter> model = small_model(DType::kFloat64, kCpu);
    OptimizerOptions options = options_for(algorithm, 0.25);
    options.groups[1].learning_rate_scale = 0;  // the LoRA factors
    const auto optimizer = make_optimizer(options, model, kCpu);
    SingleCommunicator single;
    draw_gradients(model, 1, kCpu);
    const Snapshot start = snapshot(*optimizer, model, kCpu);
    optimizer->step(model, {0.0, 1.0}, kCpu, single);
    for (const Parameter& p : model) CHECK(values(p.value, kCpu) == start.at("value." + p.name));
    optimizer->stage(model, {0.5, 1.0}, kCpu);
    optimizer->stage(model, {0.01, 1.0}, kCpu);  // the later one counts
    optimizer->apply(model, kCpu, single);
    CHECK(values(model[1].value, kCpu) != start.at("value.q_proj.weight"));
    CHECK(values(model[4].value, kCpu) == start.at("value.q_proj.lora_A.weight"));
    // The same step twice from one state, with and without decay: they differ by lr w W where decay is on.
    std::vector<NamedTensor> saved;
    for (const NamedTensor& t : optimizer->state()) saved.push_back({t.name, t.tensor.clone(kCpu)});
    const Snapshot before = snapshot(*optimizer, model, kCpu);
    optimizer->step(model, {0.01, 0.0}, kCpu, single);
    const std::vector<double> table = values(model[0].value, kCpu), norm = values(model[7].value, kCpu),
                              head = values(model[9].value, kCpu);
    for (const Parameter& p : model)
      p.value.copy_from(Tensor::from_host<double>(p.value.shape(), before.at("value." + p.name), kCpu), kCpu);
    optimizer->load_state(saved, kCpu);
    optimizer->step(model, {0.01, 2.0}, kCpu, single);
    const std::vector<double> decayed = values(model[0].value, kCpu), &old = before.at("value.embed_tokens.weight");
    for (std::size_t i = 0; i < old.size(); ++i)
      CHECK(std::abs(decayed[i] - (table[i] - 0.01 * 2.0 * 0.25 * old[i])) <= 1e-15);
    CHECK(values(model[7].value, kCpu) == norm);  // norms are spared
    CHECK(values(model[9].value, kCpu) != head);
  }
}

TEST_CASE("a step that the caller gives up is counted and changes nothing else") {
  std::vector<Parameter> model = small_model(DType::kFloat32, kCpu);
  const auto optimizer = make_optimizer(options_for(Algorithm::kMuown), model, kCpu);
  const Snapshot before = lasting(snapshot(*optimizer, model, kCpu));
  optimizer->skip_step(kCpu);
  CHECK(optimizer->report(kCpu).skipped);
  Snapshot after = lasting(snapshot(*optimizer, model, kCpu));
  CHECK(after["step_control"][0] == 1);
  after["step_control"][0] = 0;
  check_same(after, before);
  draw_gradients(model, 1, kCpu);
  step(*optimizer, model, 0.01, kCpu);
  CHECK_FALSE(optimizer->report(kCpu).skipped);
  CHECK(count_of(*optimizer, "norm.weight", kCpu) == 1);
}

// ---- state ----

TEST_CASE("save, load and step gives the bits of the straight run") {
  for (const Algorithm algorithm : kAlgorithms) {
    check_restored(algorithm, DType::kFloat32, kCpu);
    check_restored(algorithm, DType::kBFloat16, kCpu);
    check_restored(algorithm, DType::kFloat16, kCpu);
  }
}

TEST_CASE("two runs give the same bits") {
  for (const Algorithm algorithm : kAlgorithms) {
    std::vector<Snapshot> runs;
    for (int run = 0; run < 2; ++run) {
      std::vector<Parameter> model = small_model(DType::kBFloat16, kCpu);
      const auto optimizer = make_optimizer(options_for(algorithm), model, kCpu);
      for (std::uint64_t s = 1; s <= 3; ++s) {
        draw_gradients(model, s, kCpu);
        step(*optimizer, model, 0.01, kCpu);
      }
      runs.push_back(snapshot(*optimizer, model, kCpu));
    }
    check_same(runs[0], runs[1]);
  }
}

TEST_CASE("a state that does not fit is refused naming the tensor, with nothing changed") {
  std::vector<Parameter> model = small_model(DType::kBFloat16, kCpu);
  const auto optimizer = make_optimizer(options_for(Algorithm::kMuown), model, kCpu);
  std::vector<NamedTensor> good;
  for (const NamedTensor& t : optimizer->state())
    good.push_back({t.name, random_normal(t.tensor.shape(), t.tensor.dtype(), 1, kCpu)});
  const Snapshot before = snapshot(*optimizer, model, kCpu);
  const auto refused = [&](const std::vector<NamedTensor>& state, const std::string& word) {
    try {
      optimizer->load_state(state, kCpu);
      FAIL("not refused: " << word);
    } catch (const Error& error) {
      CAPTURE(error.what());
      CHECK(error.kind() == ErrorKind::kFormat);
      CHECK(std::string(error.what()).find(word) != std::string::npos);
    }
    check_same(snapshot(*optimizer, model, kCpu), before);
  };
  for (std::size_t i = 0; i < good.size(); ++i) {
    std::vector<NamedTensor> state = good;
    state.erase(state.begin() + static_cast<std::ptrdiff_t>(i));
    refused(state, "\"" + good[i].name + "\", got none");
    state = good;
    state[i].tensor = random_normal({17}, state[i].tensor.dtype(), 1, kCpu);
    refused(state, "\"" + good[i].name + "\" of shape");
  }
  std::vector<NamedTensor> more = good;
  more.push_back({"momentum.of_another_model", good[0].tensor});
  refused(more, "momentum.of_another_model");
  more = good;
  more.push_back({"last", Tensor()});
  refused(more, "last");
  std::vector<Parameter> adamw_model = small_model(DType::kBFloat16, kCpu);
  const auto adamw = make_optimizer(options_for(Algorithm::kAdamW), adamw_model, kCpu);
  refused(adamw->state(), "momentum.");
}

TEST_CASE("a step after the first holds no more memory than before, and AdamW's allocates nothing") {
  for (const Algorithm algorithm : kAlgorithms) {
    CAPTURE(to_string(algorithm));
    const auto tracking = std::make_shared<TrackingAllocator>(current_allocator(Device::cpu()));
    const ScopedAllocator scoped(tracking);
    std::vector<Parameter> model = small_model(DType::kBFloat16, kCpu);
    const auto optimizer = make_optimizer(options_for(algorithm), model, kCpu);
    draw_gradients(model, 1, kCpu);
    step(*optimizer, model, 0.01, kCpu);
    const std::size_t bytes = tracking->bytes(), made = tracking->total_allocations();
    for (int s = 0; s < 3; ++s) step(*optimizer, model, 0.01, kCpu);
    CHECK(tracking->bytes() == bytes);
    if (algorithm == Algorithm::kAdamW) CHECK(tracking->total_allocations() == made);
  }
}

TEST_CASE("the optimizer follows gradients that move to other addresses") {
  for (const Algorithm algorithm : kAlgorithms) {
    CAPTURE(to_string(algorithm));
    std::vector<Parameter> still = small_model(DType::kFloat32, kCpu), moving = small_model(DType::kFloat32, kCpu);
    const auto one = make_optimizer(options_for(algorithm), still, kCpu);
    const auto two = make_optimizer(options_for(algorithm), moving, kCpu);
    for (std::uint64_t s = 1; s <= 3; ++s) {
      for (Parameter& p : moving) {
        if (p.grad.defined()) p.grad = Tensor::zeros(p.grad.shape(), p.grad.dtype(), kCpu);
      }
      draw_gradients(still, s, kCpu);
      draw_gradients(moving, s, kCpu);
      step(*one, still, 0.01, kCpu);
      step(*two, moving, 0.01, kCpu);
    }
    check_same(snapshot(*one, still, kCpu), snapshot(*two, moving, kCpu));
  }
}

// ---- routing and errors ----

namespace {

void check_refused(const std::function<void()>& call, const std::string& word,
                   ErrorKind kind = ErrorKind::kInvalidArgument) {
  try {
    call();
    FAIL("not refused: " << word);
  } catch (const Error& error) {
    CAPTURE(error.what());
    CHECK(error.kind() == kind);
    CHECK(std::string(error.what()).find(word) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("the first group that takes a parameter steps it") {
  const std::vector<Parameter> model = small_model(DType::kFloat32, kCpu);
  OptimizerOptions options = options_for(Algorithm::kMuown);
  ParameterGroup special;
  special.name_pattern = "v_proj|lora_B\\.weight$";
  special.algorithm = Algorithm::kMuon;
  options.groups.insert(options.groups.begin(), special);
  const std::vector<NamedTensor> state = make_optimizer(options, model, kCpu)->state();
  const auto has = [&](const std::string& name) {
    return std::any_of(state.begin(), state.end(), [&](const NamedTensor& t) { return t.name == name; });
  };
  CHECK(has("momentum.q_proj.weight"));
  CHECK(has("magnitude.q_proj.weight"));
  CHECK(has("magnitude.q_proj.lora_A.weight"));
  CHECK(has("momentum.v_proj.weight"));
  CHECK_FALSE(has("magnitude.v_proj.weight"));
  CHECK_FALSE(has("magnitude.q_proj.lora_B.weight"));
  for (const char* name : {"embed_tokens.weight", "norm.weight", "q_proj.bias", "lm_head.weight"}) {
    CHECK(has(std::string("second_moment.") + name));
    CHECK_FALSE(has(std::string("momentum.") + name));
  }
  CHECK_FALSE(has("step.frozen.weight"));
  CHECK_FALSE(has("master.q_proj.weight"));  // float32 values are their own masters
}

TEST_CASE("algorithm names are read and written, and wrong ones refused by name") {
  for (const Algorithm algorithm : kAlgorithms) CHECK(parse_algorithm(to_string(algorithm)) == algorithm);
  check_refused([] { parse_algorithm("adam"); }, "expected muown, muon or adamw, got \"adam\"");
}

TEST_CASE("options that make no sense are refused naming the field or the parameter") {
  const std::vector<Parameter> model = small_model(DType::kFloat32, kCpu);
  const auto with = [&](const std::function<void(OptimizerOptions&)>& change) {
    return [&model, change] {
      OptimizerOptions options = options_for(Algorithm::kMuown);
      change(options);
      make_optimizer(options, model, kCpu);
    };
  };
  check_refused(with([](OptimizerOptions& o) { o.max_gradient_norm = -1; }),
                "max_gradient_norm >= 0 and finite, got -1");
  check_refused(with([](OptimizerOptions& o) { o.groups[0].momentum = 1; }), "momentum in [0, 1), got 1");
  check_refused(with([](OptimizerOptions& o) { o.groups[2].beta2 = kNan; }), "beta2");
  check_refused(with([](OptimizerOptions& o) { o.groups[1].weight_decay = -0.1; }), "weight_decay");
  check_refused(with([](OptimizerOptions& o) { o.groups[1].learning_rate_scale = kNan; }), "learning_rate_scale");
  check_refused(with([](OptimizerOptions& o) { o.groups[1].magnitude_lr = -2; }), "magnitude_lr");
  check_refused(with([](OptimizerOptions& o) { o.groups.pop_back(); }), "none for \"norm.weight\" (role norm)");
  check_refused(with([](OptimizerOptions& o) { o.groups[0].name_pattern = "("; }), "regular expression, got \"(\"");
  check_refused(with([](OptimizerOptions& o) {
                  o.groups.insert(o.groups.begin(), ParameterGroup());
                  o.groups[0].name_pattern = "o_proj";
                }),
                "got \"o_proj\", which takes none");
  check_refused(with([](OptimizerOptions& o) { o.groups[3].algorithm = Algorithm::kMuown; }),
                "muown of \"norm.weight\": expected a matrix");
  check_refused(with([](OptimizerOptions& o) { o.groups[0].row_blocks = {10, 10}; }), "24 output neurons, got 20");
}

TEST_CASE("parameters that do not fit are refused by name") {
  const OptimizerOptions options = options_for(Algorithm::kMuown);
  std::vector<Parameter> twice = small_model(DType::kFloat32, kCpu);
  twice[2].name = twice[1].name;
  check_refused([&] { make_optimizer(options, twice, kCpu); }, "two of \"q_proj.weight\"");
  std::vector<Parameter> other = small_model(DType::kBFloat16, kCpu);
  other[1].master = random_normal({24, 11}, DType::kFloat32, 1, kCpu);
  check_refused([&] { make_optimizer(options, other, kCpu); }, "[24, 11]");
  other[1].master = random_normal({24, 12}, DType::kBFloat16, 1, kCpu);
  check_refused([&] { make_optimizer(options, other, kCpu); }, "float32, got bfloat16");
}

TEST_CASE("a step with arguments that do not fit is refused by name and changes nothing") {
  for (const Algorithm algorithm : kAlgorithms) {
    CAPTURE(to_string(algorithm));
    std::vector<Parameter> model = small_model(DType::kFloat32, kCpu);
    const auto optimizer = make_optimizer(options_for(algorithm), model, kCpu);
    draw_gradients(model, 1, kCpu);
    const Snapshot before = snapshot(*optimizer, model, kCpu);
    const auto refused = [&](const std::function<void(std::vector<Parameter>&)>& change, const std::string& word) {
      std::vector<Parameter> changed = model;
      change(changed);
      check_refused([&] { step(*optimizer, changed, 0.01, kCpu); }, word);
      check_same(snapshot(*optimizer, model, kCpu), before);
    };
    refused(
        [](std::vector<Parameter>& m) {
          m[9].grad = random_normal({40, 11}, DType::kFloat32, 1, kCpu);
        },
        "the gradient of lm_head.weight of shape [40, 12], got [40, 11]");
    refused(
        [](std::vector<Parameter>& m) {
          m[9].grad = random_normal({40, 12}, DType::kBFloat16, 1, kCpu);
        },
        "the gradient of lm_head.weight of dtype float32");
    refused(
        [](std::vector<Parameter>& m) {
          m[9].grad = random_normal({12, 40}, DType::kFloat32, 1, kCpu).transpose(0, 1);
        },
        "lm_head.weight");
    refused([](std::vector<Parameter>& m) { m.pop_back(); }, "expected 9 trainable parameters, got 8");
    refused([](std::vector<Parameter>& m) { std::swap(m[1], m[2]); }, "got \"v_proj.weight\"");
    refused([](std::vector<Parameter>& m) { m.push_back(m[0]); }, "got \"embed_tokens.weight\"");
    refused([](std::vector<Parameter>& m) { m[1].value = m[1].value.clone(kCpu); },
            "value of \"q_proj.weight\" where it was");
    SingleCommunicator single;
    check_refused([&] { optimizer->step(model, {-1.0, 1.0}, kCpu, single); }, "learning_rate >= 0 and finite, got -1");
    check_refused([&] { optimizer->step(model, {kNan, 1.0}, kCpu, single); }, "learning_rate");
    check_refused([&] { optimizer->step(model, {0.1, -1.0}, kCpu, single); }, "weight_decay_scale");
    check_same(snapshot(*optimizer, model, kCpu), before);
    step(*optimizer, model, 0.01, kCpu);  // and it still works
    CHECK(count_of(*optimizer, "norm.weight", kCpu) == 1);
  }
}

// ---- more ranks than one ----

namespace {

/// Three ranks that all hold what this one holds.
class ThreeEqualRanks final : public Communicator {
 public:
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 3; }
  void barrier(StreamRef) override {}
  void synchronize(StreamRef) override {}
  int reduced = 0;

 private:
  void do_all_reduce(Tensor& data, ReduceOp op, StreamRef) override {
    ++reduced;
    if (op == ReduceOp::kSum) {
      for (std::int64_t i = 0; i < data.elements(); ++i) data.data<double>()[i] *= 3;
    }
  }
  void do_all_gather(const Tensor&, Tensor&, StreamRef) override {}
  void do_reduce_scatter(const Tensor&, Tensor&, ReduceOp, StreamRef) override {}
  void do_all_to_all(std::span<const Tensor>, std::span<const Tensor>, StreamRef) override {}
  void do_broadcast(Tensor&, int, StreamRef) override {}
};

}  // namespace

TEST_CASE("over ranks the norm sums the rows that each holds and counts whole parameters once") {
  std::vector<Parameter> model = small_model(DType::kFloat32, kCpu);
  const auto make = [&] { return make_optimizer(options_for(Algorithm::kAdamW), model, kCpu); };
  model[1].shard = {72, 0};
  const auto optimizer = make();
  draw_gradients(model, 1, kCpu);
  double expected = 0;
  for (std::size_t i = 0; i < model.size(); ++i) {
    if (!model[i].trainable) continue;
    for (const double g : values(model[i].grad, kCpu)) expected += g * g * (i == 1 ? 3 : 1);
  }
  ThreeEqualRanks ranks;
  optimizer->step(model, {0.01, 1.0}, kCpu, ranks);
  CHECK(ranks.reduced == 1);
  CHECK(std::abs(optimizer->report(kCpu).gradient_norm - std::sqrt(expected)) <= 1e-12 * std::sqrt(expected));
}

// ---- CUDA ----

TEST_CASE("on CUDA the optimizer steps every parameter as Muown's and AdamW's operations do one at a time",
          "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_against_operations(DType::kFloat32, stream);
  check_against_operations(DType::kBFloat16, stream);
}

TEST_CASE("on CUDA the optimizer follows the CPU", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const Algorithm algorithm : kAlgorithms) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      std::vector<Parameter> model = small_model(dtype, stream), twin = small_model(dtype, kCpu);
      const auto optimizer = make_optimizer(options_for(algorithm), model, stream);
      const auto other = make_optimizer(options_for(algorithm), twin, kCpu);
      const Snapshot start = snapshot(*other, twin, kCpu);
      for (std::uint64_t s = 1; s <= 3; ++s) {
        draw_gradients(model, s, stream);
        draw_gradients(twin, s, kCpu);
        step(*optimizer, model, 0.01, stream);
        step(*other, twin, 0.01, kCpu);
      }
      Snapshot got = snapshot(*optimizer, model, stream), expected = snapshot(*other, twin, kCpu);
      for (const Parameter& p : model) {
        if (!p.trainable) continue;
        CAPTURE(to_string(algorithm), to_string(dtype), p.name);
        // Masters, so that rounding to 16 bits does not hide the rest.
        const std::string name = (dtype == DType::kFloat32 ? "value." : "master.") + p.name;
        std::vector<double> a = got.at(name), b = expected.at(name);
        const std::vector<double>& from = start.at(name);
        for (std::size_t i = 0; i < a.size(); ++i) {
          a[i] -= from[i];
          b[i] -= from[i];
        }
        // Matrices: twice the error that bfloat16 Newton-Schulz has against the exact polynomial. The rest: float32
        // rounding of weights near 1 against three steps of about 0.01.
        const bool matrix = algorithm != Algorithm::kAdamW &&
                            (p.role == Role::kMatrix || p.role == Role::kLoraA || p.role == Role::kLoraB);
        CHECK(test::difference(a, b).relative_frobenius <= (matrix ? 2e-2 : 2e-5));
        CHECK(got.at("step." + p.name) == expected.at("step." + p.name));
      }
    }
  }
}

TEST_CASE("on CUDA gradients are scaled to the global norm", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_clipping(stream);
}

TEST_CASE("on CUDA without a gradient and without decay the weights keep their bits", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const Algorithm algorithm : kAlgorithms) {
    check_zero_gradient(algorithm, DType::kFloat32, stream);
    check_zero_gradient(algorithm, DType::kBFloat16, stream);
  }
}

TEST_CASE("on CUDA a step with a NaN or an infinity changes nothing but the skip count", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const Algorithm algorithm : kAlgorithms) {
    check_skipped(algorithm, DType::kFloat32, stream);
    check_skipped(algorithm, DType::kBFloat16, stream);
  }
}

TEST_CASE("on CUDA a parameter's count starts at its first gradient", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const Algorithm algorithm : kAlgorithms) {
    check_late(algorithm, false, stream);
    check_late(algorithm, true, stream);
  }
}

TEST_CASE(
    "on CUDA LoRA factors inside a bordered weight step as contiguous ones, and nothing else in the buffer changes",
    "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const Algorithm algorithm : kAlgorithms) {
    check_border(algorithm, DType::kFloat32, stream);
    check_border(algorithm, DType::kBFloat16, stream);
  }
}

TEST_CASE("on CUDA save, load and step gives the bits of the straight run", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const Algorithm algorithm : kAlgorithms) {
    check_restored(algorithm, DType::kFloat32, stream);
    check_restored(algorithm, DType::kBFloat16, stream);
    check_restored(algorithm, DType::kFloat16, stream);
  }
}
