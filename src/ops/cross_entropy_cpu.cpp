#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/cpu_rows.h"
#include "ops/cross_entropy_backend.h"
#include "ops/float_exp.h"
#include "rowan/core/error.h"
#include "rowan/ops/cross_entropy.h"

namespace rowan::cpu {

namespace {

using namespace detail;

template <class T>
void run(const CrossEntropyArguments& a) {
  using C = ComputeType<T>;
  parallel_for(a.rows, 16, [&](std::int64_t begin, std::int64_t end) {
    std::vector<C> buffer(static_cast<std::size_t>(a.classes));
    C* const row = buffer.data();  // logits, then their exponentials, then the gradient
    for (std::int64_t i = begin; i < end; ++i) {
      T* const gradient = a.dlogits == nullptr ? nullptr : static_cast<T*>(a.dlogits) + i * a.dlogits_stride;
      C& loss = static_cast<C*>(a.losses)[i];
      const std::int64_t label = a.labels[i];
      if (label == kIgnoredLabel) {
        loss = 0;
        if (gradient != nullptr) std::fill(gradient, gradient + a.classes, T{});
        continue;
      }
      convert_row(static_cast<const T*>(a.logits) + i * a.logits_stride, row, a.classes);
      const C largest = lane_max(a.classes, row);
      const double target = static_cast<double>(row[label]) - static_cast<double>(largest);
      for (std::int64_t j = 0; j < a.classes; ++j) row[j] = exponential(row[j] - largest);
      const double sum = lane_sum(a.classes, [&](std::int64_t j) { return row[j]; });
      loss = static_cast<C>(std::log(sum) - target);
      if (gradient == nullptr) continue;
      const auto probability = static_cast<double>(row[label]) / sum;
      const auto factor = static_cast<C>(a.grad_scale / sum);
      for (std::int64_t j = 0; j < a.classes; ++j) row[j] *= factor;
      row[label] = static_cast<C>((probability - 1) * a.grad_scale);
      convert_row(row, gradient, a.classes);
    }
  });
}

}  // namespace

void cross_entropy(const CrossEntropyArguments& a) {
  for (std::int64_t i = 0; i < a.rows; ++i) {
    if (a.labels[i] != kIgnoredLabel && (a.labels[i] < 0 || a.labels[i] >= a.classes)) {
      throw Error(ErrorKind::kInvalidArgument, "cross_entropy: expected labels in [0, " + std::to_string(a.classes) +
                                                   ") or " + std::to_string(kIgnoredLabel) + ", got " +
                                                   std::to_string(a.labels[i]) + " at index " + std::to_string(i));
    }
  }
  detail::dispatch_floating(a.dtype, [&](auto tag) { run<typename decltype(tag)::type>(a); });
}

}  // namespace rowan::cpu
