// The launchers of lora_mma.cuh, a type and an operation at a time: they are compiled side by side, in
// lora_mma_TYPE_{read,write}.cu. Only for files that are compiled with CUDA.
#pragma once

#include <cuda_runtime.h>

#include "ops/lora_backend.h"
#include "ops/lora_plan.h"

namespace rowan::cuda::lora_mma {

/// Floats of partial results.
inline std::int64_t shrink_floats(const LoraShrinkArguments& a, std::int64_t groups) {
  return groups > 1 ? groups * a.rows * detail::round_to(a.rank, lora_rank_tile(a.rank)) : 0;
}
inline std::int64_t reduce_floats(const LoraReduceArguments& a, std::int64_t groups) {
  return groups > 1 ? groups * a.rank * a.width : 0;
}

template <class T>
void shrink(const LoraShrinkArguments& arguments, const LoraPlan& plan, float* workspace, cudaStream_t stream);
template <class T>
void reduce(const LoraReduceArguments& arguments, const LoraPlan& plan, float* workspace, cudaStream_t stream);
template <class T>
void both(const LoraShrinkArguments& shrink, const LoraReduceArguments& reduce, const LoraPlan& plan, float* workspace,
          cudaStream_t stream);
template <class T>
void expand(const LoraExpandArguments& arguments, const LoraPlan& plan, cudaStream_t stream);

}  // namespace rowan::cuda::lora_mma
