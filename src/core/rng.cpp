#include "rowan/core/rng.h"

#include <cmath>
#include <numbers>

namespace rowan {

std::uint32_t Rng::next_u32() noexcept {
  const PhiloxBlock block = philox(seed_, position_ / 4, subsequence_);
  return block.word[position_++ % 4];
}

std::uint64_t Rng::next_u64() noexcept {
  const std::uint64_t low = next_u32();
  return low | (static_cast<std::uint64_t>(next_u32()) << 32);
}

double Rng::uniform() noexcept { return static_cast<double>(next_u64() >> 11) * 0x1p-53; }

double Rng::normal() noexcept {
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform()));  // 1 - u is in (0, 1]
  return radius * std::cos(2.0 * std::numbers::pi * uniform());
}

std::uint64_t Rng::below(std::uint64_t bound) noexcept {
  const std::uint64_t threshold = (0 - bound) % bound;  // 2^64 mod bound: draws below it would favour small results
  while (true) {
    const std::uint64_t drawn = next_u64();
    if (drawn >= threshold) return drawn % bound;
  }
}

}  // namespace rowan
