// This test program as one rank of a run, started by other cases and by tests/nccl.sh with a role in its environment.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <thread>

#include "catch.h"
#include "comm/rank_checks.h"
#include "rowan/comm/process_communicator.h"

namespace rowan::test {

namespace {

std::string variable(const char* name, const char* missing) {
  const char* const value = std::getenv(name);
  return value == nullptr ? missing : value;
}

void say(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

const std::map<std::string, RankCheck>& checks() {
  static const std::map<std::string, RankCheck> all = {{"collectives", check_collectives},
                                                       {"sharded_muown", check_sharded_muown},
                                                       {"data_parallel", check_data_parallel},
                                                       {"column_parallel", check_column_parallel}};
  return all;
}

/// Goes on until somebody ends it: 1 MiB, so that data is under way when a signal comes.
void reduce_for_ever(Communicator& communicator, StreamRef stream) {
  Tensor data = Tensor::zeros({1 << 18}, DType::kFloat32, stream);
  for (int i = 0;; ++i) {
    communicator.all_reduce(data, ReduceOp::kSum, stream);
    communicator.synchronize(stream);
    if (i == 20) say("reducing");
  }
}

/// Rank 1 disagrees on a count.
void differ(Communicator& communicator, StreamRef stream) {
  Tensor data = Tensor::zeros({communicator.rank() == 1 ? 999 : 1000}, DType::kFloat32, stream);
  communicator.all_reduce(data, ReduceOp::kSum, stream);
  communicator.synchronize(stream);
}

/// Rank 1 leaves in good order while the others want more; or by an exception of its own.
void leave(Communicator& communicator, StreamRef stream, bool by_exception) {
  communicator.barrier(stream);
  if (communicator.rank() == 1) {
    if (by_exception) throw std::runtime_error("its own reason");
    return;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  communicator.barrier(stream);
}

void run_role(const std::string& role, Communicator& communicator, StreamRef stream, Faults& faults) {
  if (role == "loop") return reduce_for_ever(communicator, stream);
  if (role == "differ") return differ(communicator, stream);
  if (role == "leave") return leave(communicator, stream, false);
  if (role == "throw") return leave(communicator, stream, true);
  if (role == "all") {
    for (const auto& [name, check] : checks()) check(communicator, stream, faults);
  } else {
    checks().at(role)(communicator, stream, faults);
  }
}

}  // namespace

TEST_CASE("one rank of a run", "[.rank]") {
  const std::string role = variable("ROWAN_TEST_ROLE", "");
  if (role == "die first") raise(SIGKILL);
  const auto environment = rank_environment();
  REQUIRE(environment.has_value());
  const Device device = parse_device(variable("ROWAN_TEST_DEVICE", "cpu"));
  CommunicatorOptions options;
  options.timeout = std::chrono::milliseconds(std::stoi(variable("ROWAN_TEST_TIMEOUT_MS", "30000")));
  options.check_operations = variable("ROWAN_TEST_CHECK_OPERATIONS", "0") == "1";
  Faults faults;
  try {
    const Stream stream(device);
    const auto communicator = make_process_communicator(*environment, device, options);
    run_role(role, *communicator, stream, faults);
  } catch (const std::exception& error) {
    say(error.what());  // Catch2 would break it into lines
    throw;
  }
  INFO(faults.text());
  CHECK(faults.empty());
}

}  // namespace rowan::test
