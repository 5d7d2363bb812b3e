// Ranks that are processes, on one machine or several.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "rowan/comm/communicator.h"

namespace rowan {

/// A process's place in a run, as its launcher tells it.
struct RankEnvironment {
  int rank = 0;
  int size = 1;
  int local_rank = 0;  ///< among the ranks of this machine
  std::string address = "127.0.0.1";
  int port = 29500;       ///< where rank 0 listens
  int listening_fd = -1;  ///< rank 0: a socket that already listens there, inherited from the launcher
  std::string run_id;     ///< ranks of one run share it; others are turned away
};

/// Reads the place from the environment, in this order:
///   RANK, WORLD_SIZE, LOCAL_RANK                      torchrun, and `rowan --ranks`
///   OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK          mpirun of Open MPI
///   SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID srun
/// with MASTER_ADDR (without it: this machine, if all ranks are on it) and MASTER_PORT (29500). Under torchrun, whose
/// agent listens on MASTER_PORT itself where TORCHELASTIC_USE_AGENT_STORE is True, rank 0 takes the port above it.
/// Nothing where none of the three is set. Throws InvalidArgument naming the variable that is missing or wrong.
std::optional<RankEnvironment> rank_environment();

/// Meets the other ranks of the run and returns this one's communicator: NCCL for a CUDA device, TCP connections
/// between all ranks for the CPU. Rank 0 listens at `address`:`port`; every rank also listens on a port of its own, at
/// the address from which it reaches rank 0. All of a run's ranks are to be on like machines, in a network that is
/// trusted: nothing is encrypted.
///
/// CPU: sums are taken in the order of ranks, in float64, and rounded once; operations are done when they return.
/// CUDA: operations are asynchronous; waits poll and never block in CUDA behind a collective. Ranks that share a GPU
/// (for tests) get an NCCL_HOSTID of their own, so that NCCL takes them.
///
/// A rank that ends without destroying its communicator, or stops for the length of the timeout, makes all others throw
/// Comm (or Nccl) naming it; so does one that throws while its communicator lives. Throws Comm where not all ranks come
/// in time, naming those that did not, Io where the operating system refuses a socket, Unsupported for CUDA in a build
/// without NCCL.
std::unique_ptr<Communicator> make_process_communicator(const RankEnvironment& environment, Device device,
                                                        const CommunicatorOptions& options = {});

}  // namespace rowan
