#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/attention_cached_backend.h"

namespace rowan::cpu {

namespace {

using namespace detail;

/// One query of one head, in float64.
template <class T>
void attend(const AttentionCachedArguments& a, std::int64_t query, std::int64_t head) {
  const std::int64_t key_head = head / (a.query_heads / a.key_heads), visible = a.keys - a.queries + query + 1;
  const T* const q = a.q.at<T>(query, head);
  std::vector<double> weights(static_cast<std::size_t>(visible));
  double maximum = -std::numeric_limits<double>::infinity();
  for (std::int64_t j = 0; j < visible; ++j) {
    const T* const k = a.k.at<T>(j, key_head);
    double score = 0;
    for (std::int64_t c = 0; c < a.head_dim; ++c) score += convert<double>(q[c]) * convert<double>(k[c]);
    weights[static_cast<std::size_t>(j)] = score * a.scale;
    maximum = std::max(maximum, score * a.scale);
  }
  if (maximum == -std::numeric_limits<double>::infinity()) maximum = 0;  // then the weights are 0, not NaN
  double sum = 0;
  std::vector<double> out(static_cast<std::size_t>(a.head_dim));
  for (std::int64_t j = 0; j < visible; ++j) {
    const T* const v = a.v.at<T>(j, key_head);
    const double weight = std::exp(weights[static_cast<std::size_t>(j)] - maximum);
    sum += weight;
    for (std::int64_t c = 0; c < a.head_dim; ++c) out[static_cast<std::size_t>(c)] += weight * convert<double>(v[c]);
  }
  T* const to = a.out.at_mutable<T>(query, head);
  for (std::int64_t c = 0; c < a.head_dim; ++c) to[c] = convert<T>(out[static_cast<std::size_t>(c)] / sum);
}

}  // namespace

void attention_cached(const AttentionCachedArguments& a) {
  dispatch_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    parallel_for(a.queries * a.query_heads, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) attend<T>(a, i / a.query_heads, i % a.query_heads);
    });
  });
}

}  // namespace rowan::cpu
