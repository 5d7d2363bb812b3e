// The keep decision of DropoutMask for one element, the same on host and device.
#pragma once

#include <cmath>
#include <cstdint>

#include "rowan/core/rng.h"
#include "rowan/core/stream.h"

namespace rowan {

/// A DropoutMask as kernels take it. Inactive (keep everything) by default.
struct MaskArguments {
  bool active = false;
  std::uint64_t threshold = 0;  ///< words below it drop their element: p * 2^32 rounded up
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  const std::int64_t* counter = nullptr;  ///< added to offset when not null
  double factor = 1;                      ///< 1 / (1 - p); 0 when p is 1
};

/// The decisions of a mask.
class MaskWords {
 public:
  ROWAN_HOST_DEVICE explicit MaskWords(const MaskArguments& mask)
      : threshold_(mask.threshold),
        seed_(mask.seed),
        offset_(mask.offset + (mask.counter ? static_cast<std::uint64_t>(*mask.counter) : 0)) {}

  /// Bit e tells whether element index + e stays (index is row * columns + column), for e < count <= 8; higher bits are
  /// undefined.
  ROWAN_HOST_DEVICE unsigned keep_bits(std::uint64_t index, int count) const {
    unsigned bits = 0;
    const std::uint64_t first = index / 4, last = (index + static_cast<std::uint64_t>(count) - 1) / 4;
    const auto decide = [this](std::uint32_t word) { return word >= threshold_ ? 1u : 0u; };
#ifdef __CUDA_ARCH__
#pragma unroll 1
#endif
    for (std::uint64_t block = first; block <= last; ++block) {
      const PhiloxBlock drawn = philox(seed_, block, offset_);
      const unsigned four =
          decide(drawn.word[0]) | decide(drawn.word[1]) << 1 | decide(drawn.word[2]) << 2 | decide(drawn.word[3]) << 3;
      bits |= four << (4 * (block - first));
    }
    return bits >> (index % 4);
  }

 private:
  std::uint64_t threshold_;
  std::uint64_t seed_;
  std::uint64_t offset_;
};

/// Walks along the elements of a row on the host, four words at a time.
class MaskCursor {
 public:
  explicit MaskCursor(const MaskArguments& mask) : words_(mask) {}

  /// Whether the element of this index stays. Calls with ascending indices share their words.
  bool keeps(std::uint64_t index) {
    if (index / 4 != block_) {
      block_ = index / 4;
      bits_ = words_.keep_bits(4 * block_, 4);
    }
    return (bits_ >> (index % 4) & 1u) != 0;
  }

 private:
  MaskWords words_;
  std::uint64_t block_ = ~std::uint64_t{0};
  unsigned bits_ = 0;
};

}  // namespace rowan
