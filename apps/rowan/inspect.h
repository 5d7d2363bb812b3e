// What a safetensors file, a model directory or an adapter directory holds.
#pragma once

#include <string>

namespace rowan::app {

struct InspectOptions {
  std::string path;
  bool json = false;
};

/// Checks the path as loading would, short of reading tensors, and prints names, dtypes, shapes and sizes. Throws
/// Format when it is not sound.
void run_inspect(const InspectOptions& options);

}  // namespace rowan::app
