#include "rowan/nn/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/check.h"
#include "nn/host_values.h"

namespace rowan {

Sampler::Sampler(const SamplingOptions& options) : options_(options), rng_(options.seed) {
  detail::require(options.temperature >= 0 && std::isfinite(options.temperature),
                  "Sampler: expected a temperature >= 0, got {}", options.temperature);
  detail::require(options.top_k >= 0, "Sampler: expected top_k >= 0, got {}", options.top_k);
  detail::require(options.top_p > 0 && options.top_p <= 1, "Sampler: expected top_p in (0, 1], got {}", options.top_p);
}

std::int32_t Sampler::pick(const Tensor& logits, StreamRef stream) {
  detail::require_rank("Sampler", "logits", logits, 2);
  detail::require(logits.size(0) == 1 && logits.size(1) >= 1,
                  "Sampler: expected logits of shape [1, vocabulary], got {}", logits.shape());
  const std::vector<double> values = detail::read_values(logits, stream);
  const auto best = std::max_element(values.begin(), values.end());
  const bool sound = std::none_of(values.begin(), values.end(), [](double v) { return std::isnan(v); });
  detail::require(sound && std::isfinite(*best), "Sampler: expected finite logits, got NaN or infinity");
  if (options_.temperature == 0) return static_cast<std::int32_t>(best - values.begin());

  std::vector<std::int32_t> tokens(values.size());
  std::iota(tokens.begin(), tokens.end(), 0);
  const auto value = [&values](std::int32_t token) { return values[static_cast<std::size_t>(token)]; };
  if (options_.top_k > 0 || options_.top_p < 1) {
    const auto k =
        options_.top_k > 0 ? std::min(static_cast<std::size_t>(options_.top_k), tokens.size()) : tokens.size();
    std::partial_sort(tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(k), tokens.end(),
                      [&](std::int32_t a, std::int32_t b) {
                        return value(a) != value(b) ? value(a) > value(b) : a < b;  // a total order: equal bits
                      });
    tokens.resize(k);
  }
  std::vector<double> sums;  // of the unnormalised probabilities so far
  for (const std::int32_t token : tokens) {
    const double weight = std::exp((value(token) - *best) / options_.temperature);
    sums.push_back((sums.empty() ? 0 : sums.back()) + weight);
  }
  const auto reached = std::lower_bound(sums.begin(), sums.end(), options_.top_p * sums.back());
  const std::size_t kept = std::min(static_cast<std::size_t>(reached - sums.begin()) + 1, sums.size());
  const double drawn = rng_.uniform() * sums[kept - 1];
  const auto at = std::upper_bound(sums.begin(), sums.begin() + static_cast<std::ptrdiff_t>(kept) - 1, drawn);
  return tokens[static_cast<std::size_t>(at - sums.begin())];
}

}  // namespace rowan
