// Checked CUDA calls. Only for files that are compiled with CUDA (.cu and *_cuda.cpp).
#pragma once

#include <cuda_runtime.h>

#include "rowan/core/error.h"
#include "rowan/core/stream.h"

namespace rowan::cuda {

/// Throws Cuda (OutOfMemory for cudaErrorMemoryAllocation) naming `what` when `status` is not success, and clears
/// CUDA's last error, so that a later check does not report it again.
void check(cudaError_t status, const char* what);

/// To be called after each kernel launch: reports launch errors under the operation's name.
inline void check_launch(const char* op) { check(cudaGetLastError(), op); }

/// Makes the device current while it lives.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

inline cudaStream_t to_cuda(StreamRef stream) { return static_cast<cudaStream_t>(stream.handle()); }

/// Multiprocessors of a device, read once.
int multiprocessor_count(Device device);

/// Whether a device and this build have Hopper's own instructions (sm_90a).
bool has_warpgroup_products(Device device);

}  // namespace rowan::cuda
