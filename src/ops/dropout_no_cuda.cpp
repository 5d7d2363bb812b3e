// Stands in for dropout_cuda.cu in a build without CUDA.
#include "ops/dropout_backend.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

void dropout(const MatrixRef&, const MaskArguments&, const MatrixRef&, StreamRef) {
  throw Error(ErrorKind::kUnsupported, "dropout: built without CUDA");
}

}  // namespace rowan::cuda
