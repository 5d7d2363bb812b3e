// Stands in for gram_sum_cuda.cu in a build without CUDA.
#include "ops/gram_sum_backend.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

namespace {
[[noreturn]] void unsupported() { throw Error(ErrorKind::kUnsupported, "newton_schulz: built without CUDA"); }
}  // namespace

void gram_largest(const NewtonSchulzMatrix&, float*, StreamRef) { unsupported(); }
void gram_powers(const float*, std::int64_t, double*, StreamRef) { unsupported(); }
void gram_norms(const GramNormArguments&, StreamRef) { unsupported(); }

}  // namespace rowan::cuda
