// Stands in for symmetric_product_cuda.cu in a build without CUDA.
#include "ops/symmetric_product_backend.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

namespace {
[[noreturn]] void unsupported() { throw Error(ErrorKind::kUnsupported, "newton_schulz: built without CUDA"); }
}  // namespace

bool symmetric_product_pays(const SymmetricProductArguments&, StreamRef) { unsupported(); }
std::int64_t symmetric_product_workspace(StreamRef) { unsupported(); }
void symmetric_product(const SymmetricProductArguments&, void*, StreamRef) { unsupported(); }

}  // namespace rowan::cuda
