// The devices a test can use.
#pragma once

#include <cstdio>

#include "rowan/core/device.h"
#include "rowan/core/stream.h"

namespace rowan::test {

/// True when a [gpu] case can run; otherwise prints the line that ctest counts as a skip. Use: `if (!have_gpu())
/// return;`.
inline bool have_gpu() {
  if (cuda_device_count() > 0) return true;
  std::puts("SKIPPED: no CUDA device");
  return false;
}

}  // namespace rowan::test
