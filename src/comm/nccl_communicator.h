// The communicator over NCCL: nccl_communicator_nccl.cpp, or no_nccl.cpp in a build without it.
#pragma once

#include <memory>

#include "rowan/comm/process_communicator.h"

namespace rowan::detail {

std::unique_ptr<Communicator> make_nccl_communicator(const RankEnvironment& environment, Device device,
                                                     const CommunicatorOptions& options);

}  // namespace rowan::detail
