// What the attention kernels of all dtypes share: which tile a block works on, and tiles in shared memory.
#pragma once

#include <cstdint>

#include "ops/attention_backend.h"
#include "ops/head_view.cuh"

namespace rowan::cuda {

namespace {

__device__ inline float infinity() { return __int_as_float(0x7F800000); }

/// The maximum to subtract from a row's scores: where all are -infinity, 0 keeps the exponentials 0 instead of NaN.
__device__ inline float finite_maximum(float maximum) { return maximum == -infinity() ? 0.0f : maximum; }

/// Rows [first, first + kRows) of one sequence and one head.
struct Tile {
  std::int64_t begin = 0;   // the sequence's first token
  std::int32_t length = 0;  // the sequence's tokens
  std::int32_t first = 0;   // within the sequence; the tile is empty when it is not below length
  std::int32_t head = 0;
};

__host__ __device__ inline std::int64_t tiles_of(std::int64_t max_length, std::int64_t rows) {
  return (max_length + rows - 1) / rows;
}

/// The tile of this block. Blocks start in the order of their index: the tiles with the most work come first, which are
/// a sequence's last rows for queries and its first rows for keys.
template <int kRows>
__device__ Tile locate_tile(const AttentionArguments& a, std::int64_t heads, bool last_first) {
  const std::int64_t pairs = heads * a.sequences, pair = blockIdx.x % pairs, index = blockIdx.x / pairs;
  const std::int64_t sequence = pair / heads;
  Tile tile;
  // Values that do not describe sequences within the tokens are cut to ones that do.
  const std::int64_t begin = min(max(std::int64_t{a.starts[sequence]}, std::int64_t{0}), a.tokens);
  const std::int64_t end = min(std::int64_t{a.starts[sequence + 1]}, min(a.tokens, begin + a.max_length));
  tile.begin = begin;
  tile.length = static_cast<std::int32_t>(max(end - begin, std::int64_t{0}));
  const std::int64_t at = last_first ? tiles_of(a.max_length, kRows) - 1 - index : index;
  tile.first = static_cast<std::int32_t>(at) * kRows;
  tile.head = static_cast<std::int32_t>(pair % heads);
  return tile;
}

/// Copies rows [first, first + kRows) of a head into a tile of row stride kStride, kDim columns; what lies beyond the
/// sequence or beyond head_dim becomes zero. `packs`: addresses and head_dim allow 16-byte loads.
template <class T, int kRows, int kDim, int kStride, int kThreads>
__device__ void load_tile(T* tile, const HeadView& view, const Tile& from, std::int32_t first, std::int32_t head,
                          std::int32_t head_dim, bool packs) {
  constexpr int kPack = kPackOf<T>, kPacks = kDim / kPack;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kPacks; i += kThreads) {
    const int row = i / kPacks, column = i % kPacks * kPack;
    Pack<T, kPack> pack;
    if (first + row < from.length && packs && column < head_dim) {
      pack = load_pack<T, kPack>(head_pointer<T>(view, from.begin + first + row, head) + column);
    } else {
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        const bool inside = first + row < from.length && column + c < head_dim;
        pack.value[c] =
            inside ? head_pointer<T>(view, from.begin + first + row, head)[column + c] : from_float<T>(0.0f);
      }
    }
    store_pack<T, kPack>(tile + row * kStride + column, pack);
  }
}

}  // namespace

}  // namespace rowan::cuda
