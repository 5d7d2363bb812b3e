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

/// Walks along the elements of a row, computing four random words at a time.
class MaskCursor {
 public:
  ROWAN_HOST_DEVICE explicit MaskCursor(const MaskArguments& mask)
      : threshold_(mask.threshold),
        seed_(mask.seed),
        offset_(mask.offset + (mask.counter ? static_cast<std::uint64_t>(*mask.counter) : 0)) {}

  /// Whether the element of this index (row * columns + column) stays. Adjacent calls with ascending indices share
  /// their words.
  ROWAN_HOST_DEVICE bool keeps(std::uint64_t index) {
    if (index / 4 != block_index_) {
      block_index_ = index / 4;
      block_ = philox(seed_, block_index_, offset_);
    }
    return block_.word[index % 4] >= threshold_;
  }

 private:
  std::uint64_t threshold_;
  std::uint64_t seed_;
  std::uint64_t offset_;
  std::uint64_t block_index_ = ~std::uint64_t{0};
  PhiloxBlock block_{};
};

}  // namespace rowan
