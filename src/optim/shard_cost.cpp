#include "rowan/optim/shard_cost.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace rowan {

namespace {

constexpr double kFloat32Side = 256;

double polynomial_flops(double side) { return 34 * side * side * side; }

}  // namespace

const char* to_string(ShardScheme scheme) noexcept { return scheme == ShardScheme::kGram ? "gram" : "owner"; }

SchemeCost scheme_cost(ShardScheme scheme, const SplitMatrices& m, std::int64_t ranks, const RankSpeed& speed) {
  detail::require(m.rows > 0 && m.columns > 0 && m.count > 0 && m.update_bytes > 0 && ranks > 0,
                  "scheme_cost: expected rows, columns, matrices and ranks of 1 or more, got {}, {}, {} and {}", m.rows,
                  m.columns, m.count, ranks);
  detail::require(
      speed.bandwidth > 0 && speed.latency >= 0 && speed.flops_float32 > 0 && speed.flops_tf32 > 0,
      "scheme_cost: expected a bandwidth and flops above 0 and a latency of 0 or more, got {}, {}, {} and {}",
      speed.bandwidth, speed.flops_float32, speed.flops_tf32, speed.latency);
  const auto n = static_cast<double>(m.rows), k = static_cast<double>(m.columns), count = static_cast<double>(m.count),
             p = static_cast<double>(ranks), shorter = std::min(n, k), longer = std::max(n, k);
  const bool gram = scheme == ShardScheme::kGram;
  SchemeCost cost;
  cost.bytes = gram ? count * 8 * k * k * (p - 1) / p : count * 2 * m.update_bytes * n * k * (p - 1) / (p * p);
  cost.messages = gram ? 4 * std::ceil(std::log2(p)) : 2 * (p - 1);
  cost.flops = gram ? count * (4 * n * k * k / p + polynomial_flops(k))
                    : std::ceil(count / p) * (4 * shorter * shorter * longer + polynomial_flops(shorter));
  const double side = gram ? k : shorter;
  cost.seconds = cost.bytes / speed.bandwidth + cost.messages * speed.latency +
                 cost.flops / (side <= kFloat32Side ? speed.flops_float32 : speed.flops_tf32);
  return cost;
}

ShardScheme cheaper_scheme(const SplitMatrices& matrices, std::int64_t ranks, const RankSpeed& speed) {
  const double gram = scheme_cost(ShardScheme::kGram, matrices, ranks, speed).seconds,
               owner = scheme_cost(ShardScheme::kOwner, matrices, ranks, speed).seconds;
  return gram <= owner ? ShardScheme::kGram : ShardScheme::kOwner;
}

}  // namespace rowan
