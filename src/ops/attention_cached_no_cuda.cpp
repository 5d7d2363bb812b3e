// attention_cached's CUDA backend in a build without CUDA.
#include "ops/attention_cached_backend.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

void attention_cached(const AttentionCachedArguments&, StreamRef) {
  throw Error(ErrorKind::kUnsupported, "attention_cached: built without CUDA");
}

}  // namespace rowan::cuda
