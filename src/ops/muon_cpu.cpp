#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/muon_backend.h"
#include "ops/row_runs.h"
#include "rowan/ops/step_control.h"

namespace rowan::cpu {

namespace {

constexpr std::int64_t kChunk = 32768;

bool skipped(const double* control) { return control != nullptr && control[StepControl::kSkip] != 0; }

template <class F>
void for_chunks(std::int64_t elements, std::int64_t cols, const F& f) {
  detail::parallel_for((elements + kChunk - 1) / kChunk, 1, [&](std::int64_t first, std::int64_t last) {
    detail::for_each_run(first * kChunk, std::min(last * kChunk, elements), cols, f);
  });
}

template <class T, class U>
void prepare(const MuonPrepareArguments& a) {
  const double factor = a.control ? a.control[StepControl::kFactor] : 1.0;
  for_chunks(a.elements, a.cols, [&](std::int64_t first, std::int64_t row, std::int64_t col, std::int64_t count) {
    const T* const gradient = static_cast<const T*>(a.gradient) + row * a.gradient_stride + col;
    T* const momentum = static_cast<T*>(a.momentum) + first;
    U* const update = static_cast<U*>(a.update) + first;
    for (std::int64_t i = 0; i < count; ++i) {
      const double g = factor * static_cast<double>(gradient[i]);
      const double m = a.mu * static_cast<double>(momentum[i]) + g;
      momentum[i] = static_cast<T>(m);
      update[i] = static_cast<U>(a.nesterov ? g + a.mu * m : m);
    }
  });
}

template <class T, class U, class V>
void finish(const MuonFinishArguments& a) {
  const double lr = a.rates[0], decay = lr * a.rates[1], step = lr * a.scale;
  for_chunks(a.elements, a.cols, [&](std::int64_t, std::int64_t row, std::int64_t col, std::int64_t count) {
    T* const weight = static_cast<T*>(a.weight) + row * a.weight_stride + col;
    const U* const update = static_cast<const U*>(a.update) + row * a.update_stride + col;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto w = static_cast<double>(weight[i]);
      weight[i] = static_cast<T>(w - (step * static_cast<double>(update[i]) + decay * w));
    }
    if (a.value == nullptr) return;
    V* const value = static_cast<V*>(a.value) + row * a.value_stride + col;
    for (std::int64_t i = 0; i < count; ++i) value[i] = static_cast<V>(weight[i]);
  });
}

}  // namespace

void muon_prepare(const MuonPrepareArguments& a) {
  if (skipped(a.control)) return;
  detail::dispatch_floating(a.update_dtype, [&](auto tag) {
    using U = typename decltype(tag)::type;
    a.dtype == DType::kFloat64 ? prepare<double, U>(a) : prepare<float, U>(a);
  });
}

void muon_finish(const MuonFinishArguments& a) {
  if (skipped(a.control)) return;
  detail::dispatch_floating(a.update_dtype, [&](auto tag) {
    using U = typename decltype(tag)::type;
    detail::dispatch_floating(a.value_dtype, [&](auto value_tag) {
      using V = typename decltype(value_tag)::type;
      a.dtype == DType::kFloat64 ? finish<double, U, V>(a) : finish<float, U, V>(a);
    });
  });
}

}  // namespace rowan::cpu
