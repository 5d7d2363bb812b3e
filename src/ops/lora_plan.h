// How the LoRA primitives for 16-bit types are shared out over the blocks of a device: pure functions of the shape and
// the number of multiprocessors, so that equal calls on one kind of device add in one order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace rowan {

/// Blocks that can add up through each other's shared memory on every device with clusters.
inline constexpr int kMostCluster = 8;
inline constexpr std::int64_t kReduceColumns = 256, kReduceRows = 32;  ///< a block's columns; rows of one step
inline constexpr std::int64_t kBothColumns = 512, kBothRows = 32;
inline constexpr std::int64_t kExpandColumns = 256, kExpandRows = 64;

/// Ranks that one block takes: the smallest tile that holds them all, or the largest there is.
constexpr std::int64_t lora_rank_tile(std::int64_t rank) { return rank <= 16 ? 16 : rank <= 32 ? 32 : 64; }
/// Columns that one step of a shrink takes.
constexpr std::int64_t shrink_step(std::int64_t row_tile) { return row_tile >= 128 ? 128 : 256; }
/// Whether shrink and reduce run in one pass; beyond, a block's registers and shared memory do not hold both.
constexpr bool lora_both_fits(std::int64_t rank) { return rank <= 32; }
/// Rows whose sums one block of such a pass keeps.
constexpr std::int64_t both_most_rows(std::int64_t rank) { return 8192 / lora_rank_tile(rank); }

struct LoraPlan {
  std::int64_t tiles = 1;     ///< tiles of the result; in a combined pass: of columns
  std::int64_t parts = 1;     ///< parts of the long sum (shrink: of columns, else of rows)
  std::int64_t length = 0;    ///< elements of the long sum that a part takes; the last parts may be shorter or empty
  int cluster = 1;            ///< blocks that add up among themselves: of neighbouring parts (combined: column tiles)
  std::int64_t row_tile = 0;  ///< shrink: rows of a tile
};

namespace detail {
/// The cluster that `count` neighbouring blocks of `blocks` may form: all of them, or none where clusters would not all
/// run at once. Clusters of more than two blocks do not reach all multiprocessors (120 of 132 on an H200).
constexpr int cluster_of(std::int64_t count, std::int64_t blocks, std::int64_t processors) {
  return count <= 2 || blocks <= processors - processors / 11 ? static_cast<int>(count) : 1;
}
constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
constexpr std::int64_t round_to(std::int64_t a, std::int64_t step) { return divide_up(a, step) * step; }
}  // namespace detail

/// out [rows, rank] from a wide matrix [rows, width]. Of the row tiles and splits into 1, 2, 4 or 8 parts, the one
/// whose busiest multiprocessor moves the fewest bytes: its share of the wide matrix, and of the factor, which every
/// row tile reads again.
inline LoraPlan plan_shrink(std::int64_t rows, std::int64_t width, std::int64_t rank, std::int64_t processors) {
  using namespace detail;
  const std::int64_t rank_tile = lora_rank_tile(rank);
  LoraPlan best;
  std::int64_t best_cost = -1;
  for (const std::int64_t row_tile : {32, 128}) {
    const std::int64_t step = shrink_step(row_tile), tiles = divide_up(rows, row_tile) * divide_up(rank, rank_tile);
    for (std::int64_t parts = 1; parts <= kMostCluster; parts *= 2) {
      const std::int64_t length = round_to(divide_up(width, parts), step);
      const std::int64_t waves = divide_up(tiles * parts, processors);
      const std::int64_t cost = waves * (std::min(row_tile, rows) + std::min(rank_tile, rank)) * length;
      if (best_cost >= 0 && cost >= best_cost) continue;
      best_cost = cost;
      best = {tiles, parts, length, cluster_of(parts, tiles * parts, processors), row_tile};
    }
  }
  return best;
}

/// grad [rank, width] from a wide matrix [rows, width]: 1, 2, 4 or 8 parts by the same rule.
inline LoraPlan plan_reduce(std::int64_t rows, std::int64_t width, std::int64_t rank, std::int64_t processors) {
  using namespace detail;
  LoraPlan best;
  std::int64_t best_cost = -1;
  const std::int64_t tiles = divide_up(width, kReduceColumns) * divide_up(rank, lora_rank_tile(rank));
  for (std::int64_t parts = 1; parts <= kMostCluster; parts *= 2) {
    const std::int64_t length = round_to(divide_up(rows, parts), kReduceRows);
    const std::int64_t cost = divide_up(tiles * parts, processors) * length;
    if (best_cost >= 0 && cost >= best_cost) continue;
    best_cost = cost;
    best = {tiles, parts, length, cluster_of(parts, tiles * parts, processors), 0};
  }
  return best;
}

/// Both from one pass over a wide matrix [rows, width]: as many parts of rows as give the busiest multiprocessor the
/// fewest rows, and for few rows only one, which saves a launch. The column tiles form one cluster where that fits.
inline LoraPlan plan_both(std::int64_t rows, std::int64_t width, std::int64_t rank, std::int64_t processors) {
  using namespace detail;
  LoraPlan plan;
  plan.tiles = divide_up(width, kBothColumns);
  const std::int64_t least = divide_up(rows, both_most_rows(rank)),
                     most = rows <= 128 ? 1 : std::max(least, std::min(divide_up(rows, kBothRows), 4 * least + 16));
  std::int64_t best_cost = -1;
  for (std::int64_t parts = least; parts <= most; ++parts) {
    const std::int64_t length = round_to(divide_up(rows, parts), kBothRows);
    const std::int64_t cost = divide_up(plan.tiles * parts, processors) * length;
    if (best_cost >= 0 && cost >= best_cost) continue;
    best_cost = cost;
    plan.parts = parts, plan.length = length;
  }
  plan.parts = divide_up(rows, plan.length);
  if (plan.tiles <= kMostCluster) plan.cluster = cluster_of(plan.tiles, plan.tiles * plan.parts, processors);
  return plan;
}

/// out [rows, width]: parts of rows, about two blocks a multiprocessor.
inline LoraPlan plan_expand(std::int64_t rows, std::int64_t width, std::int64_t processors) {
  using namespace detail;
  LoraPlan plan;
  plan.tiles = divide_up(width, kExpandColumns);
  plan.length = round_to(divide_up(rows, divide_up(2 * processors, plan.tiles)), kExpandRows);
  plan.parts = divide_up(rows, plan.length);
  return plan;
}

}  // namespace rowan
