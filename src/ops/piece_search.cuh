// One launch over many tensors: the grid counts chunks through all of them, and each block finds its tensor.
#pragma once

#include <cstdint>

namespace rowan::cuda {

/// Index of the last piece whose first_chunk is <= chunk. Pieces without chunks share first_chunk with their successor
/// and are passed over.
template <class Piece>
__device__ std::int64_t find_piece(const Piece* pieces, std::int64_t count, std::int64_t chunk) {
  std::int64_t low = 0, high = count;  // the answer lies in [low, high)
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    if (pieces[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

/// Memory offset of element i (row-major count) of rows that lie `stride` apart.
__device__ inline std::int64_t row_offset(std::int64_t i, std::int64_t cols, std::int64_t stride) {
  if (stride == cols) return i;
  std::int64_t row;
  if ((i | cols) >> 32 == 0) {  // 64-bit division costs several times as much
    row = static_cast<std::uint32_t>(i) / static_cast<std::uint32_t>(cols);
  } else {
    row = i / cols;
  }
  return row * stride + (i - row * cols);
}

}  // namespace rowan::cuda
