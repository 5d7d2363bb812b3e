#pragma once

#include <cstdint>
#include <ostream>
#include <string>

namespace rowan::app {

/// What the library was built with, and the devices it can use.
void print_info(std::ostream& out);

struct InfoOptions {
  std::string plan;   ///< "ROWS,COLUMNS" or "ROWS,COLUMNS,RANKS"; empty: print_info is wanted
  std::string ranks;  ///< "A..B"
  std::int64_t count = 1;
  double bandwidth = 200;  ///< GB/s
  double latency = 10;     ///< microseconds
};

/// What the schemes of split weights cost on one number of ranks, or on a row of them, and which is chosen
/// (rowan/optim/shard_cost.h). Throws InvalidArgument for numbers that are not.
void print_plan(const InfoOptions& options, std::ostream& out);

}  // namespace rowan::app
