#include "ops/lora_mma.cuh"

namespace rowan::cuda::lora_mma {

template void shrink<__nv_bfloat16>(const LoraShrinkArguments&, const LoraPlan&, float*, cudaStream_t);
template void reduce<__nv_bfloat16>(const LoraReduceArguments&, const LoraPlan&, float*, cudaStream_t);

}  // namespace rowan::cuda::lora_mma
