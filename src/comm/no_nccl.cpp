// Stands in for NCCL in a build without it.
#include "comm/nccl_communicator.h"
#include "rowan/core/error.h"

namespace rowan::detail {

std::unique_ptr<Communicator> make_nccl_communicator(const RankEnvironment&, Device, const CommunicatorOptions&) {
  throw Error(ErrorKind::kUnsupported, "communicator: this rowan was built without NCCL, which ranks on CUDA need");
}

}  // namespace rowan::detail
