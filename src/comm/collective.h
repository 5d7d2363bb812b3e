// What ranks tell each other about an operation.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "rowan/comm/communicator.h"
#include "rowan/core/dtype.h"

namespace rowan::detail {

enum class CollectiveKind : std::int32_t {
  kNone,
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kBroadcast,
  kBarrier,
};

/// One call of a communicator. Equal on all ranks of a group that is in step; sent between them as it is.
struct Collective {
  std::int64_t sequence = 0;  ///< calls so far, from 1
  CollectiveKind kind = CollectiveKind::kNone;
  std::int32_t root = 0;
  std::int64_t count = 0;  ///< elements of the shorter tensor; 0 for all_to_all, whose counts differ by pair
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kFloat32;
  friend bool operator==(const Collective&, const Collective&) = default;
};

/// "all_reduce(sum) of 12 float32 as operation 7".
std::string to_string(const Collective& collective);

/// Where ranks (by index) are not at the same operation: names those that differ from what most do, the ranks before
/// them where as many do the one as the other. Empty where all are equal.
std::string difference(std::span<const Collective> ranks);

/// "rank 1", "ranks 1 and 3".
std::string rank_list(std::span<const int> ranks);

/// out[i] = inputs[0][i] op inputs[1][i] op …, in float64, rounded once; integers in int64. out may be one of the
/// inputs.
void reduce_in_order(DType dtype, ReduceOp op, std::span<const std::byte* const> inputs, std::int64_t count,
                     std::byte* out);

}  // namespace rowan::detail
