// Ranks that are threads of one process.
#pragma once

#include <memory>
#include <vector>

#include "rowan/comm/communicator.h"

namespace rowan {

/// One communicator for each of `size` ranks; every one is used by a thread of its own. Sums are taken in the order of
/// ranks, in float64, and rounded once (integers wrap around), so results depend on the inputs alone. Tensors of any
/// device; those on CUDA travel through host memory. Operations are done when they return. For tests, and for ranks on
/// one machine without NCCL. Throws InvalidArgument for a size below 1.
std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size, const CommunicatorOptions& options = {});

}  // namespace rowan
