// Commands that run on several ranks.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "rowan/comm/communicator.h"
#include "rowan/core/device.h"

namespace rowan::app {

/// What --ranks, --device and --comm-timeout say.
struct RankOptions {
  int ranks = 0;  ///< 0: as the launcher's environment says, else one
  std::string device = "auto";
  double comm_timeout = 60;        ///< seconds
  bool check_collectives = false;  ///< compare operations, counts and dtypes before each collective
};

/// The program is to end with this status: some rank did.
struct RanksFailed {
  int status = 1;
};

/// Whether this process is to start ranks, not to be one: more than one is wanted, and no launcher started it.
bool starts_ranks(const RankOptions& options);

/// Starts this program's command line once more for each rank, on this machine, and waits for all. SIGINT, SIGTERM and
/// SIGHUP are passed on. When a rank fails the others have a few seconds to notice it and end, and are ended then. No
/// rank outlives this process, even where it is killed. Throws RanksFailed with the status of the rank that failed
/// first (128 + N where signal N ended it).
void start_ranks(const RankOptions& options);

/// A command's place among the ranks of its run.
struct RankPlace {
  Device device;
  std::unique_ptr<Communicator> communicator;

  bool is_first() const { return communicator->rank() == 0; }
};

/// Joins the run that the environment names (rowan/comm/process_communicator.h), or is its only rank. "cuda" and "auto"
/// mean the CUDA device of the local rank's number, "cuda:N" the same one for all ranks. Throws InvalidArgument where
/// the environment has another number of ranks than the options, or there are too few devices.
RankPlace join_ranks(const RankOptions& options);

/// Runs work that fails alike on all ranks, such as reading input, and lets one of them tell: throws `work`'s exception
/// on rank 0, or where rank 0 has none, and RanksFailed with its status on the others. A collective operation; `work`
/// holds none.
void run_alike(const RankPlace& place, const std::function<void()>& work);

/// "rank 1: " for messages of a rank among several, else nothing.
std::string rank_prefix();

}  // namespace rowan::app
