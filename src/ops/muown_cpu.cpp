#include <cmath>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/muown_backend.h"

namespace rowan::cpu {

namespace {

using detail::convert;

/// The elements of one output neuron.
template <class T, bool kTransposed>
struct Row {
  T* data = nullptr;
  std::int64_t step = 1;
  T& operator[](std::int64_t j) const { return data[kTransposed ? j * step : j]; }
};

template <class T, bool kTransposed>
Row<T, kTransposed> row_of(const MuownOperand& operand, const MuownShape& shape, std::int64_t row) {
  const std::int64_t batch = row / shape.neurons, neuron = row % shape.neurons;
  T* const matrix = static_cast<T*>(operand.data) + batch * operand.batch_stride;
  return {matrix + (kTransposed ? neuron : neuron * operand.line_stride), operand.line_stride};
}

template <class T>
T& at(void* rows, std::int64_t row) {
  return static_cast<T*>(rows)[row];
}
template <class T>
T at(const void* rows, std::int64_t row) {
  return static_cast<const T*>(rows)[row];
}

/// Sum of f(j) in eight interleaved parts: a fixed order that the compiler can keep in vector registers.
template <class F>
double sum(std::int64_t n, F&& f) {
  constexpr std::int64_t kParts = 8;
  double part[kParts] = {};
  std::int64_t j = 0;
  for (; j + kParts <= n; j += kParts) {
    for (std::int64_t k = 0; k < kParts; ++k) part[k] += f(j + k);
  }
  for (; j < n; ++j) part[0] += f(j);
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

template <class T, class U, bool kTransposed>
void prepare_row(const MuownPrepareArguments& a, std::int64_t row) {
  const std::int64_t n = a.shape.inputs;
  const auto w = row_of<const T, kTransposed>(a.weight, a.shape, row);
  const auto gradient = row_of<const T, kTransposed>(a.gradient, a.shape, row);
  const auto momentum = row_of<T, kTransposed>(a.momentum, a.shape, row);
  const auto update = row_of<U, kTransposed>(a.update, a.shape, row);
  Row<T, kTransposed> direction;
  if (a.direction.data) direction = row_of<T, kTransposed>(a.direction, a.shape, row);

  const double factor = detail::control_factor(a.control);
  const double magnitude = detail::guarded_magnitude(at<T>(a.magnitude, row), static_cast<T>(a.epsilon));
  const double norm = at<T>(a.norm, row);
  const double dot =
      sum(n, [&](std::int64_t j) { return static_cast<double>(w[j]) * static_cast<double>(gradient[j]); });
  const T gg = static_cast<T>(factor * dot / magnitude);
  at<T>(a.magnitude_grad, row) = gg;

  const T scale = static_cast<T>(factor), inverse = static_cast<T>(1 / magnitude),
          ratio = static_cast<T>(magnitude / norm);
  const T back = static_cast<T>(norm / magnitude), mu = static_cast<T>(a.mu);
  for (std::int64_t j = 0; j < n; ++j) {
    const T d = ratio * (gradient[j] * scale - w[j] * inverse * gg);
    const T m = mu * momentum[j] + d;
    momentum[j] = m;
    update[j] = convert<U>(a.nesterov ? d + mu * m : m);
  }
  if (direction.data) {
    for (std::int64_t j = 0; j < n; ++j) direction[j] = w[j] * back;
  }

  at<double>(a.row_square_sum, row) = sum(n, [&](std::int64_t j) {
    const double u = convert<double>(update[j]);
    return u * u;
  });
  T largest = 0;
  for (std::int64_t j = 0; j < n; ++j) {
    const T size = std::abs(convert<T>(update[j]));
    if (size > largest || std::isnan(size)) largest = size;
  }
  at<T>(a.row_max, row) = largest;
}

template <class T, class U, bool kTransposed>
detail::FinishSums finish_sums(const MuownFinishArguments& a, const detail::FinishConstants& k, std::int64_t row,
                               T back, T rate, bool maybe_cold) {
  const std::int64_t n = a.shape.inputs;
  const auto w = row_of<const T, kTransposed>(a.weight, a.shape, row);
  const auto update = row_of<const U, kTransposed>(a.update, a.shape, row);
  const auto o = [&](std::int64_t j) { return convert<T>(update[j]); };
  const auto d = [&](std::int64_t j) { return w[j] * back - rate * o(j); };
  const auto dot = [n](auto&& x, auto&& y) {
    return sum(n, [&](std::int64_t j) { return static_cast<double>(x(j)) * static_cast<double>(y(j)); });
  };
  const auto weight = [&](std::int64_t j) { return w[j]; };

  detail::FinishSums sums;
  sums.dd = dot(d, d);
  for (std::int64_t j = 0; j < n && !sums.moved; ++j) sums.moved = rate * o(j) != 0;
  if (k.decay != 0 || maybe_cold) sums.ww = dot(weight, weight);
  if (k.decay != 0) sums.dw = dot(d, weight);
  if (maybe_cold) {
    const auto gradient = row_of<const T, kTransposed>(a.gradient, a.shape, row);
    sums.oo = dot(o, o);
    sums.go = dot(o, [&](std::int64_t j) { return gradient[j]; });
  }
  return sums;
}

template <class T, class U, bool kTransposed>
void write_value(const MuownFinishArguments& a, std::int64_t row) {
  const auto w = row_of<const T, kTransposed>(a.weight, a.shape, row);
  const auto value = row_of<U, kTransposed>(a.value, a.shape, row);
  for (std::int64_t j = 0; j < a.shape.inputs; ++j) value[j] = convert<U>(w[j]);
}

template <class T, class U, bool kTransposed>
void finish_row(const MuownFinishArguments& a, const detail::FinishConstants& k, std::int64_t row) {
  const std::int64_t n = a.shape.inputs;
  const auto w = row_of<T, kTransposed>(a.weight, a.shape, row);
  const auto update = row_of<const U, kTransposed>(a.update, a.shape, row);
  detail::RowState<T> state{at<T>(a.magnitude, row), at<T>(a.norm, row), at<T>(a.first_moment, row),
                            at<T>(a.second_moment, row)};
  const double magnitude = detail::guarded_magnitude(state.magnitude, static_cast<T>(a.epsilon));
  const T back = static_cast<T>(static_cast<double>(state.norm) / magnitude);
  const T rate = static_cast<T>(detail::direction_rate(a, row % a.shape.neurons));
  const auto sums = finish_sums<T, U, kTransposed>(a, k, row, back, rate, detail::may_be_cold(k, state.magnitude));
  const detail::RowPlan<T> plan = detail::finish_row(k, sums, at<T>(a.magnitude_grad, row), state);
  at<T>(a.magnitude, row) = state.magnitude;
  at<T>(a.norm, row) = state.norm;
  at<T>(a.first_moment, row) = state.first_moment;
  at<T>(a.second_moment, row) = state.second_moment;

  if (plan.mode == detail::RowMode::kWake) {
    for (std::int64_t j = 0; j < n; ++j) w[j] = plan.scale * convert<T>(update[j]);
  } else if (plan.mode == detail::RowMode::kStep) {
    for (std::int64_t j = 0; j < n; ++j) {
      const T d = w[j] * back - rate * convert<T>(update[j]);
      w[j] = plan.decay == 0 ? plan.scale * d : plan.scale * d - plan.decay * w[j];
    }
  }
  if (!a.value.data) return;
  if (a.value_dtype == DType::kBFloat16) write_value<T, BFloat16, kTransposed>(a, row);
  if (a.value_dtype == DType::kFloat16) write_value<T, Float16, kTransposed>(a, row);
  if (a.value_dtype == DType::kFloat32) write_value<T, float, kTransposed>(a, row);
}

/// Calls f(weight type, update type, transposed, row) for every row, with the types and the flag known to the compiler.
template <class F>
void for_each_row(const MuownShape& shape, F&& f) {
  const auto rows = [&](auto weight, auto update, auto transposed) {
    constexpr std::int64_t kElements = 16384;  // a block's worth of work
    const std::int64_t grain = std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(shape.inputs, 1));
    detail::parallel_for(shape.rows(), grain, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) f(weight, update, transposed, row);
    });
  };
  const auto layouts = [&](auto weight, auto update) {
    shape.transposed ? rows(weight, update, std::true_type{}) : rows(weight, update, std::false_type{});
  };
  const auto updates = [&](auto weight) {
    using T = typename decltype(weight)::type;
    if (shape.update_dtype == DType::kBFloat16) return layouts(weight, detail::TypeTag<BFloat16>{});
    if (shape.update_dtype == DType::kFloat32) return layouts(weight, detail::TypeTag<float>{});
    if constexpr (std::is_same_v<T, double>) layouts(weight, detail::TypeTag<double>{});
  };
  shape.dtype == DType::kFloat64 ? updates(detail::TypeTag<double>{}) : updates(detail::TypeTag<float>{});
}

}  // namespace

void muown_prepare(const MuownPrepareArguments& a) {
  if (detail::control_skips(a.control)) return;
  for_each_row(a.shape, [&](auto weight, auto update, auto transposed, std::int64_t row) {
    prepare_row<typename decltype(weight)::type, typename decltype(update)::type, decltype(transposed)::value>(a, row);
  });
}

void muown_finish(const MuownFinishArguments& a) {
  if (detail::control_skips(a.control)) return;
  const detail::FinishConstants k = detail::finish_constants(a);
  for_each_row(a.shape, [&](auto weight, auto update, auto transposed, std::int64_t row) {
    finish_row<typename decltype(weight)::type, typename decltype(update)::type, decltype(transposed)::value>(a, k,
                                                                                                              row);
  });
}

void muown_init(const MuownInitArguments& a) {
  for_each_row(a.shape, [&](auto weight, auto, auto transposed, std::int64_t row) {
    using T = typename decltype(weight)::type;
    const auto w = row_of<const T, decltype(transposed)::value>(a.weight, a.shape, row);
    const double square_sum =
        sum(a.shape.inputs, [&](std::int64_t j) { return static_cast<double>(w[j]) * static_cast<double>(w[j]); });
    detail::init_row(std::sqrt(square_sum), a, at<T>(a.magnitude, row), at<T>(a.norm, row));
  });
}

}  // namespace rowan::cpu
