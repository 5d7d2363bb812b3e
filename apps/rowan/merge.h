// An adapter merged into its model.
#pragma once

#include <string>

namespace rowan::app {

struct MergeOptions {
  std::string model;
  std::string adapter;
  std::string out;
};

/// Writes the merged model directory and prints what it holds.
void run_merge(const MergeOptions& options);

}  // namespace rowan::app
