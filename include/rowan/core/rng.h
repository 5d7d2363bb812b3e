// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
// the same bits on the CPU and on CUDA.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ROWAN_HOST_DEVICE __host__ __device__
#else
#define ROWAN_HOST_DEVICE
#endif

namespace rowan {

struct PhiloxBlock {
  std::uint32_t word[4];
};

/// Four random words for (seed, counter, subsequence); a pure function.
ROWAN_HOST_DEVICE inline PhiloxBlock philox(std::uint64_t seed, std::uint64_t counter, std::uint64_t subsequence) {
  std::uint32_t c0 = static_cast<std::uint32_t>(counter), c1 = static_cast<std::uint32_t>(counter >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(subsequence), c3 = static_cast<std::uint32_t>(subsequence >> 32);
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = static_cast<std::uint64_t>(0xD2511F53u) * c0;
    const std::uint64_t p1 = static_cast<std::uint64_t>(0xCD9E8D57u) * c2;
    const std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    const std::uint32_t n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

/// A sequence drawn from philox on the host: cheap to copy, and its whole state is (seed, subsequence, position).
class Rng {
 public:
  explicit Rng(std::uint64_t seed, std::uint64_t subsequence = 0) noexcept : seed_(seed), subsequence_(subsequence) {}

  std::uint32_t next_u32() noexcept;
  std::uint64_t next_u64() noexcept;
  /// Uniform in [0, 1) with 53 random bits.
  double uniform() noexcept;
  /// Standard normal (Box-Muller; each call uses one fresh pair of uniforms).
  double normal() noexcept;
  /// Uniform integer in [0, bound), without modulo bias; bound >= 1.
  std::uint64_t below(std::uint64_t bound) noexcept;

  /// Words drawn so far; set_position goes there in O(1).
  std::uint64_t position() const noexcept { return position_; }
  void set_position(std::uint64_t position) noexcept { position_ = position; }

 private:
  std::uint64_t seed_;
  std::uint64_t subsequence_;
  std::uint64_t position_ = 0;
};

}  // namespace rowan
