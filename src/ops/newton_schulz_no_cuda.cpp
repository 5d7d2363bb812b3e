// Stands in for newton_schulz_cuda.cu in a build without CUDA.
#include "ops/newton_schulz_backend.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

namespace {
[[noreturn]] void unsupported() { throw Error(ErrorKind::kUnsupported, "newton_schulz: built without CUDA"); }
}  // namespace

std::int64_t inverse_norms_workspace(const InverseNormArguments&) { unsupported(); }
void inverse_norms(const InverseNormArguments&, double*, StreamRef) { unsupported(); }
void newton_schulz_load(const NewtonSchulzMatrix&, const double*, double, const NewtonSchulzMatrix&, StreamRef) {
  unsupported();
}
void newton_schulz_add_identity(const NewtonSchulzMatrix&, double, StreamRef) { unsupported(); }
void newton_schulz_store(const NewtonSchulzMatrix&, double, const NewtonSchulzMatrix&, StreamRef) { unsupported(); }
int skinny_side(const NewtonSchulzMatrix&) { unsupported(); }
std::int64_t skinny_gram_blocks(const NewtonSchulzMatrix&) { unsupported(); }
std::int64_t skinny_apply_blocks(const NewtonSchulzMatrix&) { unsupported(); }
void newton_schulz_skinny(const SkinnyTable&, const NewtonSchulzMatrix&, const NewtonSchulzMatrix&, double, double,
                          const NewtonSchulzSteps&, StreamRef) {
  unsupported();
}
std::int64_t newton_schulz_skinny_workspace(const NewtonSchulzMatrix&) { unsupported(); }
void newton_schulz_skinny(const GramFloatArguments&, float*, StreamRef) { unsupported(); }

}  // namespace rowan::cuda
