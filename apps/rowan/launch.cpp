#include "launch.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <string_view>
#include <thread>
#include <vector>

#include "exit_code.h"
#include "rowan/comm/process_communicator.h"
#include "rowan/core/error.h"
#include "rowan/core/stream.h"
#include "rowan/core/tensor.h"
#include "rowan/ops/tuning.h"

namespace rowan::app {

namespace {

using Clock = std::chrono::steady_clock;

[[noreturn]] void fail_os(const char* what) {
  throw Error(ErrorKind::kIo, fmt::format("ranks: {}: {}", what, std::strerror(errno)));
}

/// A socket that listens on the loopback device: rank 0 inherits it, so that nobody else can take its port.
class Listener {
 public:
  Listener() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    if (fd_ < 0 || bind(fd_, generic, length) != 0 || listen(fd_, SOMAXCONN) != 0 ||
        getsockname(fd_, generic, &length) != 0)
      fail_os("socket");
    port_ = ntohs(address.sin_port);
  }
  ~Listener() { close(fd_); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  int fd() const { return fd_; }
  int port() const { return port_; }

 private:
  int fd_;
  int port_ = 0;
};

/// Strings as execve takes them.
class CStrings {
 public:
  explicit CStrings(std::vector<std::string> texts) : texts_(std::move(texts)) {
    for (std::string& text : texts_) pointers_.push_back(text.data());
    pointers_.push_back(nullptr);
  }
  char** data() { return pointers_.data(); }

 private:
  std::vector<std::string> texts_;
  std::vector<char*> pointers_;
};

std::vector<std::string> own_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(file), {}};
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin < all.size();) {
    const std::size_t end = std::min(all.find('\0', begin), all.size());
    words.push_back(all.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

std::vector<std::string> environment_of(int rank, int ranks, const Listener& listener) {
  std::map<std::string, std::string> own = {{"RANK", std::to_string(rank)},
                                            {"WORLD_SIZE", std::to_string(ranks)},
                                            {"LOCAL_RANK", std::to_string(rank)},
                                            {"LOCAL_WORLD_SIZE", std::to_string(ranks)},
                                            {"MASTER_ADDR", "127.0.0.1"},
                                            {"MASTER_PORT", std::to_string(listener.port())},
                                            {"TORCHELASTIC_USE_AGENT_STORE", "False"},
                                            {"TORCHELASTIC_RUN_ID", fmt::format("rowan-{}", getpid())}};
  if (rank == 0) own["ROWAN_LISTENING_FD"] = std::to_string(listener.fd());
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    own["OMP_NUM_THREADS"] = std::to_string(std::max(1, cores / ranks));
  }
  std::vector<std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    if (own.count(std::string(text.substr(0, text.find('=')))) == 0) all.emplace_back(text);
  }
  for (const auto& [name, value] : own) all.push_back(name + "=" + value);
  return all;
}

/// Processes that end with the object.
class Ranks {
 public:
  explicit Ranks(int ranks) {
    sigemptyset(&signals_);
    for (const int signal : {SIGCHLD, SIGINT, SIGTERM, SIGHUP}) sigaddset(&signals_, signal);
    sigprocmask(SIG_BLOCK, &signals_, &old_signals_);
    const Listener listener;
    CStrings command(own_command());
    for (int rank = 0; rank < ranks; ++rank) start(rank, ranks, command, listener);
  }
  ~Ranks() {
    tell(SIGKILL);
    while (running() > 0) reap(0);
    sigprocmask(SIG_SETMASK, &old_signals_, nullptr);
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  /// The status of the rank that failed first; 0 where none did.
  int wait() {
    constexpr std::chrono::seconds kTimeToNotice{5}, kTimeToSave{60}, kTimeToEnd{5};
    bool interrupted = false;
    int told = 0;  // the last signal of our own
    while (running() > 0) {
      const timespec pause{0, 100000000};
      siginfo_t info;
      const int signal = sigtimedwait(&signals_, &info, &pause);
      if (signal > 0 && signal != SIGCHLD) {
        interrupted = true;
        tell(signal);
      }
      reap(WNOHANG);
      if (status_ == 0) continue;
      const auto limit = told == 0 ? (interrupted ? kTimeToSave : kTimeToNotice) : kTimeToEnd;
      if (Clock::now() - failed_ < limit) continue;
      told = told == 0 ? SIGTERM : SIGKILL;
      tell(told);
      failed_ = Clock::now();
    }
    return status_;
  }

 private:
  void start(int rank, int ranks, CStrings& command, const Listener& listener) {
    CStrings environment(environment_of(rank, ranks, listener));
    const pid_t launcher = getpid();
    const pid_t pid = fork();
    if (pid < 0) fail_os("fork");
    if (pid > 0) {
      pids_.push_back(pid);
      return;
    }
    // A terminal's signals come through the launcher alone; its end, however it comes, is this process's too.
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != launcher) _exit(1);
    if (rank == 0) fcntl(listener.fd(), F_SETFD, 0);
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (null >= 0) dup2(null, STDIN_FILENO);
    sigprocmask(SIG_SETMASK, &old_signals_, nullptr);
    execve("/proc/self/exe", command.data(), environment.data());
    _exit(127);
  }

  int running() const {
    return static_cast<int>(std::count_if(pids_.begin(), pids_.end(), [](pid_t p) { return p > 0; }));
  }

  void tell(int signal) const {
    for (const pid_t pid : pids_) {
      if (pid > 0) kill(pid, signal);
    }
  }

  void reap(int options) {
    for (std::size_t rank = 0; rank < pids_.size(); ++rank) {
      int status = 0;
      if (pids_[rank] <= 0 || waitpid(pids_[rank], &status, options) != pids_[rank]) continue;
      pids_[rank] = 0;
      const int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
      if (code == 0 || status_ != 0) continue;
      status_ = code;
      failed_ = Clock::now();
      if (WIFSIGNALED(status))
        std::cerr << fmt::format("rowan: rank {} was ended by signal {} ({})\n", rank, WTERMSIG(status),
                                 strsignal(WTERMSIG(status)));
    }
  }

  sigset_t signals_{}, old_signals_{};
  std::vector<pid_t> pids_;  // by rank; 0 once it has ended
  int status_ = 0;
  Clock::time_point failed_;
};

Device device_of(const std::string& text, const RankEnvironment& environment) {
  const bool any = text == "cuda" || (text == "auto" && cuda_device_count() > 0);
  if (!any) return parse_device(text);
  const int devices = cuda_device_count();
  if (environment.local_rank >= devices)
    throw Error(
        ErrorKind::kInvalidArgument,
        fmt::format("device: expected a CUDA device for local rank {}, got {} in all; cuda:N puts all ranks on one",
                    environment.local_rank, devices));
  return parse_device(fmt::format("cuda:{}", environment.local_rank));
}

/// Ranks that each measured would sum in different orders, and write different files.
void share_tuning(const RankPlace& place) {
  Communicator& communicator = *place.communicator;
  const Stream stream(place.device);
  const std::string own = place.is_first() ? export_tuning() : std::string();
  Tensor size = Tensor::from_host(Shape{1}, std::vector<std::int32_t>{static_cast<std::int32_t>(own.size())}, stream);
  communicator.broadcast(size, 0, stream);
  communicator.synchronize(stream);
  std::vector<std::int32_t> bytes(static_cast<std::size_t>(size.to_vector<std::int32_t>(stream)[0]));
  std::copy(own.begin(), own.end(), bytes.begin());
  if (bytes.empty()) return adopt_tuning("");
  Tensor text = Tensor::from_host(Shape{static_cast<std::int64_t>(bytes.size())}, bytes, stream);
  communicator.broadcast(text, 0, stream);
  communicator.synchronize(stream);
  const std::vector<std::int32_t> all = text.to_vector<std::int32_t>(stream);
  adopt_tuning(std::string(all.begin(), all.end()));
}

}  // namespace

bool starts_ranks(const RankOptions& options) {
  if (options.ranks <= 1) return false;
  const std::optional<RankEnvironment> environment = rank_environment();
  return !environment || environment->size == 1;  // a shell that srun started is a job of one task
}

void start_ranks(const RankOptions& options) {
  const int status = Ranks(options.ranks).wait();
  if (status != 0) throw RanksFailed{status};
}

RankPlace join_ranks(const RankOptions& options) {
  const std::optional<RankEnvironment> environment = rank_environment();
  if (!environment || environment->size == 1)
    return {parse_device(options.device), std::make_unique<SingleCommunicator>()};
  if (options.ranks > 0 && options.ranks != environment->size)
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("ranks: expected {}, as the launcher started, got {}", environment->size, options.ranks));
  const Device device = device_of(options.device, *environment);
  CommunicatorOptions communicator;
  communicator.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(options.comm_timeout * 1000));
  communicator.check_operations = options.check_collectives;
  RankPlace place{device, make_process_communicator(*environment, device, communicator)};
  if (device.is_cuda()) share_tuning(place);
  return place;
}

void run_alike(const RankPlace& place, const std::function<void()>& work) {
  std::exception_ptr own;
  int status = kFailed;
  try {
    work();
  } catch (const Error& error) {
    own = std::current_exception();
    status = exit_code(error.kind());
  } catch (...) {
    own = std::current_exception();
  }
  Communicator& communicator = *place.communicator;
  if (communicator.size() > 1) {
    const Stream stream(place.device);
    const std::int32_t failed = own ? status : 0;
    const std::vector<std::int32_t> statuses{failed, communicator.rank() == 0 ? failed : 0};
    Tensor all = Tensor::from_host(Shape{2}, statuses, stream);
    communicator.all_reduce(all, ReduceOp::kMax, stream);
    communicator.synchronize(stream);
    const std::vector<std::int32_t> any = all.to_vector<std::int32_t>(stream);
    const bool first_tells = any[1] != 0 && communicator.rank() != 0;
    if (any[0] != 0 && (first_tells || !own)) throw RanksFailed{any[1] != 0 ? any[1] : any[0]};
  }
  if (own) std::rethrow_exception(own);
}

std::string rank_prefix() {
  try {
    const auto environment = rank_environment();
    if (environment && environment->size > 1) return fmt::format("rank {}: ", environment->rank);
  } catch (const Error&) {  // the message is about it
  }
  return "";
}

}  // namespace rowan::app
