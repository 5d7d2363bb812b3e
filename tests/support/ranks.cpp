#include "support/ranks.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <exception>
#include <filesystem>
#include <memory>
#include <thread>

#include "catch.h"
#include "comm/socket.h"
#include "rowan/comm/thread_communicator.h"

namespace rowan::test {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

void Faults::expect(bool condition, const std::string& what) {
  if (condition) return;
  const std::lock_guard lock(mutex_);
  texts_.push_back(what);
}

std::string Faults::text() const {
  std::string all;
  for (const std::string& text : texts_) all += text + '\n';
  return all;
}

std::vector<std::string> outcomes_on_threads(int size, const CommunicatorOptions& options,
                                             const std::function<void(Communicator&)>& f) {
  auto communicators = make_thread_communicators(size, options);
  std::vector<std::string> outcomes(communicators.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < communicators.size(); ++r) {
    threads.emplace_back([&, r] {
      const std::unique_ptr<Communicator> own = std::move(communicators[r]);
      try {
        f(*own);
      } catch (const std::exception& error) {
        outcomes[r] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

void check_on_threads(int size, const RankCheck& check, Device device) {
  Faults faults;
  const auto outcomes = outcomes_on_threads(size, {}, [&](Communicator& communicator) {
    const Stream stream(device);
    check(communicator, stream, faults);
  });
  for (std::size_t r = 0; r < outcomes.size(); ++r)
    faults.expect(outcomes[r].empty(), "rank " + std::to_string(r) + ": " + outcomes[r]);
  INFO(faults.text());
  CHECK(faults.empty());
}

Processes::~Processes() {
  for (Process& process : running_) {
    if (!process.ended) {
      kill(process.pid, SIGKILL);
      waitpid(process.pid, nullptr, 0);
    }
    close(process.output);
  }
}

std::size_t Processes::start(const std::vector<std::string>& command, const Environment& environment) {
  std::vector<std::string> variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (environment.count(text.substr(0, text.find('='))) == 0) variables.push_back(text);
  }
  for (const auto& [name, value] : environment) variables.push_back(name + "=" + value);
  std::vector<char*> arguments, variable_pointers;
  for (const std::string& text : command) arguments.push_back(const_cast<char*>(text.c_str()));
  for (const std::string& text : variables) variable_pointers.push_back(const_cast<char*>(text.c_str()));
  arguments.push_back(nullptr);
  variable_pointers.push_back(nullptr);

  int ends[2];
  REQUIRE(pipe2(ends, O_CLOEXEC | O_NONBLOCK) == 0);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 1);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 2);
  Process process;
  const int status =
      posix_spawn(&process.pid, command[0].c_str(), &actions, nullptr, arguments.data(), variable_pointers.data());
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  REQUIRE(status == 0);
  process.output = ends[0];
  process.begin = Clock::now();
  running_.push_back(process);
  return running_.size() - 1;
}

void Processes::read_output(Process& process) {
  char buffer[4096];
  ssize_t count = 0;
  while ((count = read(process.output, buffer, sizeof buffer)) > 0)
    process.text.append(buffer, static_cast<std::size_t>(count));
}

bool Processes::says(std::size_t index, const std::string& text, milliseconds within) {
  const Clock::time_point deadline = Clock::now() + within;
  while (Clock::now() < deadline) {
    read_output(running_[index]);
    if (running_[index].text.find(text) != std::string::npos) return true;
    std::this_thread::sleep_for(milliseconds(5));
  }
  return false;
}

Processes::Outcome Processes::wait(std::size_t index, milliseconds within) {
  Process& process = running_[index];
  const Clock::time_point deadline = Clock::now() + within;
  while (!process.ended && Clock::now() < deadline) {
    read_output(process);
    int status = 0;
    if (waitpid(process.pid, &status, WNOHANG) == process.pid) {
      process.ended = true;
      process.status = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    } else {
      std::this_thread::sleep_for(milliseconds(5));
    }
  }
  read_output(process);
  return {process.status, std::chrono::duration<double>(Clock::now() - process.begin).count(), process.text};
}

std::vector<std::string> rank_command() {
  return {std::filesystem::read_symlink("/proc/self/exe").string(), "[.rank]"};
}

Processes::Environment rank_variables(const std::string& role, int rank, int size, int port) {
  return {{"ROWAN_TEST_ROLE", role},
          {"RANK", std::to_string(rank)},
          {"LOCAL_RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)},
          {"OMP_NUM_THREADS", "1"}};
}

int free_port() { return detail::port_of(detail::listen_at("127.0.0.1", 0)); }

SilentPort::SilentPort() : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  REQUIRE(bind(socket_, any, length) == 0);
  REQUIRE(getsockname(socket_, any, &length) == 0);
  port_ = ntohs(address.sin_port);
}
SilentPort::~SilentPort() { close(socket_); }

}  // namespace rowan::test
