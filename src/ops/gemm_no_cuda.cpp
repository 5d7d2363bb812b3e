// Stands in for gemm_cuda.cpp in a build without CUDA.
#include "ops/gemm_backend.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

void gemm(const GemmArguments&, StreamRef) { throw Error(ErrorKind::kUnsupported, "gemm: built without CUDA"); }

}  // namespace rowan::cuda
