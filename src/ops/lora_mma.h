// The streaming kernels of the LoRA primitives (lora_mma.cuh) as lora_cuda.cu calls them.
#pragma once

#include "ops/lora_backend.h"
#include "rowan/core/device.h"

namespace rowan::cuda::lora_mma {

/// 16-bit types on a device with thread block clusters and 227 KiB of shared memory a block.
bool serves(DType dtype, Device device);

std::int64_t shrink_workspace(const LoraShrinkArguments& arguments, Device device);
std::int64_t reduce_workspace(const LoraReduceArguments& arguments, Device device);
std::int64_t both_workspace(const LoraShrinkArguments& shrink, const LoraReduceArguments& reduce, Device device);

void run_shrink(const LoraShrinkArguments& arguments, float* workspace, StreamRef stream);
void run_reduce(const LoraReduceArguments& arguments, float* workspace, StreamRef stream);
void run_both(const LoraShrinkArguments& shrink, const LoraReduceArguments& reduce, float* workspace, StreamRef stream);
void run_expand(const LoraExpandArguments& arguments, StreamRef stream);

}  // namespace rowan::cuda::lora_mma
