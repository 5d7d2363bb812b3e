#include "ops/lora_mma.cuh"

namespace rowan::cuda::lora_mma {

template void shrink<__half>(const LoraShrinkArguments&, const LoraPlan&, float*, cudaStream_t);
template void reduce<__half>(const LoraReduceArguments&, const LoraPlan&, float*, cudaStream_t);

}  // namespace rowan::cuda::lora_mma
