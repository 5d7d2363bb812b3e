#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/cpu_rows.h"
#include "ops/rotary_backend.h"
#include "rowan/core/error.h"

namespace rowan::cpu {

namespace {

using namespace detail;

template <class T>
void apply(const RotaryArguments& a) {
  using C = ComputeType<T>;
  const std::int64_t half = a.head_dim / 2;
  parallel_for(a.tokens, 64, [&](std::int64_t begin, std::int64_t end) {
    std::vector<C> cosines(static_cast<std::size_t>(half)), sines(static_cast<std::size_t>(half));
    std::vector<C> head(static_cast<std::size_t>(a.head_dim));
    for (std::int64_t token = begin; token < end; ++token) {
      const float* const angles = a.table + a.positions[token] * a.head_dim;
      for (std::int64_t j = 0; j < half; ++j) {
        cosines[static_cast<std::size_t>(j)] = angles[2 * j];
        sines[static_cast<std::size_t>(j)] = a.inverse ? -angles[2 * j + 1] : angles[2 * j + 1];
      }
      const C* const c = cosines.data();
      const C* const s = sines.data();
      for (std::int64_t h = 0; h < a.heads; ++h) {
        T* const x = a.x.at_mutable<T>(token, h);
        convert_row(x, head.data(), a.head_dim);
        const C* const low = head.data();
        const C* const high = low + half;
        for (std::int64_t j = 0; j < half; ++j) x[j] = convert<T>(low[j] * c[j] - high[j] * s[j]);
        for (std::int64_t j = 0; j < half; ++j) x[j + half] = convert<T>(high[j] * c[j] + low[j] * s[j]);
      }
    }
  });
}

}  // namespace

void rotary_apply(const RotaryArguments& a) {
  for (std::int64_t i = 0; i < a.tokens; ++i) {
    if (a.positions[i] < 0 || a.positions[i] >= a.table_positions) {
      throw Error(ErrorKind::kInvalidArgument, "rotary_apply: expected positions in [0, " +
                                                   std::to_string(a.table_positions) + "), got " +
                                                   std::to_string(a.positions[i]) + " at index " + std::to_string(i));
    }
  }
  detail::dispatch_floating(a.dtype, [&](auto tag) { apply<typename decltype(tag)::type>(a); });
}

}  // namespace rowan::cpu
