// Stands in for muon_cuda.cu in a build without CUDA.
#include "ops/muon_backend.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

void muon_prepare(const MuonPrepareArguments&, StreamRef) {
  throw Error(ErrorKind::kUnsupported, "muon_prepare: built without CUDA");
}

void muon_finish(const MuonFinishArguments&, StreamRef) {
  throw Error(ErrorKind::kUnsupported, "muon_finish: built without CUDA");
}

}  // namespace rowan::cuda
