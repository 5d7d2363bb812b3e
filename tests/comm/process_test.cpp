// Ranks as processes over TCP: that they meet, exchange, and end when one of them fails.
#include <signal.h>

#include <cstdlib>

#include "catch.h"
#include "comm/socket.h"
#include "rowan/comm/process_communicator.h"
#include "rowan/core/error.h"
#include "support/ranks.h"

namespace rowan::test {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kTimeout{2000};
/// Within which everybody has to be gone: the timeout, and time to start and end on a busy machine.
constexpr milliseconds kSoon{15000};

/// Ranks 0 to size - 1 of one run, each in the role that is given for it or the common one.
std::vector<std::size_t> start_ranks(Processes& processes, const std::string& role, int size,
                                     const std::map<int, std::string>& other_roles = {}, int port = free_port()) {
  std::vector<std::size_t> started;
  for (int r = 0; r < size; ++r) {
    const auto other = other_roles.find(r);
    auto variables = rank_variables(other == other_roles.end() ? role : other->second, r, size, port);
    variables["ROWAN_TEST_TIMEOUT_MS"] = std::to_string(kTimeout.count());
    started.push_back(processes.start(rank_command(), variables));
  }
  return started;
}

/// Ranks other than `victim` end with a status that is not 0, saying `named`.
void check_others_name(Processes& processes, const std::vector<std::size_t>& ranks, int victim,
                       const std::string& named) {
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (static_cast<int>(r) == victim) continue;
    const auto outcome = processes.wait(ranks[r], kSoon);
    CAPTURE(r, outcome.output);
    CHECK(outcome.status > 0);
    CHECK(outcome.output.find(named) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("ranks as processes exchange every dtype and shape, and hold the same bits", "[dist]") {
  for (const int size : {2, 4}) {
    Processes processes;
    for (const std::size_t rank : start_ranks(processes, "collectives", size)) {
      const auto outcome = processes.wait(rank, milliseconds(60000));
      CAPTURE(size, rank, outcome.output);
      CHECK(outcome.status == 0);
    }
  }
}

TEST_CASE("when a rank is killed inside a collective, the others end and name it", "[dist]") {
  Processes processes;
  const auto ranks = start_ranks(processes, "loop", 3);
  REQUIRE(processes.says(ranks[1], "reducing", kSoon));
  kill(processes.pid(ranks[1]), SIGKILL);
  check_others_name(processes, ranks, 1, "rank 1 ended");
  CHECK(processes.wait(ranks[1], kSoon).status == 128 + SIGKILL);
}

TEST_CASE("when a rank is stopped inside a collective, the others end at the deadline and name it", "[dist]") {
  for (const int victim : {0, 2}) {
    Processes processes;
    const auto ranks = start_ranks(processes, "loop", 3);
    const auto stopped = ranks[static_cast<std::size_t>(victim)];
    REQUIRE(processes.says(stopped, "reducing", kSoon));
    kill(processes.pid(stopped), SIGSTOP);
    check_others_name(processes, ranks, victim, "rank " + std::to_string(victim) + " stopped");
    // It learns what became of the others when it goes on.
    kill(processes.pid(stopped), SIGCONT);
    CHECK(processes.wait(stopped, kSoon).status > 0);
  }
}

TEST_CASE("when a rank dies before the ranks have met, the others end at the deadline and name it", "[dist]") {
  Processes processes;
  const auto ranks = start_ranks(processes, "collectives", 3, {{2, "die first"}});
  check_others_name(processes, ranks, 2, "rank 2 did not come");
}

TEST_CASE("when rank 0 dies before the ranks have met, the others end at the deadline", "[dist]") {
  Processes processes;
  const SilentPort port;
  const auto ranks = start_ranks(processes, "collectives", 2, {{0, "die first"}}, port.port());
  check_others_name(processes, ranks, 0, "nobody answers at 127.0.0.1");
}

TEST_CASE("when a rank differs in a count, all processes end and name it", "[dist]") {
  Processes processes;
  check_others_name(processes, start_ranks(processes, "differ", 3), -1, "rank 1 called all_reduce(sum) of 999 float32");
}

TEST_CASE("when a rank leaves in good order or by an exception, those that wait for it end and name it", "[dist]") {
  {
    Processes processes;
    check_others_name(processes, start_ranks(processes, "leave", 3), 1, "rank 1 left before barrier as operation 2");
  }
  Processes processes;
  check_others_name(processes, start_ranks(processes, "throw", 3), 1, "rank 1 failed");
}

TEST_CASE("two processes that claim one rank are refused, naming it", "[dist]") {
  Processes processes;
  const int port = free_port();
  std::vector<std::size_t> started;
  for (const int r : {0, 1, 1})
    started.push_back(processes.start(rank_command(), rank_variables("collectives", r, 3, port)));
  check_others_name(processes, started, -1, "rank");
  CHECK(processes.wait(started[0], kSoon).output.find("another rank 1") != std::string::npos);
}

TEST_CASE("strangers at rank 0's port do not disturb a run", "[dist]") {
  Processes processes;
  const int port = free_port();
  const std::size_t first = processes.start(rank_command(), rank_variables("collectives", 0, 2, port));
  const auto deadline = detail::Clock::now() + kSoon;
  const detail::Socket silent = detail::connect_to("127.0.0.1", port, deadline);
  const detail::Socket loud = detail::connect_to("127.0.0.1", port, deadline);
  const std::string request = "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: everything and more\r\n\r\n";
  detail::send_all(loud, std::as_bytes(std::span(request)), deadline);
  auto other_run = rank_variables("collectives", 1, 2, port);
  other_run["TORCHELASTIC_RUN_ID"] = "another";
  const std::size_t stray = processes.start(rank_command(), other_run);
  CHECK(processes.wait(stray, kSoon).status > 0);
  const std::size_t second = processes.start(rank_command(), rank_variables("collectives", 1, 2, port));
  for (const std::size_t rank : {first, second}) {
    const auto outcome = processes.wait(rank, milliseconds(60000));
    CAPTURE(outcome.output);
    CHECK(outcome.status == 0);
  }
}

// The environment

namespace {

/// Sets variables while it lives, and hides every launcher's others.
class WithVariables {
 public:
  explicit WithVariables(const std::map<std::string, std::string>& variables) {
    for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                             "TORCHELASTIC_USE_AGENT_STORE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_PROCID",
                             "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"}) {
      const char* const value = std::getenv(name);
      if (value != nullptr) saved_[name] = value;
      unsetenv(name);
      names_.push_back(name);
    }
    for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
  }
  ~WithVariables() {
    for (const std::string& name : names_) unsetenv(name.c_str());
    for (const auto& [name, value] : saved_) setenv(name.c_str(), value.c_str(), 1);
  }
  WithVariables(const WithVariables&) = delete;
  WithVariables& operator=(const WithVariables&) = delete;

 private:
  std::vector<std::string> names_;
  std::map<std::string, std::string> saved_;
};

std::string refusal(const std::map<std::string, std::string>& variables) {
  const WithVariables set(variables);
  try {
    rank_environment();
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kInvalidArgument);
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("a rank's place is read as torchrun, mpirun and srun give it") {
  {
    const WithVariables none({});
    CHECK_FALSE(rank_environment().has_value());
  }
  {
    const WithVariables torchrun({{"RANK", "3"},
                                  {"WORLD_SIZE", "8"},
                                  {"LOCAL_RANK", "1"},
                                  {"MASTER_ADDR", "node7"},
                                  {"MASTER_PORT", "1234"},
                                  {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
    const auto e = rank_environment();
    REQUIRE(e.has_value());
    CHECK(e->rank == 3);
    CHECK(e->size == 8);
    CHECK(e->local_rank == 1);
    CHECK(e->address == "node7");
    CHECK(e->port == 1235);
  }
  {
    const WithVariables mpirun({{"OMPI_COMM_WORLD_RANK", "1"},
                                {"OMPI_COMM_WORLD_SIZE", "2"},
                                {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}});
    const auto e = rank_environment();
    REQUIRE(e.has_value());
    CHECK(e->rank == 1);
    CHECK(e->size == 2);
    CHECK(e->address == "127.0.0.1");
    CHECK(e->port == 29500);
  }
  {
    const WithVariables srun({{"SLURM_PROCID", "5"},
                              {"SLURM_STEP_NUM_TASKS", "16"},
                              {"SLURM_LOCALID", "1"},
                              {"SLURM_STEP_TASKS_PER_NODE", "4(x4)"},
                              {"MASTER_ADDR", "10.0.0.1"}});
    const auto e = rank_environment();
    REQUIRE(e.has_value());
    CHECK(e->rank == 5);
    CHECK(e->size == 16);
    CHECK(e->local_rank == 1);
  }
}

TEST_CASE("a launcher's variables that are wrong or missing are refused by name") {
  CHECK(refusal({{"RANK", "8"}, {"WORLD_SIZE", "8"}}).find("RANK") != std::string::npos);
  CHECK(refusal({{"RANK", "-1"}, {"WORLD_SIZE", "8"}}).find("\"-1\"") != std::string::npos);
  CHECK(refusal({{"RANK", "0"}, {"WORLD_SIZE", "two"}}).find("WORLD_SIZE") != std::string::npos);
  CHECK(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_WORLD_SIZE", "1"}}).find("MASTER_ADDR") !=
        std::string::npos);
  CHECK(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "70000"}})
            .find("MASTER_PORT") != std::string::npos);
}

}  // namespace rowan::test
