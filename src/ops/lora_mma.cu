#include "ops/lora_mma.h"

#include <map>
#include <mutex>

#include "core/cuda_check.h"
#include "ops/device_types.cuh"
#include "ops/lora_mma_launch.h"

namespace rowan::cuda::lora_mma {

namespace {

constexpr int kSharedBytes = 227 * 1024;  ///< what the largest of the kernels may take

bool has_clusters(Device device) {
  static std::mutex mutex;
  static std::map<int, bool> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(device.index);
  if (found != known.end()) return found->second;
  int major = 0, shared = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index), "lora: compute capability");
  check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index), "lora: shared memory");
  return known[device.index] = major >= 9 && shared >= kSharedBytes;
}

template <class F>
void with_half_type(DType dtype, F&& f) {
  if (dtype == DType::kBFloat16) {
    f(DeviceTypeTag<__nv_bfloat16>());
  } else {
    f(DeviceTypeTag<__half>());
  }
}

LoraPlan plan(const LoraShrinkArguments& a, Device device) {
  return plan_shrink(a.rows, a.width, a.rank, multiprocessor_count(device));
}
LoraPlan plan(const LoraReduceArguments& a, Device device) {
  return plan_reduce(a.rows, a.width, a.rank, multiprocessor_count(device));
}
LoraPlan both_plan(const LoraShrinkArguments& a, Device device) {
  return plan_both(a.rows, a.width, a.rank, multiprocessor_count(device));
}

}  // namespace

bool serves(DType dtype, Device device) { return size_of(dtype) == 2 && has_clusters(device); }

std::int64_t shrink_workspace(const LoraShrinkArguments& a, Device device) {
  const LoraPlan p = plan(a, device);
  return shrink_floats(a, p.parts / p.cluster);
}

std::int64_t reduce_workspace(const LoraReduceArguments& a, Device device) {
  const LoraPlan p = plan(a, device);
  return reduce_floats(a, p.parts / p.cluster);
}

std::int64_t both_workspace(const LoraShrinkArguments& s, const LoraReduceArguments& r, Device device) {
  const LoraPlan p = both_plan(s, device);
  return shrink_floats(s, p.tiles / p.cluster) + reduce_floats(r, p.parts);
}

void run_shrink(const LoraShrinkArguments& a, float* workspace, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  with_half_type(a.dtype, [&](auto tag) {
    shrink<typename decltype(tag)::type>(a, plan(a, stream.device()), workspace, to_cuda(stream));
  });
}

void run_reduce(const LoraReduceArguments& a, float* workspace, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  with_half_type(a.dtype, [&](auto tag) {
    reduce<typename decltype(tag)::type>(a, plan(a, stream.device()), workspace, to_cuda(stream));
  });
}

void run_both(const LoraShrinkArguments& s, const LoraReduceArguments& r, float* workspace, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  with_half_type(s.dtype, [&](auto tag) {
    both<typename decltype(tag)::type>(s, r, both_plan(s, stream.device()), workspace, to_cuda(stream));
  });
}

void run_expand(const LoraExpandArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  const LoraPlan p = plan_expand(a.rows, a.width, multiprocessor_count(stream.device()));
  with_half_type(a.dtype, [&](auto tag) { expand<typename decltype(tag)::type>(a, p, to_cuda(stream)); });
}

}  // namespace rowan::cuda::lora_mma
