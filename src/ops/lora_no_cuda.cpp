// Stands in for lora_cuda.cu in a build without CUDA.
#include "ops/lora_backend.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

namespace {
[[noreturn]] void unsupported() { throw Error(ErrorKind::kUnsupported, "lora: built without CUDA"); }
}  // namespace

LoraSplit lora_shrink_split(const LoraShrinkArguments&, Device) { unsupported(); }
LoraSplit lora_reduce_split(const LoraReduceArguments&, Device) { unsupported(); }
void lora_shrink(const LoraShrinkArguments&, const LoraSplit&, float*, StreamRef) { unsupported(); }
void lora_expand(const LoraExpandArguments&, StreamRef) { unsupported(); }
void lora_reduce(const LoraReduceArguments&, const LoraSplit&, float*, StreamRef) { unsupported(); }
void prefer_plain_lora_kernels(bool) noexcept {}
bool lora_shares_pass(const LoraShrinkArguments&, Device) { unsupported(); }
std::int64_t lora_shrink_reduce_workspace(const LoraShrinkArguments&, const LoraReduceArguments&, Device) {
  unsupported();
}
void lora_shrink_reduce(const LoraShrinkArguments&, const LoraReduceArguments&, float*, StreamRef) { unsupported(); }

}  // namespace rowan::cuda
