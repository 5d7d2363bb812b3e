// Connections between the processes of a run: one for data and one for word of each other's state, a pair of ranks.
#pragma once

#include <cstddef>
#include <exception>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/collective.h"
#include "comm/socket.h"
#include "rowan/comm/process_communicator.h"
#include "rowan/core/error.h"

namespace rowan::detail {

/// Every rank holds a connection to every other, so that a rank which fails is seen by all at once, and by its own
/// silence rather than that of a neighbour. A thread sends a heartbeat with the operation the rank is at, and hears
/// those of the others, also while the owner computes: who is stopped is told from who is busy.
///
/// The first rank that meets a failure tells all others which rank it was; every one throws the same text.
class Mesh {
 public:
  /// Meets the other ranks (rowan/comm/process_communicator.h).
  Mesh(const RankEnvironment& environment, std::chrono::milliseconds timeout);
  /// Says good-bye, unless an exception is under way: then the others learn that this rank failed.
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }
  std::chrono::milliseconds timeout() const noexcept { return timeout_; }

  /// From now on this rank is at `what`.
  void come_to(const Collective& what);

  /// To be called while waiting in `what`: throws Comm where the run has failed, or a rank that is needed for it is
  /// gone.
  void check(const Collective& what);

  /// Fails because `what` took longer than the timeout: names those of `waited_for` that have stopped, or differ, or
  /// have not come to it.
  [[noreturn]] void fail_late(const Collective& what, std::vector<int> waited_for);

  /// Tells all ranks that the run has failed, and throws. What failed before is thrown instead.
  [[noreturn]] void fail(ErrorKind kind, const std::string& why);

  /// receive[p] here = send[rank()] of rank p for every other rank p. Throws where ranks differ in `what` or in sizes.
  void exchange(const Collective& what, std::span<const std::span<const std::byte>> send,
                std::span<const std::span<std::byte>> receive);

 private:
  struct Frame;
  struct Exchange;
  struct Peer {
    Socket control, data;
    std::vector<std::byte> outgoing, incoming;  // of control
    Clock::time_point heard;
    Collective at;
    bool has_left = false;      // with a good-bye, after `at`
    bool is_lost = false;       // without
    Clock::time_point lost_at;  // time for word of who failed first to arrive
  };

  void meet_as_first(const RankEnvironment& environment, Clock::time_point deadline);
  void meet(const RankEnvironment& environment, Clock::time_point deadline);
  void connect_peers(std::span<const std::pair<std::string, int>> places, const Socket& listener, std::uint64_t run,
                     Clock::time_point deadline);

  void monitor();
  void hear(std::size_t peer);
  void handle(std::size_t peer, const Frame& frame);
  void tell(Peer& peer, const Frame& frame);
  void flush(Peer& peer);
  void tell_all(const Frame& frame, std::chrono::milliseconds patience);
  static void lose(Peer& peer);
  [[noreturn]] void throw_failure();

  int rank_, size_;
  std::chrono::milliseconds timeout_, heartbeat_;
  std::vector<Peer> peers_;  // by rank; this rank's own is not used
  std::mutex mutex_;         // of everything in peers_ but data, and of what follows
  Collective at_;
  std::string failure_;  // set once, for good
  ErrorKind failure_kind_ = ErrorKind::kComm;
  bool stopping_ = false;
  int exceptions_ = std::uncaught_exceptions();
  Socket wake_;  // an eventfd that ends the monitor's wait
  std::thread monitor_;
};

}  // namespace rowan::detail
