#include "ops/lora_mma.cuh"

namespace rowan::cuda::lora_mma {

template void both<__half>(const LoraShrinkArguments&, const LoraReduceArguments&, const LoraPlan&, float*,
                           cudaStream_t);
template void expand<__half>(const LoraExpandArguments&, const LoraPlan&, cudaStream_t);

}  // namespace rowan::cuda::lora_mma
