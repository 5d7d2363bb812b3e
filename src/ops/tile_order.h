// The order in which blocks take the tiles of a matrix product.
#pragma once

#include <cstdint>

#include "rowan/core/rng.h"

namespace rowan {

struct TilePosition {
  std::int64_t row = 0;
  std::int64_t col = 0;
};

/// Tile number `index` of a grid of tile_rows x tile_cols tiles in grouped order: `group` rows of tiles at a time, down
/// each column of the group before the next column, so that tiles that run together share their inputs in the L2 cache.
/// Every tile comes once for indices 0 to tile_rows * tile_cols - 1. group = 1 is row-major order. This is the order of
/// Triton's matrix multiplication tutorial and of NeMo Automodel's get_pid_coords.
ROWAN_HOST_DEVICE inline TilePosition grouped_tile_order(std::int64_t index, std::int64_t tile_rows,
                                                         std::int64_t tile_cols, std::int64_t group) {
  const std::int64_t tiles_per_group = group * tile_cols;
  const std::int64_t first_row = index / tiles_per_group * group;
  const std::int64_t left = tile_rows - first_row;
  const std::int64_t rows = left < group ? left : group;  // the last group may be smaller
  const std::int64_t within = index % tiles_per_group;
  return {first_row + within % rows, within / rows};
}

}  // namespace rowan
