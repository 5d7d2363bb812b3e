#include <cmath>
#include <vector>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/cpu_rows.h"
#include "ops/rms_norm_backend.h"

namespace rowan::cpu {

namespace {

using namespace detail;

constexpr std::int64_t kRowsPerTask = 64;

template <class T>
void forward(const RmsNormArguments& a) {
  using Statistic = StatisticType<T>;
  const T* const weight = static_cast<const T*>(a.weight);
  parallel_for(a.rows(), kRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const T* const x = a.x.at<T>(row / a.heads, row % a.heads);
      T* const y = a.y.at_mutable<T>(row / a.heads, row % a.heads);
      const double squares =
          lane_sum(a.width, [&](std::int64_t j) { return convert<double>(x[j]) * convert<double>(x[j]); });
      const auto rstd = static_cast<Statistic>(1.0 / std::sqrt(squares / static_cast<double>(a.width) + a.eps));
      static_cast<Statistic*>(a.rstd)[row] = rstd;
      for (std::int64_t j = 0; j < a.width; ++j) {
        y[j] = convert<T>(convert<double>(x[j]) * static_cast<double>(rstd) * convert<double>(weight[j]));
      }
    }
  });
}

template <class T>
void weight_gradient(const RmsNormArguments& a) {
  using Statistic = StatisticType<T>;
  const std::int64_t chunk_rows = rms_norm_chunk_rows(a.rows()), chunks = rms_norm_chunks(a.rows());
  auto* const partials = static_cast<Statistic*>(a.partials);
  parallel_for(a.rows(), chunk_rows, [&](std::int64_t begin, std::int64_t end) {
    std::vector<double> sum(static_cast<std::size_t>(a.width));
    for (std::int64_t row = begin; row < end; ++row) {
      const T* const x = a.x.at<T>(row / a.heads, row % a.heads);
      const T* const dy = a.dy.at<T>(row / a.heads, row % a.heads);
      const auto rstd = static_cast<double>(static_cast<const Statistic*>(a.rstd)[row]);
      for (std::int64_t j = 0; j < a.width; ++j) {
        sum[static_cast<std::size_t>(j)] += convert<double>(dy[j]) * (convert<double>(x[j]) * rstd);
      }
    }
    convert_row(sum.data(), partials + begin / chunk_rows * a.width, a.width);
  });
  auto* const dweight = static_cast<Statistic*>(a.dweight);
  for (std::int64_t j = 0; j < a.width; ++j) {
    double sum = 0;
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) sum += static_cast<double>(partials[chunk * a.width + j]);
    dweight[j] = static_cast<Statistic>(static_cast<double>(dweight[j]) + sum);
  }
}

template <class T>
void input_gradient(const RmsNormArguments& a) {
  using Statistic = StatisticType<T>;
  const T* const weight = static_cast<const T*>(a.weight);
  parallel_for(a.rows(), kRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const T* const x = a.x.at<T>(row / a.heads, row % a.heads);
      const T* const dy = a.dy.at<T>(row / a.heads, row % a.heads);
      T* const dx = a.dx.at_mutable<T>(row / a.heads, row % a.heads);
      const auto rstd = static_cast<double>(static_cast<const Statistic*>(a.rstd)[row]);
      const auto normal = [&](std::int64_t j) { return convert<double>(x[j]) * rstd; };
      const auto scaled = [&](std::int64_t j) { return convert<double>(dy[j]) * convert<double>(weight[j]); };
      const double mean =
          lane_sum(a.width, [&](std::int64_t j) { return scaled(j) * normal(j); }) / static_cast<double>(a.width);
      if (a.dx_beta == 0) {
        for (std::int64_t j = 0; j < a.width; ++j) dx[j] = convert<T>(rstd * (scaled(j) - normal(j) * mean));
      } else {
        for (std::int64_t j = 0; j < a.width; ++j) {
          dx[j] = convert<T>(rstd * (scaled(j) - normal(j) * mean) + a.dx_beta * convert<double>(dx[j]));
        }
      }
    }
  });
}

}  // namespace

void rms_norm_forward(const RmsNormArguments& a) {
  detail::dispatch_floating(a.dtype, [&](auto tag) { forward<typename decltype(tag)::type>(a); });
}

void rms_norm_backward(const RmsNormArguments& a) {
  detail::dispatch_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.dweight != nullptr) weight_gradient<T>(a);  // first: dx may overwrite dy
    input_gradient<T>(a);
  });
}

}  // namespace rowan::cpu
