#include "rowan/ops/muown.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/ops/newton_schulz.h"
#include "support/compare.h"
#include "support/device.h"

namespace rowan {
namespace {

using test::values;
using Values = std::vector<double>;

const StreamRef kCpu;

// ---- the formulas, one row at a time, in float64
// ---------------------------------------------------------------------

struct Rates {
  double lr = 0.01;
  double decay = 0;
  std::int64_t t = 1;
};

/// One output neuron.
struct RowOracle {
  Values w, gradient, momentum;
  double g = 0, r = 0, m = 0, v = 0;

  // of prepare
  Values u, d0;
  double gg = 0;
  // magnitudes of the terms that rounding errors are relative to
  Values terms;
  double gg_terms = 0, r_terms = 0, g_terms = 0;

  double guarded(double eps) const { return g < 0 ? -std::max(std::abs(g), eps) : std::max(std::abs(g), eps); }

  void prepare(const MuownOptions& o, double factor) {
    const std::size_t n = w.size();
    const double magnitude = guarded(o.epsilon);
    u.assign(n, 0);
    d0.assign(n, 0);
    terms.assign(n, 0);
    gg = gg_terms = 0;
    for (std::size_t j = 0; j < n; ++j) {
      gg += factor * gradient[j] * w[j] / magnitude;
      gg_terms += std::abs(factor * gradient[j] * w[j] / magnitude);
    }
    for (std::size_t j = 0; j < n; ++j) {
      const double unit = w[j] / magnitude;
      const double d = magnitude / r * (factor * gradient[j] - unit * gg);
      const double kept = o.momentum * momentum[j];
      terms[j] =
          std::abs(magnitude / r) * (std::abs(factor * gradient[j]) + std::abs(unit) * gg_terms) + std::abs(kept);
      momentum[j] = kept + d;
      u[j] = o.nesterov ? d + o.momentum * momentum[j] : momentum[j];
      d0[j] = w[j] * (r / magnitude);
    }
  }

  /// `out` is O, `c` the scale.
  void finish(const MuownOptions& o, const Rates& rates, double c, const Values& out, double factor) {
    const std::size_t n = w.size();
    const auto norm = [](const Values& x) {
      double sum = 0;
      for (const double e : x) sum += e * e;
      return std::sqrt(sum);
    };
    const bool cold = o.cold_rows == ColdRows::kWarm && g == 0 && norm(w) == 0;
    terms.assign(n, 0);
    r_terms = g_terms = 0;
    if (cold && norm(out) == 0) return;
    Values unit(n);
    if (cold) {
      gg = 0;
      for (std::size_t j = 0; j < n; ++j) {
        unit[j] = -out[j] / norm(out);
        gg += factor * gradient[j] * unit[j];
      }
    }
    m = o.beta1 * m + (1 - o.beta1) * gg;
    v = o.beta2 * v + (1 - o.beta2) * gg * gg;
    const double t = static_cast<double>(rates.t);
    const double step = (m / (1 - std::pow(o.beta1, t))) / (std::sqrt(v / (1 - std::pow(o.beta2, t))) + o.epsilon);
    const double next = g - o.magnitude_lr * rates.lr * step;
    if (cold) {
      g = next;
      g_terms = std::abs(g);
      r = r_terms = std::max(std::abs(g), o.epsilon);
      for (std::size_t j = 0; j < n; ++j) {
        w[j] = g * unit[j];
        terms[j] = std::abs(w[j]);
      }
      return;
    }
    const double back = r / guarded(o.epsilon), rate = rates.lr * c, shrink = rates.lr * rates.decay;
    Values d(n), d_terms(n), old = w;
    for (std::size_t j = 0; j < n; ++j) {
      d[j] = w[j] * back - rate * out[j];
      d_terms[j] = std::abs(w[j] * back) + std::abs(rate * out[j]);
    }
    r = std::max(norm(d), o.epsilon);
    r_terms = std::max(norm(d_terms), o.epsilon);
    g_terms = std::abs(g) + std::abs(next - g);
    for (std::size_t j = 0; j < n; ++j) {
      w[j] = next * d[j] / r - shrink * old[j];
      terms[j] = (std::abs(next) * (d_terms[j] + std::abs(d[j]) * r_terms / r) + g_terms * std::abs(d[j])) / r +
                 std::abs(shrink * old[j]);
    }
    g = next;
    if (shrink != 0) {
      double dot = 0;
      for (std::size_t j = 0; j < n; ++j) dot += w[j] * d[j];
      g = std::copysign(std::max(norm(w), o.epsilon), dot);
      g_terms = std::max(norm(terms), o.epsilon);
    }
  }
};

// ---- tensors from rows
// -----------------------------------------------------------------------------------------------

struct Sizes {
  Shape leading;  ///< batch dimensions
  std::int64_t neurons = 1;
  std::int64_t inputs = 1;

  std::int64_t batches() const { return leading.elements(); }
  std::int64_t rows() const { return batches() * neurons; }
  Shape matrix(MatrixLayout layout) const {
    return with(layout == MatrixLayout::kOutIn ? Values2{neurons, inputs} : Values2{inputs, neurons});
  }
  Shape row() const {
    std::vector<std::int64_t> extents(leading.extents().begin(), leading.extents().end());
    extents.push_back(neurons);
    return Shape(std::span<const std::int64_t>(extents));
  }

 private:
  using Values2 = std::array<std::int64_t, 2>;
  Shape with(Values2 last) const {
    std::vector<std::int64_t> extents(leading.extents().begin(), leading.extents().end());
    extents.insert(extents.end(), last.begin(), last.end());
    return Shape(std::span<const std::int64_t>(extents));
  }
};

/// Position of element j of a row in a matrix tensor's row-major order.
std::size_t position(const Sizes& s, MatrixLayout layout, std::int64_t row, std::int64_t j) {
  const std::int64_t batch = row / s.neurons, neuron = row % s.neurons, start = batch * s.neurons * s.inputs;
  return static_cast<std::size_t>(start +
                                  (layout == MatrixLayout::kOutIn ? neuron * s.inputs + j : j * s.neurons + neuron));
}

Values matrix_row(const Values& matrix, const Sizes& s, MatrixLayout layout, std::int64_t row) {
  Values out;
  for (std::int64_t j = 0; j < s.inputs; ++j) out.push_back(matrix[position(s, layout, row, j)]);
  return out;
}

/// A copy whose memory rows lie `gap` elements apart.
Tensor spread(const Tensor& t, std::int64_t gap, StreamRef stream) {
  const Tensor wide = Tensor::zeros(t.shape().with(-1, t.size(-1) + gap), t.dtype(), stream);
  const Tensor view = wide.slice(t.rank() - 1, 0, t.size(-1));
  view.copy_from(t, stream);
  return view;
}

struct Problem {
  Sizes sizes;
  MuownOptions options;
  DType dtype = DType::kFloat32;
  Tensor weight, gradient, update;  ///< update: O
  MuownState state;
  MuownUpdate out;
};

/// Random weights with g = +-||W_i|| and a state in mid-training; rows `gap` apart.
Problem make_problem(const Sizes& sizes, const MuownOptions& options, DType dtype, DType update_dtype, StreamRef stream,
                     std::int64_t gap = 0) {
  Problem p{sizes, options, dtype, {}, {}, {}, {}, {}};
  const Shape matrix = sizes.matrix(options.layout);
  const Tensor weight = test::random_normal(matrix, dtype, 11, kCpu, 0.1);
  const Values w = values(weight, kCpu);
  Values g, r, m, v;
  Rng rng(12);
  for (std::int64_t row = 0; row < sizes.rows(); ++row) {
    double norm = 0;
    for (const double x : matrix_row(w, sizes, options.layout, row)) norm += x * x;
    g.push_back(std::sqrt(norm) * (rng.uniform() < 0.4 ? -1 : 1));
    r.push_back(std::sqrt(norm) * (0.8 + 0.5 * rng.uniform()) + 1e-6);
    m.push_back(0.1 * rng.normal());
    v.push_back(0.1 * rng.uniform() + 1e-4);
  }
  const auto rows = [&](const Values& x) {
    return test::convert(Tensor::from_host(sizes.row(), x, kCpu), dtype, kCpu, stream);
  };
  p.weight = spread(weight.to(stream.device(), stream), gap, stream);
  p.gradient = spread(test::random_normal(matrix, dtype, 13, stream), gap == 0 ? 0 : gap + 1, stream);
  p.state = {rows(g), rows(r), test::random_normal(matrix, dtype, 14, stream), rows(m), rows(v)};
  p.update = spread(test::random_normal(matrix, update_dtype, 15, stream, 0.3), gap == 0 ? 0 : gap + 2, stream);
  p.out = muown_empty_update(p.weight, options, update_dtype, stream);
  return p;
}

std::vector<RowOracle> oracle_rows(const Problem& p, StreamRef stream) {
  const Values w = values(p.weight, stream), gradient = values(p.gradient, stream),
               momentum = values(p.state.momentum, stream);
  const Values g = values(p.state.magnitude, stream), r = values(p.state.norm, stream),
               m = values(p.state.first_moment, stream), v = values(p.state.second_moment, stream);
  std::vector<RowOracle> rows(g.size());
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    rows[i].w = matrix_row(w, p.sizes, p.options.layout, row);
    rows[i].gradient = matrix_row(gradient, p.sizes, p.options.layout, row);
    rows[i].momentum = matrix_row(momentum, p.sizes, p.options.layout, row);
    rows[i].g = g[i];
    rows[i].r = r[i];
    rows[i].m = m[i];
    rows[i].v = v[i];
  }
  return rows;
}

MuownStep step_of(const Rates& rates, StreamRef stream, const Tensor& control = {}) {
  return {Tensor::from_host({2}, Values{rates.lr, rates.decay}, stream),
          Tensor::from_host({1}, std::vector<std::int64_t>{rates.t}, stream), control};
}
Tensor control_of(double factor, bool skip, StreamRef stream) {
  return Tensor::from_host({4}, Values{1, factor, skip ? 1.0 : 0.0, 0}, stream);
}

/// Collects values with their bounds and compares them at the end.
struct Comparison {
  Values got, expected, bound;
  void add(double g, double e, double b) {
    got.push_back(g);
    expected.push_back(e);
    bound.push_back(b);
  }
  void check(const char* what) const {
    std::string message;
    const bool close = test::within(got, expected, bound, &message);
    CAPTURE(what, message);
    CHECK(close);
  }
};

/// Rounding steps of each element's formula are fewer than this.
constexpr double kSteps = 16;

void check_prepare(Problem& p, double factor, StreamRef stream) {
  std::vector<RowOracle> rows = oracle_rows(p, stream);
  p.out.direction = Tensor::empty(p.weight.shape(), p.dtype, stream);
  muown_prepare(p.weight, p.gradient, p.state, p.options, control_of(factor, false, stream), p.out, stream);
  const Values u = values(p.out.update, stream), momentum = values(p.state.momentum, stream),
               d0 = values(p.out.direction, stream);
  const Values gg = values(p.out.magnitude_grad, stream), square = values(p.out.row_square_sum, stream),
               largest = values(p.out.row_max, stream);
  const double unit = unit_roundoff(p.dtype);
  const double output = p.out.update.dtype() == DType::kBFloat16 ? unit_roundoff(DType::kBFloat16) : 0;
  Comparison update, kept, direction, gradient, squares, maxima;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    RowOracle& row = rows[i];
    row.prepare(p.options, factor);
    gradient.add(gg[i], row.gg, kSteps * unit * row.gg_terms);
    double sum = 0, most = 0;
    for (std::size_t j = 0; j < row.w.size(); ++j) {
      const std::size_t at =
          position(p.sizes, p.options.layout, static_cast<std::int64_t>(i), static_cast<std::int64_t>(j));
      kept.add(momentum[at], row.momentum[j], kSteps * unit * row.terms[j]);
      update.add(u[at], row.u[j], 2 * kSteps * unit * row.terms[j] + output * std::abs(row.u[j]) * (1 + kSteps * unit));
      direction.add(d0[at], row.d0[j], kSteps * unit * std::abs(row.d0[j]));
      sum += u[at] * u[at];
      most = std::max(most, std::abs(u[at]));
    }
    squares.add(square[i], sum, 1e-13 * sum);
    maxima.add(largest[i], most, p.out.update.dtype() == p.dtype || output > 0 ? 0 : unit * most);
  }
  gradient.check("magnitude_grad");
  kept.check("momentum");
  update.check("update");
  direction.check("direction");
  squares.check("row_square_sum");
  maxima.check("row_max");
}

/// The scale of each row's block.
double scale_of(const Problem& p, std::int64_t neuron) {
  std::int64_t rows = p.sizes.neurons, end = 0;
  for (const RowBlock& block : p.options.row_blocks) {
    end += block.rows;
    if (neuron < end) {
      rows = block.global_rows > 0 ? block.global_rows : block.rows;
      break;
    }
  }
  return p.options.update_scale * 0.2 * std::sqrt(static_cast<double>(std::max(rows, p.sizes.inputs)));
}

void check_finish(Problem& p, const Rates& rates, double factor, StreamRef stream,
                  DType value_dtype = DType::kBFloat16) {
  std::vector<RowOracle> rows = oracle_rows(p, stream);
  const Tensor magnitude_grad = test::random_normal(p.sizes.row(), p.dtype, 16, stream);
  const Values gg = values(magnitude_grad, stream), out = values(p.update, stream);
  Tensor value = spread(Tensor::zeros(p.weight.shape(), value_dtype, stream), 5, stream);
  muown_finish(p.weight, p.gradient, p.state, p.update, magnitude_grad, p.options,
               step_of(rates, stream, control_of(factor, false, stream)), &value, stream);
  const Values w = values(p.weight, stream), g = values(p.state.magnitude, stream), r = values(p.state.norm, stream),
               m = values(p.state.first_moment, stream), v = values(p.state.second_moment, stream);
  const double unit = unit_roundoff(p.dtype);
  Comparison weight, magnitude, norm, first, second;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    RowOracle& row = rows[i];
    row.gg = gg[i];
    const auto index = static_cast<std::int64_t>(i);
    row.finish(p.options, rates, scale_of(p, index % p.sizes.neurons),
               matrix_row(out, p.sizes, p.options.layout, index), factor);
    magnitude.add(g[i], row.g, kSteps * unit * row.g_terms);
    norm.add(r[i], row.r, kSteps * unit * row.r_terms);
    first.add(m[i], row.m, kSteps * unit * (std::abs(row.m) + std::abs(row.gg)));
    second.add(v[i], row.v, kSteps * unit * row.v);
    for (std::size_t j = 0; j < row.w.size(); ++j) {
      const std::size_t at = position(p.sizes, p.options.layout, index, static_cast<std::int64_t>(j));
      weight.add(w[at], row.w[j], kSteps * unit * row.terms[j]);
    }
  }
  weight.check("weight");
  magnitude.check("magnitude");
  norm.check("norm");
  first.check("first_moment");
  second.check("second_moment");
  CHECK((values(value, stream) == values(test::convert(p.weight, value_dtype, stream, stream), stream)));
}

MuownOptions options_for(MatrixLayout layout, ColdRows cold = ColdRows::kFloor) {
  MuownOptions options;
  options.layout = layout;
  options.cold_rows = cold;
  return options;
}

const MatrixLayout kLayouts[] = {MatrixLayout::kOutIn, MatrixLayout::kInOut};

/// Every kernel variant's widths and their neighbours, and few or many rows.
std::vector<Sizes> odd_sizes() {
  return {{Shape{}, 1, 1},    {Shape{}, 2, 7},     {Shape{}, 7, 2},     {Shape{}, 33, 65},  {Shape{}, 65, 33},
          {Shape{}, 31, 129}, {Shape{3}, 17, 9},   {Shape{2, 3}, 5, 4}, {Shape{}, 3, 513},  {Shape{2}, 9, 1000},
          {Shape{}, 2, 1025}, {Shape{}, 129, 300}, {Shape{2}, 131, 16}, {Shape{}, 130, 32}, {Shape{}, 67, 64}};
}
std::vector<Sizes> wide_sizes() {
  return {{Shape{}, 5, 2052},   {Shape{}, 3, 4095},  {Shape{}, 3, 4097},  {Shape{}, 40, 5000},
          {Shape{}, 2, 9001},   {Shape{}, 2, 12000}, {Shape{}, 2, 16385}, {Shape{}, 1100, 64},
          {Shape{2}, 1030, 16}, {Shape{}, 70000, 3}, {Shape{70000}, 2, 1}};
}

void check_all_sizes(const std::vector<Sizes>& sizes, DType dtype, DType update_dtype, StreamRef stream) {
  for (const MatrixLayout layout : kLayouts) {
    for (const Sizes& s : sizes) {
      CAPTURE(to_string(s.matrix(layout)), layout == MatrixLayout::kInOut, to_string(dtype), to_string(update_dtype));
      MuownOptions options = options_for(layout);
      for (const std::int64_t gap : {0, 3}) {
        Problem p = make_problem(s, options, dtype, update_dtype, stream, gap);
        check_prepare(p, 0.5, stream);
        check_finish(p, {0.01, gap == 0 ? 0.0 : 0.3, 7}, 0.5, stream);
      }
      options.nesterov = false;
      options.momentum = 0.8;
      Problem p = make_problem(s, options, dtype, update_dtype, stream);
      check_prepare(p, 1, stream);
      check_finish(p, {0.3, 2.0, 1}, 1, stream, DType::kFloat16);
    }
  }
}

// ---- single behaviours, on either device ---------------------------------------------------------------------------

template <class T>
Tensor tensor(const Shape& shape, const std::vector<T>& x, StreamRef stream) {
  return Tensor::from_host(shape, x, stream);
}
Tensor floats(const Shape& shape, const Values& x, StreamRef stream) {
  return test::convert(Tensor::from_host(shape, x, kCpu), DType::kFloat32, kCpu, stream);
}

/// prepare, Newton-Schulz, finish.
struct Stepper {
  MuownOptions options;
  NewtonSchulzOptions ns;
  Tensor weight;
  MuownState state;
  MuownUpdate out;
  Tensor orthogonal;
  StreamRef stream;

  Stepper(const Tensor& w, const MuownOptions& o, StreamRef s, DType dtype = DType::kBFloat16)
      : options(o),
        weight(w),
        state(muown_init(w, o, s)),
        out(muown_empty_update(w, o, dtype, s)),
        orthogonal(Tensor::empty(w.shape(), dtype, s)),
        stream(s) {}

  void step(const Tensor& gradient, const Rates& rates) {
    muown_prepare(weight, gradient, state, options, Tensor(), out, stream);
    newton_schulz(out.update, orthogonal, ns, stream, &out.row_square_sum);
    muown_finish(weight, gradient, state, orthogonal, out.magnitude_grad, options, step_of(rates, stream), nullptr,
                 stream);
  }
};

void check_row_blocks(StreamRef stream) {
  for (const MatrixLayout layout : kLayouts) {
    MuownOptions options = options_for(layout);
    options.row_blocks = {{20}, {0}, {3, 500}, {7}};
    options.update_scale = 1.5;
    Problem p = make_problem({Shape{2}, 30, 12}, options, DType::kFloat32, DType::kBFloat16, stream);
    check_finish(p, {0.01, 0, 3}, 1, stream);
  }
}

void check_unchanged_rows(StreamRef stream) {
  for (const MatrixLayout layout : kLayouts) {
    for (const ColdRows cold : {ColdRows::kFloor, ColdRows::kWarm}) {
      Problem p = make_problem({Shape{}, 19, 37}, options_for(layout, cold), DType::kFloat32, DType::kBFloat16, stream);
      const Values w = values(p.weight, stream), g = values(p.state.magnitude, stream),
                   r = values(p.state.norm, stream);
      const auto unchanged = [&] {
        return values(p.weight, stream) == w && values(p.state.magnitude, stream) == g &&
               values(p.state.norm, stream) == r;
      };
      const Tensor some = test::random_normal({19}, DType::kFloat32, 5, stream);
      // Learning rate 0, with negative magnitudes and weight decay too.
      for (const double decay : {0.0, 0.1}) {
        muown_finish(p.weight, p.gradient, p.state, p.update, some, p.options, step_of({0, decay, 5}, stream), nullptr,
                     stream);
        CHECK(unchanged());
      }
      // No gradient, no momentum, no moments, no decay.
      p.gradient.zero(stream);
      for (const Tensor* t : {&p.state.momentum, &p.state.first_moment, &p.state.second_moment}) t->zero(stream);
      muown_prepare(p.weight, p.gradient, p.state, p.options, Tensor(), p.out, stream);
      Tensor orthogonal = Tensor::empty(p.weight.shape(), DType::kBFloat16, stream);
      newton_schulz(p.out.update, orthogonal, {}, stream, &p.out.row_square_sum);
      muown_finish(p.weight, p.gradient, p.state, orthogonal, p.out.magnitude_grad, p.options,
                   step_of({0.1, 0, 5}, stream), nullptr, stream);
      CHECK(unchanged());
    }
  }
}

void check_unrounded_rate(StreamRef stream) {
  for (const MatrixLayout layout : kLayouts) {
    MuownOptions options = options_for(layout);
    options.momentum = 0;
    options.nesterov = false;
    const Shape shape = layout == MatrixLayout::kOutIn ? Shape{1, 2} : Shape{2, 1};
    Tensor weight = floats(shape, {1, 0}, stream);
    const Tensor gradient = floats(shape, {.25, 1}, stream);
    MuownState state = muown_init(weight, options, stream);
    MuownUpdate out = muown_empty_update(weight, options, DType::kBFloat16, stream);
    muown_prepare(weight, gradient, state, options, Tensor(), out, stream);
    CHECK((values(out.update, stream) == Values{0, 1}));
    const Tensor orthogonal = test::convert(floats(shape, {0, 0.75}, stream), DType::kBFloat16, stream, stream);
    muown_finish(weight, gradient, state, orthogonal, out.magnitude_grad, options, step_of({.0033, 0, 1}, stream),
                 nullptr, stream);
    const Values w = values(weight, stream);
    CHECK(std::abs(w[1] / w[0] + .0033 * .2 * std::sqrt(2.0) * .75) <= 1e-9);
    CHECK(std::abs(values(state.magnitude, stream)[0] - (1 - .0033)) <= 1e-7);
  }
}

void check_zero_row(StreamRef stream) {
  for (const ColdRows cold : {ColdRows::kFloor, ColdRows::kWarm}) {
    for (const MatrixLayout layout : kLayouts) {
      const Values w = layout == MatrixLayout::kOutIn ? Values{0, 0, 1, 0} : Values{0, 1, 0, 0};
      Stepper s(floats({2, 2}, w, stream), options_for(layout, cold), stream);
      for (int t = 1; t <= 5; ++t)
        s.step(test::random_normal({2, 2}, DType::kFloat32, static_cast<std::uint64_t>(t), stream), {0.01, 0.1, t});
      for (const double x : values(s.weight, stream)) CHECK(std::isfinite(x));
      for (const double x : values(s.state.momentum, stream)) CHECK(std::isfinite(x));
      CHECK(std::isfinite(values(s.state.norm, stream)[0]));
    }
  }
}

/// One for each of the ways in which CUDA holds a row.
constexpr std::int64_t kRowWidths[] = {2, 40, 100, 300, 1000, 1500, 2052, 6000, 9000, 20000};

void check_waking_row(std::int64_t inputs, StreamRef stream) {
  for (const MatrixLayout layout : kLayouts) {
    CAPTURE(inputs, layout == MatrixLayout::kInOut);
    const bool rows_adjacent = layout == MatrixLayout::kOutIn;
    const auto place = [&](std::size_t row, std::size_t column) {
      return rows_adjacent ? row * static_cast<std::size_t>(inputs) + column : 3 * column + row;
    };
    // Row 0 wakes, row 1 gets no update, row 2 is warm; all but their first two elements are zero.
    const auto matrix = [&](const Values& pairs) {
      Values all(static_cast<std::size_t>(3 * inputs));
      for (std::size_t i = 0; i < 6; ++i) all[place(i / 2, i % 2)] = pairs[i];
      return floats(rows_adjacent ? Shape{3, inputs} : Shape{inputs, 3}, all, stream);
    };
    MuownOptions options = options_for(layout, ColdRows::kWarm);
    options.magnitude_lr = 0.5;
    Tensor weight = matrix({0, 0, 0, 0, 3, 4});
    const Tensor gradient = matrix({6, 8, 5, 5, 1, 1}),
                 update = test::convert(matrix({3, 4, 0, 0, 1, 0}), DType::kBFloat16, stream, stream);
    MuownState state = muown_init(weight, options, stream);
    CHECK((values(state.magnitude, stream) == Values{0, 0, 5}));
    CHECK((values(state.norm, stream) == values(floats({3}, {1e-8, 1e-8, 5}, stream), stream)));
    state.second_moment = floats({3}, {0, 0.5, 0}, stream);
    const Tensor magnitude_grad = floats({3}, {77, 77, 1}, stream);
    muown_finish(weight, gradient, state, update, magnitude_grad, options,
                 step_of({0.1, 0.7, 1}, stream, control_of(0.25, false, stream)), nullptr, stream);
    // u = -(3, 4)/5, gg = <G, u> / 4 = -2.5; the first Adam step is lr 0.5 against its sign: g' = 0.05, W' = g' u.
    const Values w = values(weight, stream), g = values(state.magnitude, stream), r = values(state.norm, stream);
    const auto row = [&](std::size_t i, std::size_t j) { return w[place(i, j)]; };
    CHECK(std::abs(g[0] - 0.05) <= 1e-8);
    CHECK(std::abs(r[0] - 0.05) <= 1e-8);
    CHECK(std::abs(row(0, 0) + 0.03) <= 1e-8);
    CHECK(std::abs(row(0, 1) + 0.04) <= 1e-8);
    CHECK(std::abs(values(state.first_moment, stream)[0] + 0.25) <= 1e-7);
    CHECK(row(1, 0) == 0);
    CHECK(row(1, 1) == 0);
    CHECK(g[1] == 0);
    CHECK(values(state.first_moment, stream)[1] == 0);
    CHECK(values(state.second_moment, stream)[1] == 0.5);
    CHECK(row(2, 0) != 3);
  }
}

/// The share of row 0 in ||U|| at the second step, when its gradient was tiny at the first.
double late_share(ColdRows cold, StreamRef stream) {
  constexpr std::int64_t kRows = 256, kInputs = 16;  // an equal share is 1/16
  Stepper s(Tensor::zeros({kRows, kInputs}, DType::kFloat32, stream), options_for(MatrixLayout::kOutIn, cold), stream);
  Values first = values(test::random_normal({kRows, kInputs}, DType::kFloat32, 21, stream), stream);
  for (std::size_t j = 0; j < kInputs; ++j) first[j] *= 1e-5;
  s.step(floats({kRows, kInputs}, first, stream), {3e-4, 0, 1});
  muown_prepare(s.weight, test::random_normal({kRows, kInputs}, DType::kFloat32, 22, stream), s.state, s.options,
                Tensor(), s.out, stream);
  const Values squares = values(s.out.row_square_sum, stream);
  double total = 0;
  for (const double x : squares) total += x;
  return std::sqrt(squares[0] / total);
}

void check_direction_after_decay(StreamRef stream) {
  for (const MatrixLayout layout : kLayouts) {
    // Decay beyond the step turns W against d; g must then be negative, so that u = W / g does not turn.
    for (const double decay : {1.0, 150.0}) {
      Problem p = make_problem({Shape{}, 24, 10}, options_for(layout), DType::kFloat32, DType::kBFloat16, stream);
      const std::vector<RowOracle> before = oracle_rows(p, stream);
      const Values out = values(p.update, stream);
      const Tensor zero = Tensor::zeros({24}, DType::kFloat32, stream);
      p.state.first_moment.zero(stream);
      muown_finish(p.weight, p.gradient, p.state, p.update, zero, p.options, step_of({0.01, decay, 1}, stream), nullptr,
                   stream);
      const Values w = values(p.weight, stream), g = values(p.state.magnitude, stream);
      for (std::int64_t row = 0; row < 24; ++row) {
        const auto i = static_cast<std::size_t>(row);
        const Values after = matrix_row(w, p.sizes, layout, row), o = matrix_row(out, p.sizes, layout, row);
        double dot = 0, norm = 0;
        for (std::size_t j = 0; j < after.size(); ++j) {
          const double d = before[i].w[j] * before[i].r / before[i].g - 0.01 * scale_of(p, row) * o[j];
          dot += after[j] / g[i] * d;
          norm += after[j] * after[j];
        }
        CHECK(dot > 0);
        CHECK(std::abs(std::sqrt(norm) - std::abs(g[i])) <= 1e-6 * std::abs(g[i]));
      }
    }
  }
}

void check_skip(StreamRef stream) {
  for (const MatrixLayout layout : kLayouts) {
    Problem p =
        make_problem({Shape{2}, 6, 5}, options_for(layout, ColdRows::kWarm), DType::kFloat32, DType::kBFloat16, stream);
    p.out.direction = test::random_normal(p.weight.shape(), DType::kFloat32, 31, stream);
    p.out.update = test::random_normal(p.weight.shape(), DType::kBFloat16, 32, stream);
    p.out.magnitude_grad = test::random_normal(p.sizes.row(), DType::kFloat32, 33, stream);
    p.out.row_square_sum = test::convert(p.out.magnitude_grad, DType::kFloat64, stream, stream);
    p.out.row_max = test::random_normal(p.sizes.row(), DType::kFloat32, 34, stream);
    Tensor value = test::random_normal(p.weight.shape(), DType::kBFloat16, 35, stream);
    const Tensor* const all[] = {&p.weight,
                                 &p.state.magnitude,
                                 &p.state.norm,
                                 &p.state.momentum,
                                 &p.state.first_moment,
                                 &p.state.second_moment,
                                 &p.out.direction,
                                 &p.out.update,
                                 &p.out.magnitude_grad,
                                 &p.out.row_square_sum,
                                 &p.out.row_max,
                                 &value};
    std::vector<Values> before;
    for (const Tensor* t : all) before.push_back(values(*t, stream));
    const Tensor control = control_of(1, true, stream);
    muown_prepare(p.weight, p.gradient, p.state, p.options, control, p.out, stream);
    muown_finish(p.weight, p.gradient, p.state, p.update, p.out.magnitude_grad, p.options,
                 step_of({0.1, 0.1, 1}, stream, control), &value, stream);
    for (std::size_t i = 0; i < before.size(); ++i) {
      CAPTURE(i);
      CHECK((values(*all[i], stream) == before[i]));
    }
  }
}

void check_nan_stays_in_its_row(StreamRef stream) {
  for (const MatrixLayout layout : kLayouts) {
    Problem p = make_problem({Shape{}, 9, 70}, options_for(layout), DType::kFloat32, DType::kBFloat16, stream);
    Values gradient = values(p.gradient, stream);
    gradient[position(p.sizes, layout, 4, 33)] = std::numeric_limits<double>::quiet_NaN();
    p.gradient = floats(p.weight.shape(), gradient, stream);
    muown_prepare(p.weight, p.gradient, p.state, p.options, Tensor(), p.out, stream);
    const Values u = values(p.out.update, stream), most = values(p.out.row_max, stream),
                 squares = values(p.out.row_square_sum, stream);
    for (std::int64_t row = 0; row < 9; ++row) {
      const Values mine = matrix_row(u, p.sizes, layout, row);
      const bool bad = std::any_of(mine.begin(), mine.end(), [](double x) { return std::isnan(x); });
      CHECK(bad == (row == 4));
      CHECK(std::isnan(most[static_cast<std::size_t>(row)]) == (row == 4));
      CHECK(std::isnan(squares[static_cast<std::size_t>(row)]) == (row == 4));
    }
  }
}

void check_same_bits(StreamRef stream) {
  for (const MatrixLayout layout : kLayouts) {
    const auto run = [&] {
      Problem p = make_problem({Shape{3}, 50, 333}, options_for(layout), DType::kFloat32, DType::kBFloat16, stream);
      muown_prepare(p.weight, p.gradient, p.state, p.options, Tensor(), p.out, stream);
      muown_finish(p.weight, p.gradient, p.state, p.update, p.out.magnitude_grad, p.options,
                   step_of({0.1, 0.1, 1}, stream), nullptr, stream);
      Values all = values(p.weight, stream);
      for (const Tensor* t :
           {&p.out.update, &p.out.row_square_sum, &p.state.magnitude, &p.state.norm, &p.state.momentum}) {
        const Values more = values(*t, stream);
        all.insert(all.end(), more.begin(), more.end());
      }
      return all;
    };
    CHECK(run() == run());
  }
}

void check_init(StreamRef stream) {
  for (const MatrixLayout layout : kLayouts) {
    for (const ColdRows cold : {ColdRows::kFloor, ColdRows::kWarm}) {
      for (const Sizes& s : {Sizes{Shape{2}, 5, 7}, Sizes{Shape{}, 3, 2000}, Sizes{Shape{}, 100, 1}}) {
        Values w = values(test::random_normal(s.matrix(layout), DType::kFloat32, 41, stream), stream);
        for (std::int64_t j = 0; j < s.inputs; ++j) w[position(s, layout, 1, j)] = 0;
        const Tensor weight = spread(floats(s.matrix(layout), w, stream), 2, stream);
        const MuownState state = muown_init(weight, options_for(layout, cold), stream);
        const Values g = values(state.magnitude, stream), r = values(state.norm, stream);
        Comparison magnitude, norm;
        for (std::int64_t row = 0; row < s.rows(); ++row) {
          double square = 0;
          for (const double x : matrix_row(w, s, layout, row)) square += x * x;
          const auto i = static_cast<std::size_t>(row);
          const double length = std::max(std::sqrt(square), 1e-8), bound = 1e-7 * length;
          norm.add(r[i], length, bound);
          magnitude.add(g[i], row == 1 && cold == ColdRows::kWarm ? 0 : length,
                        row == 1 && cold == ColdRows::kWarm ? 0 : bound);
        }
        magnitude.check("magnitude");
        norm.check("norm");
        for (const Tensor* t : {&state.momentum, &state.first_moment, &state.second_moment}) {
          for (const double x : values(*t, stream)) CHECK(x == 0);
        }
      }
    }
  }
}

void check_empty(StreamRef stream) {
  for (const MatrixLayout layout : kLayouts) {
    for (const Sizes& s : {Sizes{Shape{}, 0, 5}, Sizes{Shape{}, 4, 0}, Sizes{Shape{0}, 3, 4}}) {
      Problem p = make_problem(s, options_for(layout), DType::kFloat32, DType::kBFloat16, stream);
      p.state.first_moment.zero(stream);
      muown_prepare(p.weight, p.gradient, p.state, p.options, Tensor(), p.out, stream);
      muown_finish(p.weight, p.gradient, p.state, p.update, p.out.magnitude_grad, p.options,
                   step_of({0.1, 0, 1}, stream), nullptr, stream);
      for (const double x : values(p.out.row_square_sum, stream)) CHECK(x == 0);
      for (const double x : values(p.state.magnitude, stream)) CHECK(x == 0);
    }
  }
}

template <class F>
bool throws_invalid(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.kind() == ErrorKind::kInvalidArgument;
  }
  return false;
}

/// AngularMuown transcribed in float64: rows of u are units, u' = normalised(u - lr kappa c O).
void check_angular(MatrixLayout layout, DType dtype, StreamRef stream) {
  const Sizes sizes{{2}, 9, 5};
  MuownOptions options;
  options.layout = layout;
  options.cold_rows = ColdRows::kWarm;
  options.direction = MuownDirection::kAngular;
  options.angular_warmup = 2;
  const double lr = 0.2, scale = std::sqrt(9.0 / 5);
  Tensor weight = test::random_normal(sizes.matrix(layout), dtype, 31, stream);
  MuownState state = muown_init(weight, options, stream);
  std::vector<RowOracle> rows = oracle_rows({sizes, options, dtype, weight, weight, weight, state, {}}, stream);
  for (RowOracle& row : rows) row.g = std::sqrt(std::inner_product(row.w.begin(), row.w.end(), row.w.begin(), 0.0));
  for (std::int64_t t = 1; t <= 4; ++t) {
    const auto seed = static_cast<std::uint64_t>(40 + 2 * t);
    const Tensor gradient = test::random_normal(weight.shape(), dtype, seed, stream, 0.3);
    const Tensor orthogonal = test::random_normal(weight.shape(), DType::kFloat32, seed + 1, stream, 0.4);
    MuownUpdate update = muown_empty_update(weight, options, DType::kFloat32, stream);
    muown_prepare(weight, gradient, state, options, Tensor(), update, stream);
    // The decay is not taken.
    muown_finish(weight, gradient, state, orthogonal, update.magnitude_grad, options, step_of({lr, 0.3, t}, stream),
                 nullptr, stream);
    const double kappa = 1 / (1 + 0.001 * static_cast<double>(std::max<std::int64_t>(0, t - 2)));
    const Values grads = values(gradient, stream), outs = values(orthogonal, stream);
    const Values w = values(weight, stream), u = values(update.update, stream), r = values(state.norm, stream);
    Values got, expected;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      RowOracle& row = rows[i];
      const auto index = static_cast<std::int64_t>(i);
      const Values o = matrix_row(outs, sizes, layout, index), got_u = matrix_row(u, sizes, layout, index),
                   got_w = matrix_row(w, sizes, layout, index);
      row.gradient = matrix_row(grads, sizes, layout, index);
      row.r = 1;
      row.prepare(options, 1);  // D = g (G - gg u) where r = 1
      got.insert(got.end(), got_u.begin(), got_u.end());
      expected.insert(expected.end(), row.u.begin(), row.u.end());
      row.m = 0.9 * row.m + 0.1 * row.gg;
      row.v = 0.95 * row.v + 0.05 * row.gg * row.gg;
      const double steps = static_cast<double>(t);
      const double step = row.m / (1 - std::pow(0.9, steps)) / (std::sqrt(row.v / (1 - std::pow(0.95, steps))) + 1e-8);
      Values unit;
      double square = 0;
      for (std::size_t j = 0; j < row.w.size(); ++j) {
        unit.push_back(row.w[j] / row.g - lr * kappa * scale * o[j]);
        square += unit[j] * unit[j];
      }
      row.g = std::copysign(std::max(std::copysign(1.0, row.g) * (row.g - lr * step), 1e-7), row.g);
      for (std::size_t j = 0; j < row.w.size(); ++j) row.w[j] = row.g * unit[j] / std::sqrt(square);
      got.insert(got.end(), got_w.begin(), got_w.end());
      expected.insert(expected.end(), row.w.begin(), row.w.end());
      CHECK(r[i] == 1);
    }
    CAPTURE(t, to_string(dtype));
    // U is float32; errors grow with the steps.
    CHECK(test::difference(got, expected).relative_frobenius <=
          64 * static_cast<double>(t) * unit_roundoff(DType::kFloat32));
  }
}

/// Bits of a batch are those of each matrix alone.
void check_batch(StreamRef stream) {
  struct Case {
    Sizes sizes;
    MatrixLayout layout;
    std::int64_t gap;
  };
  const Case cases[] = {{{{}, 40, 16}, MatrixLayout::kOutIn, 0},  {{{}, 16, 40}, MatrixLayout::kOutIn, 8},
                        {{{2}, 5, 300}, MatrixLayout::kOutIn, 3}, {{{}, 7, 16}, MatrixLayout::kOutIn, 4},
                        {{{}, 33, 20}, MatrixLayout::kInOut, 0},  {{{}, 0, 16}, MatrixLayout::kOutIn, 0}};
  const Rates rates{0.01, 0.1, 3};
  const auto make = [&](std::vector<Problem>& problems) {
    for (const Case& c : cases) {
      MuownOptions options;
      options.layout = c.layout;
      problems.push_back(make_problem(c.sizes, options, DType::kFloat32, DType::kBFloat16, stream, c.gap));
    }
  };
  std::vector<Problem> together, alone;
  make(together);
  make(alone);
  const MuownStep step = step_of(rates, stream, control_of(0.5, false, stream));
  std::vector<MuownItem> items;
  for (const Problem& p : together)
    items.push_back({p.weight, p.gradient, p.state, p.options, p.out, p.update, Tensor(), step});
  const MuownBatch batch(items, stream);
  batch.prepare(stream);
  batch.finish(stream);
  for (std::size_t i = 0; i < alone.size(); ++i) {
    Problem& p = alone[i];
    muown_prepare(p.weight, p.gradient, p.state, p.options, step.control, p.out, stream);
    muown_finish(p.weight, p.gradient, p.state, p.update, p.out.magnitude_grad, p.options, step, nullptr, stream);
    CAPTURE(i);
    CHECK((values(together[i].weight, stream) == values(p.weight, stream)));
    CHECK((values(together[i].out.update, stream) == values(p.out.update, stream)));
    CHECK((values(together[i].state.norm, stream) == values(p.state.norm, stream)));
    CHECK((values(together[i].out.row_square_sum, stream) == values(p.out.row_square_sum, stream)));
  }
}

}  // namespace

TEST_CASE("Muown with the angular direction follows AngularMuown", "[ops][muown]") {
  for (const MatrixLayout layout : {MatrixLayout::kOutIn, MatrixLayout::kInOut}) {
    check_angular(layout, DType::kFloat32, kCpu);
    check_angular(layout, DType::kFloat64, kCpu);
  }
}

TEST_CASE("The angular direction keeps a magnitude from changing its sign", "[ops][muown]") {
  MuownOptions options;
  options.cold_rows = ColdRows::kWarm;
  options.direction = MuownDirection::kAngular;
  Tensor weight = Tensor::from_host({1, 2}, std::vector<float>{0.6f, 0.8f}, kCpu);
  MuownState state = muown_init(weight, options, kCpu);
  const Tensor gradient = Tensor::from_host({1, 2}, std::vector<float>{6, 8}, kCpu);
  MuownUpdate update = muown_empty_update(weight, options, DType::kFloat32, kCpu);
  muown_prepare(weight, gradient, state, options, Tensor(), update, kCpu);
  muown_finish(weight, gradient, state, Tensor::zeros({1, 2}, DType::kFloat32, kCpu), update.magnitude_grad, options,
               step_of({5.0, 0, 1}, kCpu), nullptr, kCpu);
  CHECK(std::abs(values(state.magnitude, kCpu)[0] - 1e-7) <= 1e-13);
  options.cold_rows = ColdRows::kFloor;
  CHECK_FALSE(muown_supported(weight, options).supported);
}

TEST_CASE("Muown prepare and finish follow the formulas in float32", "[ops][muown]") {
  check_all_sizes(odd_sizes(), DType::kFloat32, DType::kBFloat16, kCpu);
  check_all_sizes(odd_sizes(), DType::kFloat32, DType::kFloat32, kCpu);
}

TEST_CASE("Muown prepare and finish follow the formulas in float64", "[ops][muown]") {
  check_all_sizes(odd_sizes(), DType::kFloat64, DType::kFloat64, kCpu);
  check_all_sizes(odd_sizes(), DType::kFloat64, DType::kBFloat16, kCpu);
}

TEST_CASE("Muown takes wide rows, and more than 65535 rows or matrices", "[ops][muown]") {
  check_all_sizes(wide_sizes(), DType::kFloat32, DType::kBFloat16, kCpu);
}

TEST_CASE("Muown scales each row block by its own rows", "[ops][muown]") { check_row_blocks(kCpu); }

TEST_CASE("Muown leaves weights bit-unchanged when nothing moves them", "[ops][muown]") { check_unchanged_rows(kCpu); }

TEST_CASE("Muown does not round the scaled update to bfloat16", "[ops][muown]") { check_unrounded_rate(kCpu); }

TEST_CASE("Muown keeps a zero row finite in both cold-row modes", "[ops][muown]") { check_zero_row(kCpu); }

TEST_CASE("A cold row wakes in the direction of its first update", "[ops][muown]") {
  for (const std::int64_t inputs : kRowWidths) check_waking_row(inputs, kCpu);
}

TEST_CASE("A row that wakes late does not drown the others", "[ops][muown]") {
  CHECK(late_share(ColdRows::kWarm, kCpu) < 0.1);
}

TEST_CASE("Weight decay never turns a Muown row against its direction", "[ops][muown]") {
  check_direction_after_decay(kCpu);
}

TEST_CASE("A skipped step writes nothing of Muown", "[ops][muown]") { check_skip(kCpu); }

TEST_CASE("NaN in one row of the gradient stays in that row of the update", "[ops][muown]") {
  check_nan_stays_in_its_row(kCpu);
}

TEST_CASE("Muown gives the same bits twice", "[ops][muown]") { check_same_bits(kCpu); }

TEST_CASE("Muown starts from the row norms", "[ops][muown]") { check_init(kCpu); }

TEST_CASE("A Muown batch gives each matrix the bits that it gets alone", "[ops][muown]") { check_batch(kCpu); }

TEST_CASE("Muown takes matrices without rows, columns or batches", "[ops][muown]") { check_empty(kCpu); }

TEST_CASE("The update scale is 0.2 sqrt of the longer side", "[ops][muown]") {
  CHECK(muown_scale(16, 4096) == 0.2 * 64);
  CHECK(muown_scale(4096, 16, 0.5) == 0.1 * 64);
}

TEST_CASE("The magnitude's learning rate has its own factor", "[ops][muown]") {
  MuownOptions options;
  options.magnitude_lr = 0;
  Problem p = make_problem({Shape{}, 8, 6}, options, DType::kFloat32, DType::kBFloat16, kCpu);
  const Values g = values(p.state.magnitude, kCpu), w = values(p.weight, kCpu);
  const Tensor gg = test::random_normal({8}, DType::kFloat32, 3, kCpu);
  muown_finish(p.weight, p.gradient, p.state, p.update, gg, options, step_of({0.1, 0, 1}, kCpu), nullptr, kCpu);
  CHECK((values(p.state.magnitude, kCpu) == g));
  CHECK(values(p.weight, kCpu) != w);
}

TEST_CASE("The clipping factor multiplies the gradient", "[ops][muown]") {
  for (const ColdRows cold : {ColdRows::kFloor, ColdRows::kWarm}) {
    Problem a =
        make_problem({Shape{}, 8, 6}, options_for(MatrixLayout::kOutIn, cold), DType::kFloat32, DType::kBFloat16, kCpu);
    Problem b = make_problem({Shape{}, 8, 6}, a.options, DType::kFloat32, DType::kBFloat16, kCpu);
    Values halved = values(a.gradient, kCpu);
    for (double& x : halved) x *= 0.5;
    b.gradient = floats({8, 6}, halved, kCpu);
    const auto step = [&](Problem& p, double factor) {
      const Tensor control = control_of(factor, false, kCpu);
      for (const Tensor* t : {&p.weight, &p.state.magnitude}) t->slice(0, 2, 3).zero(kCpu);  // one cold row
      muown_prepare(p.weight, p.gradient, p.state, p.options, control, p.out, kCpu);
      muown_finish(p.weight, p.gradient, p.state, p.out.update, p.out.magnitude_grad, p.options,
                   step_of({0.1, 0, 1}, kCpu, control), nullptr, kCpu);
    };
    step(a, 0.5);
    step(b, 1);
    CHECK((values(a.weight, kCpu) == values(b.weight, kCpu)));
    CHECK((values(a.state.magnitude, kCpu) == values(b.state.magnitude, kCpu)));
    CHECK((values(a.out.update, kCpu) == values(b.out.update, kCpu)));
  }
}

TEST_CASE("muown_supported says which weights and options are taken, and why not", "[ops][muown]") {
  const auto weight = [](const Shape& shape, DType dtype) { return Tensor::zeros(shape, dtype, kCpu); };
  CHECK(muown_supported(weight({3, 4}, DType::kFloat32), {}));
  CHECK(muown_supported(weight({2, 2, 3, 4}, DType::kFloat64), {}));
  CHECK(muown_supported(weight({3, 20000}, DType::kFloat32), options_for(MatrixLayout::kInOut)));
  const auto reason = [](const Tensor& t, const MuownOptions& options) {
    const MuownSupport support = muown_supported(t, options);
    CHECK_FALSE(support);
    return support.reason;
  };
  CHECK(reason(Tensor(), {}) != "");
  CHECK(reason(weight({3}, DType::kFloat32), {}).find("rank 2 to 4") != std::string::npos);
  CHECK(reason(weight({1, 1, 1, 3, 4}, DType::kFloat32), {}).find("rank 2 to 4") != std::string::npos);
  CHECK(reason(weight({3, 4}, DType::kBFloat16), {}).find("bfloat16") != std::string::npos);
  CHECK(reason(weight({3, 4}, DType::kFloat32).transpose(0, 1), {}).find("adjacent") != std::string::npos);
  CHECK(reason(weight({2, 3, 5, 4}, DType::kFloat32).transpose(0, 1), {}).find("leading") != std::string::npos);
  MuownOptions options;
  options.row_blocks = {{1}, {1}};
  CHECK(reason(weight({3, 4}, DType::kFloat32), options).find("got 2") != std::string::npos);
  options.row_blocks.assign(kMaxRowBlocks + 1, RowBlock{0});
  CHECK(reason(weight({0, 4}, DType::kFloat32), options).find("65") != std::string::npos);
  options = {};
  options.epsilon = 0;
  CHECK(reason(weight({3, 4}, DType::kFloat32), options).find("epsilon") != std::string::npos);
  options = {};
  options.beta2 = 1;
  CHECK(reason(weight({3, 4}, DType::kFloat32), options).find("betas") != std::string::npos);
}

TEST_CASE("Muown refuses tensors that do not fit and leaves all untouched", "[ops][muown]") {
  Problem good = make_problem({Shape{}, 6, 5}, options_for(MatrixLayout::kOutIn, ColdRows::kWarm), DType::kFloat32,
                              DType::kBFloat16, kCpu);
  const MuownStep step = step_of({0.1, 0.1, 1}, kCpu);
  const Tensor gg = Tensor::zeros({6}, DType::kFloat32, kCpu);
  const Tensor* const state[] = {&good.weight,         &good.state.magnitude,    &good.state.norm,
                                 &good.state.momentum, &good.state.first_moment, &good.state.second_moment};
  std::vector<Values> before;
  for (const Tensor* t : state) before.push_back(values(*t, kCpu));

  const auto prepare = [&](auto&& spoil) {
    Problem p = good;
    Tensor control;
    spoil(p, control);
    return throws_invalid([&] { muown_prepare(p.weight, p.gradient, p.state, p.options, control, p.out, kCpu); });
  };
  const Tensor short_row = Tensor::zeros({5}, DType::kFloat32, kCpu),
               other = Tensor::zeros({5, 6}, DType::kFloat32, kCpu);
  CHECK(prepare([&](Problem& p, Tensor&) { p.gradient = other; }));
  CHECK(prepare([&](Problem& p, Tensor&) { p.gradient = Tensor(); }));
  CHECK(prepare([&](Problem& p, Tensor&) { p.gradient = Tensor::zeros({6, 5}, DType::kBFloat16, kCpu); }));
  CHECK(prepare([&](Problem& p, Tensor&) { p.state.magnitude = short_row; }));
  CHECK(prepare([&](Problem& p, Tensor&) { p.state.norm = short_row; }));
  CHECK(prepare([&](Problem& p, Tensor&) { p.state.momentum = other; }));
  CHECK(prepare([&](Problem& p, Tensor&) { p.state.momentum = spread(p.state.momentum, 1, kCpu); }));
  CHECK(prepare([&](Problem& p, Tensor&) { p.out.update = Tensor::zeros({6, 5}, DType::kFloat16, kCpu); }));
  CHECK(prepare([&](Problem& p, Tensor&) { p.out.update = p.weight; }));
  CHECK(prepare([&](Problem& p, Tensor&) { p.out.row_square_sum = gg; }));
  CHECK(prepare([&](Problem& p, Tensor&) { p.out.row_max = short_row; }));
  CHECK(prepare([&](Problem& p, Tensor&) { p.out.direction = other; }));
  CHECK(prepare([&](Problem&, Tensor& control) { control = Tensor::zeros({2}, DType::kFloat64, kCpu); }));
  CHECK(prepare([&](Problem& p, Tensor&) { p.options.row_blocks = {{5}}; }));

  const auto finish = [&](auto&& spoil) {
    Problem p = good;
    MuownStep s = step;
    Tensor magnitude_grad = gg, value = Tensor::zeros({6, 5}, DType::kBFloat16, kCpu);
    spoil(p, s, magnitude_grad, value);
    return throws_invalid(
        [&] { muown_finish(p.weight, p.gradient, p.state, p.update, magnitude_grad, p.options, s, &value, kCpu); });
  };
  CHECK(finish([&](Problem& p, MuownStep&, Tensor&, Tensor&) { p.update = other; }));
  CHECK(finish([&](Problem& p, MuownStep&, Tensor&, Tensor&) {
    p.update = Tensor::zeros({6, 5}, DType::kFloat64, kCpu);
  }));
  CHECK(finish([&](Problem& p, MuownStep&, Tensor&, Tensor&) { p.gradient = Tensor(); }));
  CHECK(finish([&](Problem& p, MuownStep&, Tensor&, Tensor&) { p.state.first_moment = short_row; }));
  CHECK(finish([&](Problem& p, MuownStep&, Tensor&, Tensor&) { p.state.second_moment = short_row; }));
  CHECK(finish([&](Problem&, MuownStep& s, Tensor&, Tensor&) { s.rates = short_row; }));
  CHECK(finish([&](Problem&, MuownStep& s, Tensor&, Tensor&) { s.step = gg; }));
  CHECK(finish([&](Problem&, MuownStep&, Tensor& magnitude_grad, Tensor&) { magnitude_grad = short_row; }));
  CHECK(finish([&](Problem&, MuownStep&, Tensor&, Tensor& value) { value = other; }));
  CHECK(finish([&](Problem& p, MuownStep&, Tensor&, Tensor& value) { value = p.weight; }));
  CHECK(finish([&](Problem&, MuownStep&, Tensor&, Tensor& value) {
    value = Tensor::zeros({6, 5}, DType::kFloat64, kCpu);
  }));

  for (std::size_t i = 0; i < before.size(); ++i) CHECK((values(*state[i], kCpu) == before[i]));
}

// ---- CUDA
// ------------------------------------------------------------------------------------------------------------

TEST_CASE("Muown on CUDA follows the formulas", "[ops][muown][gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_all_sizes(odd_sizes(), DType::kFloat32, DType::kBFloat16, stream);
  check_all_sizes(odd_sizes(), DType::kFloat32, DType::kFloat32, stream);
  for (const MatrixLayout layout : {MatrixLayout::kOutIn, MatrixLayout::kInOut})
    check_angular(layout, DType::kFloat32, stream);
}

TEST_CASE("Muown on CUDA takes wide rows, and more than 65535 rows or matrices", "[ops][muown][gpu]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_all_sizes(wide_sizes(), DType::kFloat32, DType::kBFloat16, stream);
}

TEST_CASE("Muown on CUDA treats row blocks, zero rows and skipped steps like the CPU", "[ops][muown][gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_row_blocks(stream);
  check_unchanged_rows(stream);
  check_unrounded_rate(stream);
  check_zero_row(stream);
  for (const std::int64_t inputs : kRowWidths) check_waking_row(inputs, stream);
  CHECK(late_share(ColdRows::kWarm, stream) < 0.1);
  check_direction_after_decay(stream);
  check_skip(stream);
  check_nan_stays_in_its_row(stream);
  check_same_bits(stream);
  check_init(stream);
  check_empty(stream);
  check_batch(stream);
}

}  // namespace rowan
