#include "rowan/core/error.h"
#include "timing.h"

namespace rowan::bench {

std::unique_ptr<Batch> make_batch(const Timed&, int, int, StreamRef) {
  throw Error(ErrorKind::kUnsupported, "rowan-bench: built without CUDA");
}

}  // namespace rowan::bench
