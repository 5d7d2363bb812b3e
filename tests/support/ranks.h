// Several ranks in one test: as threads, or as processes of this test program.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "rowan/comm/communicator.h"

namespace rowan::test {

/// What ranks found wrong. Catch2's own checks are not for several threads.
class Faults {
 public:
  void expect(bool condition, const std::string& what);
  bool empty() const { return texts_.empty(); }
  /// One a line.
  std::string text() const;

 private:
  std::mutex mutex_;
  std::vector<std::string> texts_;
};

/// A check that every rank runs alike, on any communicator and device.
using RankCheck = std::function<void(Communicator&, StreamRef, Faults&)>;

/// Runs a check on `size` threads with a stream each. An exception is a fault.
void check_on_threads(int size, const RankCheck& check, Device device = Device::cpu());

/// Calls f on `size` threads, one a rank; an exception ends its thread, and its text is that rank's result.
std::vector<std::string> outcomes_on_threads(int size, const CommunicatorOptions& options,
                                             const std::function<void(Communicator&)>& f);

/// Processes that are ended and waited for with the object.
class Processes {
 public:
  using Environment = std::map<std::string, std::string>;
  struct Outcome {
    int status = -1;  ///< exit status, or 128 + signal; -1: still running at the deadline
    double seconds = 0;
    std::string output;  ///< stdout and stderr
  };

  Processes() = default;
  ~Processes();
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;

  /// Starts a program with more variables in its environment. Returns its index.
  std::size_t start(const std::vector<std::string>& command, const Environment& environment);
  pid_t pid(std::size_t index) const { return running_[index].pid; }
  /// Whether its output holds `text` within the time.
  bool says(std::size_t index, const std::string& text, std::chrono::milliseconds within);
  Outcome wait(std::size_t index, std::chrono::milliseconds within);

 private:
  struct Process {
    pid_t pid = -1;
    int output = -1;
    std::string text;
    bool ended = false;
    int status = -1;
    std::chrono::steady_clock::time_point begin;
  };
  static void read_output(Process& process);

  std::vector<Process> running_;
};

/// This test program as rank `rank` of `size`, in a role of tests/comm/rank_main_test.cpp.
std::vector<std::string> rank_command();
Processes::Environment rank_variables(const std::string& role, int rank, int size, int port);
/// A TCP port of the loopback device that nobody listens at.
int free_port();

/// A port of the loopback device that is taken, so that other programs cannot listen at it, and at which nobody listens.
class SilentPort {
 public:
  SilentPort();
  ~SilentPort();
  SilentPort(const SilentPort&) = delete;
  SilentPort& operator=(const SilentPort&) = delete;
  int port() const noexcept { return port_; }

 private:
  int socket_ = -1, port_ = 0;
};

}  // namespace rowan::test
