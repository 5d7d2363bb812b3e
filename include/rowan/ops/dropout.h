// Dropout with masks that are computed where they are needed, never stored.
#pragma once

#include <cstdint>

#include "rowan/core/tensor.h"

namespace rowan {

/// A mask over an [M, C] matrix: element (i, j) is kept when the random word of index i * C + j is at least p * 2^32;
/// kept elements are multiplied by 1 / (1 - p), dropped ones become exactly 0, whatever they were. The word is word
/// index % 4 of philox(seed, index / 4, offset), so that every operation that gets the same mask draws the same
/// pattern, on either device.
struct DropoutMask {
  double p = 0;  ///< in [0, 1]; 1 drops everything
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  /// Optional int64 [1] on the device of the operation, added to offset when the kernel runs: a recorded step draws a
  /// new mask each replay.
  Tensor counter = {};
};

/// y = mask o x for x, y [M, C] of one floating dtype, each with unit column stride and any row stride; one rounding.
/// Its own backward: dx = mask o dy. Writes y, which may be x itself (the same view). Throws InvalidArgument when
/// shapes, dtypes, strides or devices do not fit or p is outside [0, 1].
void dropout_forward(const Tensor& x, const DropoutMask& mask, Tensor& y, StreamRef stream);

}  // namespace rowan
