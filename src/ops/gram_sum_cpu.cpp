#include <algorithm>
#include <cmath>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/gram_sum_backend.h"

namespace rowan::cpu {

void gram_largest(const NewtonSchulzMatrix& t, float* largest) {
  detail::dispatch_floating(t.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    detail::parallel_for(t.batches, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t b = begin; b < end; ++b) {
        double most = 0;
        for (std::int64_t i = 0; i < t.rows; ++i) {
          const T* const row = static_cast<const T*>(t.data) + b * t.batch_stride + i * t.row_stride;
          for (std::int64_t j = 0; j < t.cols; ++j) most = std::max(most, std::abs(detail::convert<double>(row[j])));
        }
        largest[b] = static_cast<float>(most);
      }
    });
  });
}

void gram_powers(const float* largest, std::int64_t count, double* powers) {
  std::transform(largest, largest + count, powers, [](float most) { return detail::gram_power(most); });
}

void gram_norms(const GramNormArguments& a) {
  for (std::int64_t b = 0; b < a.batches; ++b) {
    const float* const gram = a.gram + b * a.side * a.side;
    double trace = 0;
    for (std::int64_t i = 0; i < a.side; ++i) trace += gram[i * a.side + i];
    const double nu = a.factor * std::sqrt(trace) + detail::gram_power(a.largest[b]) * a.epsilon;
    a.inverse[b] = nu == 0 ? 0.0 : 1 / nu;
    a.inverse_square[b] = a.inverse[b] * a.inverse[b];
  }
}

}  // namespace rowan::cpu
