#include "rowan/nn/lora_linear.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/ops/elementwise.h"
#include "support/device.h"
#include "support/lora_oracle.h"

using namespace rowan;
using namespace rowan::test;
using Place = LoraConfig::DropoutPlace;

namespace {

const std::vector<DType> kAll = {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16};
const std::vector<DType> kCuda = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

LoraConfig config(std::int64_t rank, double alpha, double dropout = 0, Place place = Place::kInput) {
  LoraConfig c;
  c.rank = rank;
  c.alpha = alpha;
  c.dropout = dropout;
  c.dropout_place = place;
  return c;
}

LinearPart part(const std::string& name, std::int64_t out, std::optional<LoraConfig> lora, bool bias = false) {
  return {name, out, bias, lora};
}

std::vector<LinearPart> single(std::optional<LoraConfig> lora, bool bias = false) {
  return {part("o_proj", 31, lora, bias)};
}
/// Three adapters of different rank and scale on one x, and a layer without one between them.
std::vector<LinearPart> grouped(double dropout = 0, Place place = Place::kInput, bool bias = false) {
  return {part("q_proj", 33, config(4, 8, dropout, place), bias), part("bare", 5, std::nullopt, false),
          part("k_proj", 16, config(17, 4, dropout, place), bias),
          part("v_proj", 9, config(1, 3, dropout, place), bias)};
}
/// Adapters of one scale: one pass over x serves all of them.
std::vector<LinearPart> equal_scales() {
  return {part("gate_proj", 40, config(8, 16)), part("up_proj", 40, config(8, 16))};
}

void set(const Parameter& p, const Tensor& source, StreamRef stream) {
  Tensor value = p.value;
  cast(source, value, stream);
  if (!p.master.defined() || p.master.shares_storage(p.value)) return;
  Tensor master = p.master;
  cast(value, master, stream);
}

/// Random values of the layer's dtype in every parameter.
void randomise(const LoraLinear& layer, StreamRef stream) {
  std::uint64_t seed = 100;
  for (const Parameter& p : layer.parameters())
    set(p, random_normal(p.value.shape(), p.value.dtype(), seed++, stream, 0.3), stream);
}

void zero_gradients(const LoraLinear& layer, StreamRef stream) {
  for (const Parameter& p : layer.parameters()) {
    if (p.grad.defined()) p.grad.zero(stream);
  }
}

const Parameter& find(const std::vector<Parameter>& all, const std::string& name) {
  for (const Parameter& p : all) {
    if (p.name == name) return p;
  }
  throw std::runtime_error("no parameter " + name);
}

/// x or dy with the layer's slack (full of NaN), or without it and a misaligned base.
Tensor input(const Tensor& t, std::int64_t slack, bool spare, StreamRef stream) {
  if (!spare) return with_gaps(t, 3, 1, stream);
  Tensor roomy = Tensor::empty_with_slack(t.shape(), slack, t.dtype(), stream);
  Tensor all = roomy.with_slack(roomy.slack());
  fill(all, std::nan(""), stream);
  roomy.copy_from(t, stream);
  return roomy;
}

Tensor poisoned(const Shape& shape, DType dtype, StreamRef stream) {
  Tensor t = Tensor::empty(shape, dtype, stream);
  fill(t, std::nan(""), stream);
  return with_gaps(t, 2, 1, stream);
}

void check(const Tensor& t, const Estimate& e, StreamRef stream) {
  std::string message;
  const bool good = agrees(t, e, stream, &message);
  INFO(message);
  CHECK(good);
}

Estimate columns(const Estimate& e, std::int64_t begin, std::int64_t end) {
  Estimate out{Matrix(e.exact.rows, end - begin), Matrix(e.exact.rows, end - begin)};
  for (std::int64_t i = 0; i < e.exact.rows; ++i) {
    for (std::int64_t j = begin; j < end; ++j) {
      out.exact.at(i, j - begin) = e.exact.at(i, j);
      out.error.at(i, j - begin) = e.error.at(i, j);
    }
  }
  return out;
}

/// The mask of a part, from the layer's documented rule.
DropoutMask mask_of(const LinearPart& p, std::size_t index, const DropoutKey& key) {
  return {p.lora->dropout, key.seed ^ (0x9E3779B97F4A7C15u * static_cast<std::uint64_t>(index)), key.offset, {}};
}

struct Run {
  std::vector<LinearPart> parts;
  std::int64_t m = 20, k = 24;
  DType dtype = DType::kFloat64;
  bool spare = true;  ///< x and dy bring slack
  bool train_weight = false;
  std::optional<DropoutKey> key = {};
};

/// One forward and backward of a layer with random weights, every result against float64.
void check_run(const Run& run, StreamRef stream) {
  CAPTURE(run.dtype, run.spare, run.m, run.k, run.parts.size(), run.parts[0].lora ? run.parts[0].lora->rank : 0,
          run.key.has_value());
  const LoraLinear layer(run.k, run.parts, run.dtype, run.train_weight, stream);
  randomise(layer, stream);
  const std::vector<Parameter> parameters = layer.parameters();
  const std::int64_t n = layer.out_features(), slack = layer.slack_columns();
  const Tensor x = input(random_normal({run.m, run.k}, run.dtype, 1, stream), slack, run.spare, stream);
  const Tensor dy = input(random_normal({run.m, n}, run.dtype, 2, stream), slack, run.spare, stream);
  const Matrix x_host = host(x, stream), dy_host = host(dy, stream);

  Tensor y = poisoned({run.m, n}, run.dtype, stream), dx = poisoned({run.m, run.k}, run.dtype, stream);
  LoraLinearContext context;
  layer.forward(x, y, context, stream, run.key);
  layer.backward(dy, context, &dx, stream);
  CHECK(values(x, stream) == x_host.v);
  CHECK(values(dy, stream) == dy_host.v);

  // One rounding where the adapter rides in the product; one more where it is added afterwards.
  bool input_dropped = false, output_dropped = false;
  for (const LinearPart& p : run.parts) {
    if (!run.key || !p.lora || p.lora->dropout == 0) continue;
    (p.lora->dropout_place == Place::kInput ? input_dropped : output_dropped) = true;
  }
  const DType sums = accumulator(run.dtype);
  Estimate dx_base{Matrix(run.m, run.k), Matrix(run.m, run.k)}, dx_adapter = dx_base;
  std::int64_t row = 0, adapters = 0;
  for (std::size_t i = 0; i < run.parts.size(); ++i) {
    const LinearPart& p = run.parts[i];
    const std::int64_t out = p.out_features;
    const Matrix w = host(find(parameters, p.name + ".weight").value, stream);
    const Estimate dy_part = columns(stored(dy_host), row, row + out);
    Estimate base = product(stored(x_host), transposed(stored(w)), 1, sums), adapter;
    dx_base = plus(dx_base, product(dy_part, stored(w), 1, sums));
    if (p.bias) {
      const std::vector<double> bias = values(find(parameters, p.name + ".bias").value, stream);
      for (std::size_t e = 0; e < base.exact.v.size(); ++e) base.exact.v[e] += bias[e % bias.size()];
      for (std::size_t e = 0; e < base.exact.v.size(); ++e)
        base.error.v[e] += 2 * ulp(sums, std::abs(base.exact.v[e]) + std::abs(bias[e % bias.size()]));
    }
    if (p.lora) {
      ++adapters;
      const Matrix a = host(find(parameters, p.name + ".lora_A.weight").value, stream);
      const Matrix b = host(find(parameters, p.name + ".lora_B.weight").value, stream);
      std::optional<DropoutMask> in, behind;
      if (run.key && p.lora->dropout > 0)
        (p.lora->dropout_place == Place::kInput ? in : behind) = mask_of(p, i, *run.key);
      const DropoutMask *const in_mask = in ? &*in : nullptr, *const behind_mask = behind ? &*behind : nullptr;
      const double scale = p.lora->scale();
      const Estimate u = shrink_estimate(x_host, a, scale, run.dtype, in_mask);
      const Estimate t = shrink_estimate(dy_part.exact, transposed(b), scale, run.dtype, behind_mask);
      adapter = masked(product(u, transposed(stored(b)), 1, sums), behind_mask);
      dx_adapter = plus(dx_adapter, masked(product(t, stored(a), 1, sums), in_mask));
      check(find(parameters, p.name + ".lora_A.weight").grad, reduce_estimate(t, x_host, run.dtype, nullptr, in_mask),
            stream);
      check(find(parameters, p.name + ".lora_B.weight").grad,
            transposed(reduce_estimate(u, dy_part.exact, run.dtype, nullptr, behind_mask)), stream);
    }
    Estimate y_part = base;
    if (p.lora) y_part = run.spare && !output_dropped ? plus(base, adapter) : plus(rounded(base, run.dtype), adapter);
    if (!p.lora && !(run.spare && !output_dropped)) y_part = rounded(base, run.dtype);  // zeros are added to it
    check(y.slice(1, row, row + out), rounded(y_part, run.dtype), stream);
    if (run.train_weight) {
      check(find(parameters, p.name + ".weight").grad, reduce_estimate(dy_part, x_host, run.dtype), stream);
      if (p.bias) {
        Matrix ones(run.m, 1);
        std::fill(ones.v.begin(), ones.v.end(), 1.0);
        const Tensor grad = find(parameters, p.name + ".bias").grad;
        check(grad.reshape({grad.size(0), 1}),
              transposed(rounded(product(transposed(stored(ones)), dy_part, 1, sums), sums)), stream);
      }
    }
    row += out;
  }
  if (run.spare && !input_dropped) {
    check(dx, rounded(plus(dx_base, dx_adapter), run.dtype), stream);
  } else {
    Estimate total = rounded(dx_base, run.dtype);
    if (!input_dropped) {
      total = rounded(plus(total, dx_adapter), run.dtype);
    } else {
      total = plus(total, dx_adapter);
      for (std::int64_t i = 0; i < adapters; ++i) total = rounded(total, run.dtype);  // one rounding a part
    }
    check(dx, total, stream);
  }
}

void check_runs(const std::vector<DType>& dtypes, StreamRef stream) {
  for (const DType dtype : dtypes) {
    for (const bool spare : {true, false}) {
      for (const std::int64_t rank : {1, 3, 4, 8, 12, 17, 24, 100})
        check_run({.parts = single(config(rank, 2.0 * static_cast<double>(rank))), .dtype = dtype, .spare = spare},
                  stream);
      check_run({.parts = single(std::nullopt), .dtype = dtype, .spare = spare}, stream);
      check_run({.parts = grouped(), .dtype = dtype, .spare = spare}, stream);
      check_run({.parts = grouped(0, Place::kInput, true), .m = 7, .k = 65, .dtype = dtype, .spare = spare}, stream);
      check_run({.parts = equal_scales(), .m = 33, .k = 127, .dtype = dtype, .spare = spare}, stream);
      check_run({.parts = single(config(8, 16), true), .m = 1, .k = 1, .dtype = dtype, .spare = spare}, stream);
      check_run({.parts = grouped(0, Place::kInput, true), .dtype = dtype, .spare = spare, .train_weight = true},
                stream);
    }
  }
}

void check_dropout_runs(const std::vector<DType>& dtypes, StreamRef stream) {
  for (const DType dtype : dtypes) {
    for (const bool spare : {true, false}) {
      for (const Place place : {Place::kInput, Place::kOutput}) {
        check_run({.parts = single(config(8, 16, 0.5, place)), .dtype = dtype, .spare = spare, .key = DropoutKey{3, 4}},
                  stream);
        check_run({.parts = grouped(0.25, place, true),
                   .m = 33,
                   .k = 31,
                   .dtype = dtype,
                   .spare = spare,
                   .key = DropoutKey{5, 6}},
                  stream);
        check_run({.parts = grouped(0.25, place), .dtype = dtype, .spare = spare}, stream);  // no key: evaluation
      }
    }
  }
}

/// A trial layer with dropout where asked: forward results by key.
struct Trial {
  LoraLinear layer;
  Tensor x, dy;
  LoraLinearContext context;

  Trial(std::vector<LinearPart> parts, DType dtype, StreamRef stream, std::int64_t m = 12, std::int64_t k = 20,
        bool train_weight = false)
      : layer(k, std::move(parts), dtype, train_weight, stream) {
    randomise(layer, stream);
    x = input(random_normal({m, k}, dtype, 1, stream), layer.slack_columns(), true, stream);
    dy = input(random_normal({m, layer.out_features()}, dtype, 2, stream), layer.slack_columns(), true, stream);
  }
  Tensor forward(StreamRef stream, const std::optional<DropoutKey>& key = {}) {
    Tensor y = Tensor::empty({x.size(0), layer.out_features()}, x.dtype(), stream);
    layer.forward(x, y, context, stream, key);
    return y;
  }
  Tensor backward(StreamRef stream) {
    Tensor dx = Tensor::empty(x.shape(), x.dtype(), stream);
    layer.backward(dy, context, &dx, stream);
    return dx;
  }
};

std::vector<std::vector<double>> gradients(const LoraLinear& layer, StreamRef stream) {
  std::vector<std::vector<double>> all;
  for (const Parameter& p : layer.parameters()) {
    if (p.grad.defined()) all.push_back(values(p.grad, stream));
  }
  return all;
}

void check_equal_keys(DType dtype, StreamRef stream) {
  Trial trial({part("q", 8, config(2, 4, 0.5)), part("k", 8, config(2, 4, 0.5))}, dtype, stream);
  const std::vector<double> y = values(trial.forward(stream, DropoutKey{1, 2}), stream),
                            s = values(trial.context.s, stream);
  const std::vector<double> again = values(trial.forward(stream, DropoutKey{1, 2}), stream);
  CHECK(again == y);
  CHECK(values(trial.context.s, stream) == s);
  CHECK(values(trial.forward(stream, DropoutKey{1, 3}), stream) != y);
  CHECK(values(trial.forward(stream, DropoutKey{2, 2}), stream) != y);
  const Tensor counter = Tensor::from_host({1}, std::vector<std::int64_t>{2}, stream);
  CHECK(values(trial.forward(stream, DropoutKey{1, 0, counter}), stream) == y);
}

void check_backward_twice(DType dtype, StreamRef stream) {
  Trial trial(grouped(0.5), dtype, stream);
  trial.forward(stream, DropoutKey{1, 2});
  const std::vector<double> dx = values(trial.backward(stream), stream);
  const auto first = gradients(trial.layer, stream);
  zero_gradients(trial.layer, stream);
  CHECK(values(trial.backward(stream), stream) == dx);
  CHECK(gradients(trial.layer, stream) == first);
}

void check_no_rows(DType dtype, StreamRef stream) {
  Trial trial(grouped(0.5, Place::kInput, true), dtype, stream, 0, 20, true);
  CHECK(trial.forward(stream, DropoutKey{1, 2}).elements() == 0);
  CHECK(trial.backward(stream).elements() == 0);
  for (const std::vector<double>& g : gradients(trial.layer, stream))
    CHECK(std::all_of(g.begin(), g.end(), [](double v) { return v == 0; }));
}

void check_switched_off(DType dtype, StreamRef stream) {
  Trial trial(grouped(), dtype, stream),
      bare({part("a", 33, {}), part("b", 5, {}), part("c", 16, {}), part("d", 9, {})}, dtype, stream);
  const std::vector<Parameter> from = trial.layer.parameters(), to = bare.layer.parameters();
  std::size_t next = 0;
  for (const Parameter& p : from) {
    if (p.role == Parameter::Role::kMatrix) set(to[next++], p.value, stream);
  }
  const std::vector<double> with = values(trial.forward(stream), stream);
  trial.layer.set_adapter_enabled(false);
  const std::vector<double> without = values(trial.forward(stream), stream);
  CHECK(without == values(bare.forward(stream), stream));
  CHECK(without != with);
  CHECK(values(trial.backward(stream), stream) == values(bare.backward(stream), stream));
  for (const std::vector<double>& g : gradients(trial.layer, stream))
    CHECK(std::all_of(g.begin(), g.end(), [](double v) { return v == 0; }));
  trial.layer.set_adapter_enabled(true);
  CHECK(values(trial.forward(stream), stream) == with);
}

void check_merge(DType dtype, bool train_weight, StreamRef stream) {
  const LoraLinear layer(40, grouped(), dtype, train_weight, stream);
  randomise(layer, stream);
  const std::vector<Parameter> all = layer.parameters();
  std::vector<Estimate> expected;
  for (const LinearPart& p : layer.parts()) {
    Estimate w = stored(host(find(all, p.name + ".weight").value, stream));
    if (p.lora) {
      const Matrix a = host(find(all, p.name + ".lora_A.weight").master, stream),
                   b = host(find(all, p.name + ".lora_B.weight").master, stream);
      w = plus(w, product(stored(b), stored(a), p.lora->scale(), accumulator(dtype)));
      for (std::size_t i = 0; i < w.error.v.size(); ++i) w.error.v[i] += ulp(accumulator(dtype), w.exact.v[i]);
      if (dtype != accumulator(dtype)) {  // half an ulp of the one rounding
        for (std::size_t i = 0; i < w.error.v.size(); ++i)
          w.error.v[i] += 0.5 * ulp(dtype, std::abs(w.exact.v[i]) + w.error.v[i]);
      }
    }
    expected.push_back(w);
  }
  layer.merge(stream);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const LinearPart& p = layer.parts()[i];
    check(find(all, p.name + ".weight").value, expected[i], stream);
    if (!p.lora) continue;
    const std::vector<double> b = values(find(all, p.name + ".lora_B.weight").value, stream);
    CHECK(std::all_of(b.begin(), b.end(), [](double v) { return v == 0; }));
    CHECK(values(find(all, p.name + ".lora_B.weight").master, stream) == b);
  }
}

void check_dx_beta(DType dtype, StreamRef stream) {
  for (const Place place : {Place::kInput, Place::kOutput}) {
    Trial trial(grouped(0.5, place), dtype, stream);
    trial.forward(stream, DropoutKey{1, 2});
    const std::vector<double> dx = values(trial.backward(stream), stream);
    Tensor sum = convert(Tensor::from_host(trial.x.shape(), std::vector<double>(dx.size(), 8), {}), dtype, {}, stream);
    trial.layer.backward(trial.dy, trial.context, &sum, stream, -0.5);
    const std::vector<double> got = values(sum, stream);
    // Up to one rounding a part in either sum.
    for (std::size_t i = 0; i < dx.size(); ++i)
      REQUIRE(std::abs(got[i] - (dx[i] - 4)) <= 8 * ulp(dtype, std::abs(dx[i]) + 4));
  }
}

/// y with an addend is y plus the addend: on the bordered and the plain path, with and without a bias and a dropout
/// mask, and whatever the addend's row stride is.
void check_addend(DType dtype, StreamRef stream) {
  for (const bool bias : {false, true}) {
    for (const bool spare : {false, true}) {
      for (const Place place : {Place::kInput, Place::kOutput}) {
        CAPTURE(dtype, bias, spare, place == Place::kInput);
        const LoraLinear layer(20, grouped(0.5, place, bias), dtype, false, stream);
        randomise(layer, stream);
        const Tensor x = input(random_normal({7, 20}, dtype, 1, stream), layer.slack_columns(), spare, stream);
        Tensor y = Tensor::empty({7, layer.out_features()}, dtype, stream);
        LoraLinearContext context;
        const DropoutKey key{1, 2};
        layer.forward(x, y, context, stream, key);
        const std::vector<double> without = values(y, stream);
        for (const std::int64_t slack : {0, 8}) {
          Tensor addend = Tensor::empty_with_slack(y.shape(), slack, dtype, stream);
          addend.copy_from(random_normal(y.shape(), dtype, 5, stream, 3.0), stream);
          const std::vector<double> added = values(addend, stream);
          layer.forward(x, y, context, stream, key, &addend);
          const std::vector<double> got = values(y, stream);
          for (std::size_t i = 0; i < got.size(); ++i)  // up to one rounding a part in either sum
            REQUIRE(std::abs(got[i] - (without[i] + added[i])) <=
                    8 * ulp(dtype, std::abs(without[i]) + std::abs(added[i]) + 1));
          CHECK(values(addend, stream) == added);
        }
      }
    }
  }
}

void check_guards(StreamRef stream, const std::vector<DType>& dtypes) {
  const auto poison = std::make_shared<PoisonAllocator>(current_allocator(stream.device()));
  {
    const ScopedAllocator scope(poison);
    for (const DType dtype : dtypes) {
      check_run({.parts = grouped(), .m = 33, .k = 31, .dtype = dtype}, stream);
      check_run({.parts = single(config(3, 6)), .m = 5, .k = 7, .dtype = dtype, .spare = false}, stream);
      check_run({.parts = grouped(0.5), .m = 9, .k = 20, .dtype = dtype, .key = DropoutKey{1, 2}}, stream);
    }
  }
  CHECK(poison->violations() == 0);
}

/// Compares dx and every gradient with central differences of sum(weight o y).
void check_differences(const std::vector<LinearPart>& parts, const std::optional<DropoutKey>& key, bool spare) {
  const StreamRef cpu;
  const LoraLinear layer(6, parts, DType::kFloat64, true, cpu);
  randomise(layer, cpu);
  Tensor x = input(random_normal({5, 6}, DType::kFloat64, 1, cpu), layer.slack_columns(), spare, cpu);
  const Tensor weight =
      input(random_normal({5, layer.out_features()}, DType::kFloat64, 2, cpu), layer.slack_columns(), spare, cpu);
  const std::vector<double> factors = values(weight, cpu);
  LoraLinearContext context;
  Tensor y = Tensor::empty(weight.shape(), DType::kFloat64, cpu), dx = Tensor::empty(x.shape(), DType::kFloat64, cpu);
  const auto loss = [&] {
    layer.forward(x, y, context, cpu, key);
    const std::vector<double> got = values(y, cpu);
    double total = 0;
    for (std::size_t i = 0; i < got.size(); ++i) total += factors[i] * got[i];
    return total;
  };
  loss();
  layer.backward(weight, context, &dx, cpu);
  const auto compare = [&](const Tensor& t, const Tensor& gradient) {
    const std::vector<double> before = values(t, cpu), got = values(gradient, cpu);
    const std::int64_t cols = t.rank() == 1 ? 1 : t.size(1);
    for (std::int64_t i = 0; i < t.elements(); ++i) {
      const Tensor row = t.slice(0, i / cols, i / cols + 1),
                   element = t.rank() == 1 ? row : row.slice(1, i % cols, i % cols + 1);
      const auto at = [&](double value) {
        element.copy_from(Tensor::from_host(element.shape(), std::vector<double>{value}, {}), cpu);
        return loss();
      };
      const double v = before[static_cast<std::size_t>(i)], step = 1e-5,
                   slope = (at(v + step) - at(v - step)) / (2 * step);
      at(v);
      REQUIRE(std::abs(got[static_cast<std::size_t>(i)] - slope) <= 1e-8 * (1 + std::abs(slope)));
    }
  };
  compare(x, dx);
  for (const Parameter& p : layer.parameters()) compare(p.value, p.grad);
}

}  // namespace

TEST_CASE("LoraLinear is the float64 formula on the bordered and the plain path, for every rank and grouping") {
  check_runs(kAll, {});
}

TEST_CASE("LoraLinear applies dropout at the input or the output, the same mask forward and backward") {
  check_dropout_runs(kAll, {});
}

TEST_CASE("LoraLinear's gradients agree with central differences, with dropout before and after") {
  for (const bool spare : {true, false}) {
    check_differences({part("q", 4, config(2, 3), true), part("k", 3, config(1, 5)), part("v", 2, std::nullopt, true)},
                      {}, spare);
    for (const Place place : {Place::kInput, Place::kOutput}) {
      check_differences({part("q", 4, config(2, 3, 0.5, place), true), part("k", 3, config(1, 5, 0.3, place))},
                        DropoutKey{9, 4}, spare);
    }
    check_differences({part("q", 4, config(2, 3, 0.5, Place::kInput)), part("k", 3, config(1, 5, 0.3, Place::kOutput))},
                      DropoutKey{9, 4}, spare);
  }
}

TEST_CASE("with W = 0 and everything dropped at the input, dx is zero and so is the adapter's share of y") {
  const StreamRef cpu;
  for (const double p : {0.5, 1.0}) {
    Trial trial({part("q", 8, config(2, 4, p))}, DType::kFloat64, cpu, 4, 8);
    find(trial.layer.parameters(), "q.weight").value.zero(cpu);
    const std::vector<double> y = values(trial.forward(cpu, DropoutKey{7, 0}), cpu),
                              dx = values(trial.backward(cpu), cpu);
    const bool all_zero = std::all_of(dx.begin(), dx.end(), [](double v) { return v == 0; }) &&
                          std::all_of(y.begin(), y.end(), [](double v) { return v == 0; });
    CHECK(all_zero == (p == 1.0));
    // A dropped element of x has no gradient.
    const DropoutMask mask = mask_of(trial.layer.parts()[0], 0, DropoutKey{7, 0});
    for (std::size_t i = 0; i < dx.size(); ++i) {
      const bool keep = philox(mask.seed, i / 4, mask.offset).word[i % 4] >= mask.p * 0x1p32;
      CHECK((dx[i] != 0) == keep);
    }
  }
}

TEST_CASE("equal dropout keys give equal S and y; other seeds, offsets and counters give others") {
  for (const DType dtype : kAll) check_equal_keys(dtype, {});
}

TEST_CASE("the parts of one layer draw different masks") {
  const StreamRef cpu;
  Trial trial({part("q", 8, config(2, 4, 0.5)), part("k", 8, config(2, 4, 0.5))}, DType::kFloat64, cpu);
  const std::vector<Parameter> all = trial.layer.parameters();
  set(find(all, "k.lora_A.weight"), find(all, "q.lora_A.weight").value, cpu);
  trial.forward(cpu, DropoutKey{1, 2});
  CHECK(values(trial.context.s.slice(1, 0, 2), cpu) != values(trial.context.s.slice(1, 16, 18), cpu));
  trial.forward(cpu);
  CHECK(values(trial.context.s.slice(1, 0, 2), cpu) == values(trial.context.s.slice(1, 16, 18), cpu));
}

TEST_CASE("backward twice from one context gives the same gradients twice") {
  for (const DType dtype : kAll) check_backward_twice(dtype, {});
}

TEST_CASE("three adapters on one x give each its own gradient, with backward in any order") {
  const StreamRef cpu;
  const Tensor x = random_normal({9, 12}, DType::kFloat64, 1, cpu);  // no slack: each layer keeps its own S
  const auto run = [&](const std::vector<std::size_t>& order) {
    std::vector<LoraLinear> layers;
    std::vector<LoraLinearContext> contexts(3);
    std::vector<Tensor> dys;
    for (std::size_t i = 0; i < 3; ++i) {
      layers.emplace_back(
          12, std::vector<LinearPart>{part("p" + std::to_string(i), 5, config(2 + static_cast<std::int64_t>(i), 4))},
          DType::kFloat64, false, cpu);
      std::uint64_t seed = 10 * i;
      for (const Parameter& p : layers[i].parameters())
        set(p, random_normal(p.value.shape(), DType::kFloat64, seed++, cpu), cpu);
      Tensor y = Tensor::empty({9, 5}, DType::kFloat64, cpu);
      layers[i].forward(x, y, contexts[i], cpu);
      dys.push_back(random_normal({9, 5}, DType::kFloat64, 50 + i, cpu));
    }
    for (const std::size_t i : order) layers[i].backward(dys[i], contexts[i], nullptr, cpu);
    std::vector<std::vector<double>> all;
    for (const LoraLinear& layer : layers) {
      for (const std::vector<double>& g : gradients(layer, cpu)) all.push_back(g);
    }
    return all;
  };
  const auto expected = run({0, 1, 2});
  CHECK(run({2, 1, 0}) == expected);
  CHECK(run({1, 2, 0}) == expected);
  // And dB of each is that of its own x A^T: check_runs compares grouped layers with float64.
}

TEST_CASE("micro-batches add up to the gradient of the whole batch") {
  const StreamRef cpu;
  Trial trial(grouped(), DType::kFloat32, cpu, 30, 20);
  trial.forward(cpu);
  trial.backward(cpu);
  const auto whole = gradients(trial.layer, cpu);
  zero_gradients(trial.layer, cpu);
  for (const std::int64_t begin : {0, 7, 8}) {
    const std::int64_t end = begin == 0 ? 7 : begin == 7 ? 8 : 30;
    const Tensor x = trial.x.slice(0, begin, end), dy = trial.dy.slice(0, begin, end);
    Tensor y = Tensor::empty(dy.shape(), DType::kFloat32, cpu);
    LoraLinearContext context;
    trial.layer.forward(x, y, context, cpu);
    trial.layer.backward(dy, context, nullptr, cpu);
  }
  const auto parts = gradients(trial.layer, cpu);
  for (std::size_t i = 0; i < whole.size(); ++i) CHECK(difference(parts[i], whole[i]).relative_frobenius < 1e-6);
}

TEST_CASE("the scale is alpha / r, or alpha / sqrt(r) with rsLoRA; a missing alpha is refused by name") {
  LoraConfig c = config(16, 16);
  CHECK(c.scale() == 1);
  c.use_rslora = true;
  CHECK(c.scale() == 4);
  LoraConfig missing;
  missing.rank = 8;
  try {
    const LoraLinear layer(8, {part("model.layers.0.mlp.up_proj", 4, missing)}, DType::kFloat32, false, {});
    FAIL("expected an error");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kInvalidArgument);
    CHECK(std::string(error.what()).find("alpha") != std::string::npos);
    CHECK(std::string(error.what()).find("model.layers.0.mlp.up_proj") != std::string::npos);
  }
}

TEST_CASE("without the adapter a layer is its frozen weight, and no factor gets a gradient") {
  for (const DType dtype : kAll) check_switched_off(dtype, {});
}

TEST_CASE("merge rounds W + scale B A once and zeroes B") {
  for (const DType dtype : kAll) {
    check_merge(dtype, false, {});
    check_merge(dtype, true, {});
  }
}

TEST_CASE("backward adds dx to dx_beta times what is there") {
  for (const DType dtype : kAll) check_dx_beta(dtype, {});
}

TEST_CASE("forward adds an addend to y") {
  for (const DType dtype : kAll) check_addend(dtype, {});
}

TEST_CASE("a layer without rows leaves gradients zero") {
  for (const DType dtype : kAll) check_no_rows(dtype, {});
}

TEST_CASE("LoraLinear reads no slack or border that nothing was written to, and stays inside its memory") {
  check_guards({}, kAll);
}

TEST_CASE("parameters carry Hugging Face names, roles, masters and gradients") {
  const StreamRef cpu;
  const LoraLinear frozen(12, grouped(0, Place::kInput, true), DType::kBFloat16, false, cpu);
  std::vector<std::string> names;
  for (const Parameter& p : frozen.parameters()) {
    names.push_back(p.name);
    const bool factor = p.role == Parameter::Role::kLoraA || p.role == Parameter::Role::kLoraB;
    CHECK(p.trainable == factor);
    CHECK(p.grad.defined() == factor);
    CHECK(p.master.defined() == factor);
    CHECK(p.value.dtype() == DType::kBFloat16);
    if (!factor) continue;
    CHECK(p.master.dtype() == DType::kFloat32);
    CHECK(p.grad.dtype() == DType::kFloat32);
    CHECK(p.master.shape() == p.value.shape());
    CHECK(p.grad.shape() == p.value.shape());
  }
  CHECK(names == std::vector<std::string>{"q_proj.weight", "q_proj.bias", "q_proj.lora_A.weight",
                                          "q_proj.lora_B.weight", "bare.weight", "k_proj.weight", "k_proj.bias",
                                          "k_proj.lora_A.weight", "k_proj.lora_B.weight", "v_proj.weight",
                                          "v_proj.bias", "v_proj.lora_A.weight", "v_proj.lora_B.weight"});
  CHECK(find(frozen.parameters(), "k_proj.lora_A.weight").value.shape() == Shape{17, 12});
  CHECK(find(frozen.parameters(), "k_proj.lora_B.weight").value.shape() == Shape{16, 17});
  const LoraLinear dense(12, grouped(), DType::kFloat32, true, cpu);
  for (const Parameter& p : dense.parameters()) {
    CHECK(p.trainable);
    CHECK(p.master.raw() == p.value.raw());
  }
}

TEST_CASE("adapters start with A uniform in 1 / sqrt(K) and B zero, the same values in every dtype") {
  const StreamRef cpu;
  std::vector<double> reference;
  for (const DType dtype : kAll) {
    const LoraLinear layer(400, single(config(8, 16)), dtype, false, cpu);
    randomise(layer, cpu);
    Rng rng(5);
    layer.init_adapter(rng, cpu);
    const std::vector<Parameter> all = layer.parameters();
    const std::vector<double> a = values(find(all, "o_proj.lora_A.weight").master, cpu),
                              b = values(find(all, "o_proj.lora_B.weight").value, cpu);
    double largest = 0, mean = 0;
    for (const double v : a) {
      largest = std::max(largest, std::abs(v));
      mean += v / static_cast<double>(a.size());
    }
    CHECK(largest <= 0.05);
    CHECK(largest > 0.0495);
    CHECK(std::abs(mean) < 5 * 0.05 / std::sqrt(3.0 * 3200));
    CHECK(std::all_of(b.begin(), b.end(), [](double v) { return v == 0; }));
    if (reference.empty()) reference = a;
    CHECK(difference(a, reference).max_absolute <= 0.05 * 0x1p-24);
  }
}

TEST_CASE("a forward that runs out of memory leaves an empty context, not one whose S another layer may overwrite") {
  const StreamRef cpu;
  Trial trial(grouped(), DType::kFloat32, cpu);
  trial.forward(cpu);
  const Tensor bare = with_gaps(random_normal({12, 20}, DType::kFloat32, 1, cpu), 3, 1, cpu);
  Tensor y = Tensor::empty({12, trial.layer.out_features()}, DType::kFloat32, cpu);
  Tensor dx = Tensor::empty({12, 20}, DType::kFloat32, cpu);
  {
    const ScopedAllocator scope(std::make_shared<LimitingAllocator>(current_allocator(Device::cpu()), 0));
    CHECK_THROWS_AS(trial.layer.forward(bare, y, trial.context, cpu), Error);
  }
  CHECK_THROWS_AS(trial.layer.backward(trial.dy, trial.context, &dx, cpu), Error);
}

TEST_CASE("a forward may run again on its own context's x and dropout key") {
  const StreamRef cpu;
  Trial trial(grouped(0.5), DType::kFloat32, cpu);
  const std::vector<double> first = values(trial.forward(cpu, DropoutKey{1, 2}), cpu);
  Tensor y = Tensor::empty({12, trial.layer.out_features()}, DType::kFloat32, cpu);
  trial.layer.forward(trial.context.x, y, trial.context, cpu, trial.context.dropout);
  CHECK(values(y, cpu) == first);
}

TEST_CASE("LoraLinear refuses arguments that do not fit and leaves tensors untouched") {
  const StreamRef cpu;
  CHECK_THROWS_AS(LoraLinear(0, single(config(8, 16)), DType::kFloat32, false, cpu), Error);
  CHECK_THROWS_AS(LoraLinear(8, {}, DType::kFloat32, false, cpu), Error);
  CHECK_THROWS_AS(LoraLinear(8, single(config(0, 16)), DType::kFloat32, false, cpu), Error);
  CHECK_THROWS_AS(LoraLinear(8, single(config(4, 16, 1.5)), DType::kFloat32, false, cpu), Error);
  CHECK_THROWS_AS(LoraLinear(8, single(config(4, 16)), DType::kInt32, false, cpu), Error);

  Trial trial(grouped(), DType::kFloat32, cpu);
  Tensor y = random_normal({12, trial.layer.out_features()}, DType::kFloat32, 3, cpu), narrow = y.slice(1, 0, 5);
  const std::vector<double> y_before = values(y, cpu), x_before = values(trial.x, cpu);
  LoraLinearContext context;
  CHECK_THROWS_AS(trial.layer.forward(trial.x.slice(1, 0, 19), y, context, cpu), Error);
  CHECK_THROWS_AS(trial.layer.forward(trial.x, narrow, context, cpu), Error);
  CHECK_THROWS_AS(trial.layer.forward(convert(trial.x, DType::kBFloat16, cpu, cpu), y, context, cpu), Error);
  CHECK(!context.x.defined());
  Tensor dx = random_normal({12, 20}, DType::kFloat32, 4, cpu), x = trial.x;
  const std::vector<double> dx_before = values(dx, cpu);
  CHECK_THROWS_AS(trial.layer.backward(trial.dy, context, &dx, cpu), Error);  // nothing saved
  trial.forward(cpu);
  CHECK_THROWS_AS(trial.layer.backward(trial.dy, trial.context, &x, cpu), Error);  // dx over the saved x
  CHECK_THROWS_AS(trial.layer.backward(trial.dy.slice(0, 0, 11), trial.context, &dx, cpu), Error);
  CHECK_THROWS_AS(trial.layer.backward(trial.dy, trial.context, &dx, cpu, std::nan("")), Error);
  CHECK(values(y, cpu) == y_before);
  CHECK(values(dx, cpu) == dx_before);
  CHECK(values(trial.x, cpu) == x_before);
  for (const std::vector<double>& g : gradients(trial.layer, cpu))
    CHECK(std::all_of(g.begin(), g.end(), [](double v) { return v == 0; }));
}

TEST_CASE("LoraLinear on CUDA is the float64 formula on the bordered and the plain path", "[gpu]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  check_runs(kCuda, stream);
}

TEST_CASE("LoraLinear on CUDA applies dropout, dx_beta, merge and the switch", "[gpu]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  check_dropout_runs(kCuda, stream);
  for (const DType dtype : kCuda) {
    check_equal_keys(dtype, stream);
    check_backward_twice(dtype, stream);
    check_switched_off(dtype, stream);
    check_merge(dtype, false, stream);
    check_merge(dtype, true, stream);
    check_dx_beta(dtype, stream);
    check_addend(dtype, stream);
    check_no_rows(dtype, stream);
  }
}

TEST_CASE("LoraLinear on CUDA reads no slack or border that nothing was written to, and stays inside its memory",
          "[gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  check_guards(stream, kCuda);
}
