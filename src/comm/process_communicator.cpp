#include "rowan/comm/process_communicator.h"

#include <cstdlib>

#include "comm/host_communicator.h"
#include "comm/mesh.h"
#include "comm/nccl_communicator.h"
#include "core/check.h"

namespace rowan {

namespace {

using detail::Collective;
using detail::require;

std::optional<std::string> variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

int parse(const char* name, const std::string& text, int least, int most) {
  int value = 0;
  const bool digits = !text.empty() && text.size() <= 9 && text.find_first_not_of("0123456789") == std::string::npos;
  if (digits) value = std::stoi(text);
  require(digits && value >= least && value <= most, "{}: expected a whole number from {} to {}, got \"{}\"", name,
          least, most, text);
  return value;
}

int number(const char* name, int least, int most, std::optional<int> missing = {}) {
  const std::optional<std::string> text = variable(name);
  if (!text && missing) return *missing;
  require(text.has_value(), "{}: expected a number from the launcher, got nothing", name);
  return parse(name, *text, least, most);
}

/// The variables that a launcher sets.
struct Launcher {
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
  const char* run_id;
};
constexpr Launcher kLaunchers[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
     "PMIX_NAMESPACE"},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID"},
};

/// Ranks over TCP, sums on the host.
class SocketCommunicator final : public detail::HostCommunicator {
 public:
  SocketCommunicator(const RankEnvironment& environment, const CommunicatorOptions& options)
      : HostCommunicator(environment.rank, environment.size), mesh_(environment, options.timeout) {}

 private:
  void exchange(const Collective& what, std::span<const ConstBytes> send, std::span<const Bytes> receive) override {
    mesh_.exchange(what, send, receive);
  }

  detail::Mesh mesh_;
};

}  // namespace

std::optional<RankEnvironment> rank_environment() {
  constexpr int kMostRanks = 65536;
  for (const Launcher& launcher : kLaunchers) {
    if (!variable(launcher.rank) || !variable(launcher.size)) continue;
    RankEnvironment e;
    e.size = number(launcher.size, 1, kMostRanks);
    e.rank = number(launcher.rank, 0, e.size - 1);
    e.local_rank = number(launcher.local_rank, 0, e.size - 1, e.rank);
    e.run_id = variable(launcher.run_id).value_or("");
    if (const auto address = variable("MASTER_ADDR")) {
      e.address = *address;
    } else {
      require(
          e.size == 1 || variable(launcher.local_size) == variable(launcher.size),
          "MASTER_ADDR: expected the address of rank 0's machine, got nothing, and not all {} ranks are on this one",
          e.size);
    }
    e.port = number("MASTER_PORT", 1, 65535, e.port);
    if (variable("TORCHELASTIC_USE_AGENT_STORE") == "True") e.port = e.port == 65535 ? 1024 : e.port + 1;
    if (e.rank == 0 && variable("ROWAN_LISTENING_FD")) e.listening_fd = number("ROWAN_LISTENING_FD", 3, 1 << 20);
    return e;
  }
  return std::nullopt;
}

std::unique_ptr<Communicator> make_process_communicator(const RankEnvironment& environment, Device device,
                                                        const CommunicatorOptions& options) {
  if (environment.size == 1) return std::make_unique<SingleCommunicator>();
  if (device.is_cuda()) return detail::make_nccl_communicator(environment, device, options);
  return std::make_unique<SocketCommunicator>(environment, options);
}

}  // namespace rowan
