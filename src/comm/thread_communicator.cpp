#include "rowan/comm/thread_communicator.h"

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <string>

#include "comm/host_communicator.h"
#include "core/check.h"

namespace rowan {

namespace {

using detail::Collective;

/// Where the threads meet. An exchange has two phases: all ranks post their buffers, then each copies what is its own
/// out of the others'. A rank may leave in the first phase, when it fails; in the second it waits for the others, who
/// read its memory.
class MeetingPoint {
 public:
  using Bytes = std::span<std::byte>;
  using ConstBytes = std::span<const std::byte>;

  MeetingPoint(int size, std::chrono::milliseconds timeout)
      : timeout_(timeout), posts_(static_cast<std::size_t>(size)), states_(posts_.size(), State::kAway) {}

  void exchange(int rank, const Collective& what, std::span<const ConstBytes> send, std::span<const Bytes> receive) {
    std::unique_lock lock(mutex_);
    if (!failure_.empty()) throw Error(ErrorKind::kComm, failure_);
    const auto own = static_cast<std::size_t>(rank);
    posts_[own] = {what, send, receive};
    states_[own] = State::kPosted;
    if (++posted_ == posts_.size()) {
      check();
      all_posted_ = failure_.empty();
      changed_.notify_all();
    } else {
      fail_if_left();
      const auto come = [&] { return all_posted_ || !failure_.empty(); };
      if (!changed_.wait_for(lock, timeout_, come)) fail_late(what);
    }
    if (!failure_.empty()) throw Error(ErrorKind::kComm, failure_);

    const std::uint64_t round = round_;
    lock.unlock();
    for (std::size_t p = 0; p < posts_.size(); ++p) {
      if (p != own && !receive[p].empty())
        std::memcpy(receive[p].data(), posts_[p].send[own].data(), receive[p].size());
    }
    lock.lock();
    if (++copied_ == posts_.size()) {
      posted_ = copied_ = 0;
      all_posted_ = false;
      std::fill(states_.begin(), states_.end(), State::kAway);
      ++round_;
      changed_.notify_all();
    } else {
      changed_.wait(lock, [&] { return round_ != round; });
    }
  }

  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    states_[static_cast<std::size_t>(rank)] = State::kLeft;
    if (posted_ > 0) fail_if_left();
  }

 private:
  enum class State { kAway, kPosted, kLeft };
  struct Post {
    Collective what;
    std::span<const ConstBytes> send;
    std::span<const Bytes> receive;
  };

  void fail(const std::string& why) {
    if (failure_.empty()) failure_ = why;
    changed_.notify_all();
  }

  std::vector<int> ranks_in(State state) const {
    std::vector<int> ranks;
    for (std::size_t r = 0; r < states_.size(); ++r) {
      if (states_[r] == state) ranks.push_back(static_cast<int>(r));
    }
    return ranks;
  }

  void fail_if_left() {
    const std::vector<int> gone = ranks_in(State::kLeft);
    if (!gone.empty()) fail(fmt::format("communicator: {} left while others waited", detail::rank_list(gone)));
  }

  void fail_late(const Collective& what) {
    fail(fmt::format("communicator: {} did not come to {} within {:.1f} s", detail::rank_list(ranks_in(State::kAway)),
                     to_string(what), std::chrono::duration<double>(timeout_).count()));
  }

  void check() {
    std::vector<Collective> whats;
    for (const Post& post : posts_) whats.push_back(post.what);
    if (const std::string text = detail::difference(whats); !text.empty()) return fail("communicator: " + text);
    for (std::size_t p = 0; p < posts_.size(); ++p) {
      for (std::size_t q = 0; q < posts_.size(); ++q) {
        const std::size_t sent = posts_[p].send[q].size(), expected = posts_[q].receive[p].size();
        if (p != q && sent != expected) {
          return fail(fmt::format("communicator: rank {} sends {} bytes to rank {}, which expects {}, in {}", p, sent,
                                  q, expected, to_string(posts_[p].what)));
        }
      }
    }
  }

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Post> posts_;
  std::vector<State> states_;
  std::size_t posted_ = 0, copied_ = 0;
  bool all_posted_ = false;
  std::uint64_t round_ = 0;
  std::string failure_;  // set once, for good
};

class ThreadCommunicator final : public detail::HostCommunicator {
 public:
  ThreadCommunicator(int rank, int size, std::shared_ptr<MeetingPoint> meeting)
      : HostCommunicator(rank, size), meeting_(std::move(meeting)) {}
  ~ThreadCommunicator() override { meeting_->leave(rank()); }

 private:
  void exchange(const Collective& what, std::span<const ConstBytes> send, std::span<const Bytes> receive) override {
    meeting_->exchange(rank(), what, send, receive);
  }

  std::shared_ptr<MeetingPoint> meeting_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size, const CommunicatorOptions& options) {
  detail::require(size >= 1, "make_thread_communicators: expected one rank or more, got {}", size);
  const auto meeting = std::make_shared<MeetingPoint>(size, options.timeout);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<ThreadCommunicator>(r, size, meeting));
  return ranks;
}

}  // namespace rowan
