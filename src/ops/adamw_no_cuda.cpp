// Stands in for adamw_cuda.cu in a build without CUDA.
#include "ops/adamw_backend.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

void adamw(const AdamwBatchArguments&, StreamRef) { throw Error(ErrorKind::kUnsupported, "adamw: built without CUDA"); }

}  // namespace rowan::cuda
