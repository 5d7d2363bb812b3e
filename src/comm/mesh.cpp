#include "comm/mesh.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "core/check.h"

namespace rowan::detail {

namespace {

using std::chrono::milliseconds;

constexpr char kMagic[8] = {'r', 'o', 'w', 'a', 'n', ' ', '1', '\0'};
/// How long a rank that is gone may be the victim of another, whose word is on its way.
constexpr milliseconds kHearsay{300};
/// How long a connection that is no rank's may hold up the others.
constexpr milliseconds kStrangerPatience{1000};

enum class Channel : std::int32_t { kJoin, kControl, kData };

/// The first message of every connection.
struct Hello {
  char magic[8];
  std::uint64_t run;
  std::int32_t rank, size;
  Channel channel;
  std::int32_t port;  // where the sender listens
};

/// Rank 0's answer to kJoin: where a rank listens, for each rank; or why there is no run.
struct Place {
  char address[64];
  std::int32_t port;
};
struct Answer {
  char failure[512];
};

std::uint64_t hash(const std::string& text) {  // FNV-1a
  std::uint64_t h = 14695981039346656037u;
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 1099511628211u;
  return h;
}

void set_text(std::span<char> to, const std::string& text) {
  const std::size_t length = std::min(text.size(), to.size() - 1);
  std::copy_n(text.begin(), length, to.begin());
  to[length] = '\0';
}

double seconds(Clock::duration d) { return std::chrono::duration<double>(d).count(); }

Hello hello_of(const RankEnvironment& e, std::uint64_t run, Channel channel, int port) {
  Hello hello{};
  std::memcpy(hello.magic, kMagic, sizeof kMagic);
  hello.run = run;
  hello.rank = e.rank;
  hello.size = e.size;
  hello.channel = channel;
  hello.port = port;
  return hello;
}

/// Reads the first message of a connection; nothing where it is not one of this run's.
std::optional<Hello> read_hello(const Socket& socket, std::uint64_t run, int size, Clock::time_point deadline) {
  Hello hello{};
  if (!receive_all(socket, writable_bytes_of(hello), std::min(deadline, Clock::now() + kStrangerPatience)))
    return std::nullopt;
  const bool ours = std::memcmp(hello.magic, kMagic, sizeof kMagic) == 0 && hello.run == run && hello.size == size &&
                    0 <= hello.rank && hello.rank < size;
  return ours ? std::optional(hello) : std::nullopt;
}

}  // namespace

struct Mesh::Frame {
  enum class Type : std::int32_t { kHeartbeat, kFailure, kGoodbye };
  Type type = Type::kHeartbeat;
  ErrorKind kind = ErrorKind::kComm;
  Collective at;
  char text[424] = {};
};

// Meeting

Mesh::Mesh(const RankEnvironment& environment, milliseconds timeout)
    : rank_(environment.rank),
      size_(environment.size),
      timeout_(timeout),
      heartbeat_(std::clamp(timeout / 10, milliseconds(20), milliseconds(1000))),
      peers_(static_cast<std::size_t>(environment.size)) {
  require(size_ >= 1 && 0 <= rank_ && rank_ < size_, "rendezvous: expected a rank in [0, {}), got {}", size_, rank_);
  const Clock::time_point deadline = Clock::now() + timeout;
  if (size_ > 1) {
    if (rank_ == 0) {
      meet_as_first(environment, deadline);
    } else {
      meet(environment, deadline);
    }
  }
  for (Peer& peer : peers_) peer.heard = Clock::now();
  wake_ = Socket(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  require(wake_.is_open(), "rendezvous: expected an eventfd, got {}", std::strerror(errno));
  if (size_ > 1) monitor_ = std::thread([this] { monitor(); });
}

void Mesh::meet_as_first(const RankEnvironment& environment, Clock::time_point deadline) {
  const std::uint64_t run = hash(environment.run_id);
  const Socket listener = environment.listening_fd >= 0 ? Socket(environment.listening_fd)
                                                        : listen_at(environment.address, environment.port);
  std::vector<Place> places(peers_.size());
  std::set<int> missing;
  for (int r = 1; r < size_; ++r) missing.insert(r);
  const auto refuse = [&](const std::string& why) {
    Answer answer{};
    set_text(answer.failure, why);
    for (const Peer& peer : peers_) {
      if (peer.control.is_open()) send_all(peer.control, bytes_of(answer), Clock::now() + kHearsay);
    }
    detail::fail(ErrorKind::kComm, "{}", why);
  };
  while (!missing.empty()) {
    std::optional<Socket> socket = accept_from(listener, deadline);
    if (!socket) {
      refuse(fmt::format("rendezvous: {} did not come within {:.1f} s",
                         rank_list(std::vector<int>(missing.begin(), missing.end())), seconds(timeout_)));
    }
    const std::optional<Hello> hello = read_hello(*socket, run, size_, deadline);
    if (!hello || hello->channel != Channel::kJoin) continue;
    const auto r = static_cast<std::size_t>(hello->rank);
    if (missing.erase(hello->rank) == 0)
      refuse(fmt::format("rendezvous: expected one process a rank, got another rank {}", hello->rank));
    set_text(places[r].address, peer_address(*socket));
    places[r].port = hello->port;
    peers_[r].control = std::move(*socket);
  }
  for (std::size_t r = 1; r < peers_.size(); ++r) {
    const Answer answer{};
    if (!send_all(peers_[r].control, bytes_of(answer), deadline) ||
        !send_all(peers_[r].control, std::as_bytes(std::span(places)), deadline))
      refuse(fmt::format("rendezvous: rank {} left", r));
  }
  connect_peers({}, listener, run, deadline);
}

void Mesh::meet(const RankEnvironment& environment, Clock::time_point deadline) {
  const std::uint64_t run = hash(environment.run_id);
  const Socket listener = listen_at(environment.address, 0);
  const int port = port_of(listener);
  Socket& first = peers_[0].control;
  first = connect_to(environment.address, environment.port, deadline);
  Answer answer{};
  std::vector<Place> places(peers_.size());
  // Rank 0 gives up when its own time is over, and says why: leave it time to.
  const Clock::time_point patience = Clock::now() + timeout_ + kStrangerPatience;
  const bool answered = send_all(first, bytes_of(hello_of(environment, run, Channel::kJoin, port)), deadline) &&
                        receive_all(first, writable_bytes_of(answer), patience);
  answer.failure[sizeof answer.failure - 1] = '\0';
  if (answered && answer.failure[0] != '\0') detail::fail(ErrorKind::kComm, "{}", answer.failure);
  if (!answered || !receive_all(first, std::as_writable_bytes(std::span(places)), patience))
    detail::fail(ErrorKind::kComm, "rendezvous: rank 0 at {} port {} left, or does not know rank {} of {}",
                 environment.address, environment.port, rank_, size_);
  std::vector<std::pair<std::string, int>> targets{{peer_address(first), environment.port}};
  for (int r = 1; r < rank_; ++r) {
    Place& place = places[static_cast<std::size_t>(r)];
    place.address[sizeof place.address - 1] = '\0';
    // A rank beside rank 0 is known by a loopback address, which means another machine here.
    const bool elsewhere = is_loopback(place.address) && !is_loopback(targets[0].first);
    targets.emplace_back(elsewhere ? targets[0].first : std::string(place.address), place.port);
  }
  connect_peers(targets, listener, run, deadline);
}

void Mesh::connect_peers(std::span<const std::pair<std::string, int>> places, const Socket& listener, std::uint64_t run,
                         Clock::time_point deadline) {
  RankEnvironment own;
  own.rank = rank_;
  own.size = size_;
  for (std::size_t r = 0; r < places.size(); ++r) {
    for (const Channel channel : {Channel::kControl, Channel::kData}) {
      Socket& socket = channel == Channel::kData ? peers_[r].data : peers_[r].control;
      if (socket.is_open()) continue;
      socket = connect_to(places[r].first, places[r].second, deadline);
      if (!send_all(socket, bytes_of(hello_of(own, run, channel, 0)), deadline))
        detail::fail(ErrorKind::kComm, "rendezvous: rank {} left", r);
    }
  }
  const auto missing = [&] {
    std::vector<int> ranks;
    for (int r = rank_ + 1; r < size_; ++r) {
      const Peer& peer = peers_[static_cast<std::size_t>(r)];
      if (!peer.control.is_open() || !peer.data.is_open()) ranks.push_back(r);
    }
    return ranks;
  };
  while (!missing().empty()) {
    std::optional<Socket> socket = accept_from(listener, deadline);
    if (!socket) {
      detail::fail(ErrorKind::kComm, "rendezvous: {} did not connect to rank {} within {:.1f} s", rank_list(missing()),
                   rank_, seconds(timeout_));
    }
    const std::optional<Hello> hello = read_hello(*socket, run, size_, deadline);
    if (!hello || hello->channel == Channel::kJoin || hello->rank <= rank_) continue;
    Peer& peer = peers_[static_cast<std::size_t>(hello->rank)];
    (hello->channel == Channel::kData ? peer.data : peer.control) = std::move(*socket);
  }
}

Mesh::~Mesh() {
  if (!monitor_.joinable()) return;
  Frame frame;
  if (std::uncaught_exceptions() > exceptions_) {
    frame.type = Frame::Type::kFailure;
    set_text(frame.text, fmt::format("communicator: rank {} failed", rank_));
  } else {
    frame.type = Frame::Type::kGoodbye;
  }
  {
    const std::lock_guard lock(mutex_);
    frame.at = at_;
    if (failure_.empty()) tell_all(frame, kHearsay);
    stopping_ = true;
  }
  const std::uint64_t one = 1;
  if (write(wake_.fd(), &one, sizeof one) < 0) {
    // The monitor sees stopping_ at its next heartbeat.
  }
  monitor_.join();
}

// Word of each other

void Mesh::monitor() {
  Clock::time_point next = Clock::now();
  std::vector<pollfd> entries;
  std::vector<std::size_t> ranks;
  while (true) {
    entries.assign(1, {wake_.fd(), POLLIN, 0});
    ranks.assign(1, 0);
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      if (Clock::now() >= next) {
        Frame frame;
        frame.at = at_;
        for (Peer& peer : peers_) tell(peer, frame);
        next = Clock::now() + heartbeat_;
      }
      for (std::size_t r = 0; r < peers_.size(); ++r) {
        if (!peers_[r].control.is_open()) continue;
        entries.push_back({peers_[r].control.fd(), POLLIN, 0});
        ranks.push_back(r);
      }
    }
    const auto pause = std::chrono::duration_cast<milliseconds>(next - Clock::now()).count();
    poll(entries.data(), entries.size(), static_cast<int>(std::max<std::int64_t>(pause, 0) + 1));
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 1; i < entries.size(); ++i) {
      if (entries[i].revents != 0) hear(ranks[i]);
    }
  }
}

void Mesh::hear(std::size_t rank) {
  Peer& peer = peers_[rank];
  std::byte buffer[4096];
  while (peer.control.is_open()) {
    const auto got = receive_some(peer.control, buffer);
    if (!got) {
      peer.control = Socket();
      return lose(peer);
    }
    if (*got == 0) return;
    peer.heard = Clock::now();
    peer.incoming.insert(peer.incoming.end(), buffer, buffer + *got);
    while (peer.incoming.size() >= sizeof(Frame)) {
      Frame frame;
      std::memcpy(&frame, peer.incoming.data(), sizeof frame);
      peer.incoming.erase(peer.incoming.begin(), peer.incoming.begin() + sizeof frame);
      handle(rank, frame);
    }
  }
}

void Mesh::handle(std::size_t rank, const Frame& frame) {
  Peer& peer = peers_[rank];
  peer.at = frame.at;
  peer.has_left = peer.has_left || frame.type == Frame::Type::kGoodbye;
  if (frame.type != Frame::Type::kFailure || !failure_.empty()) return;
  const std::string text(frame.text, strnlen(frame.text, sizeof frame.text));
  failure_ = text + fmt::format(" (rank {} tells)", rank);
  failure_kind_ = frame.kind;
}

void Mesh::lose(Peer& peer) {
  if (peer.has_left || peer.is_lost) return;
  peer.is_lost = true;
  peer.lost_at = Clock::now();
}

void Mesh::tell(Peer& peer, const Frame& frame) {
  if (!peer.control.is_open()) return;
  // A peer that does not read gets no more heartbeats, and what matters when it reads again.
  if (!peer.outgoing.empty() && frame.type == Frame::Type::kHeartbeat) return flush(peer);
  const auto bytes = bytes_of(frame);
  peer.outgoing.insert(peer.outgoing.end(), bytes.begin(), bytes.end());
  flush(peer);
}

void Mesh::flush(Peer& peer) {
  while (!peer.outgoing.empty()) {
    const auto sent = send_some(peer.control, peer.outgoing);
    if (!sent) return peer.outgoing.clear();  // hear() learns that it is closed, after the last word
    if (*sent == 0) return;
    peer.outgoing.erase(peer.outgoing.begin(), peer.outgoing.begin() + static_cast<std::ptrdiff_t>(*sent));
  }
}

void Mesh::tell_all(const Frame& frame, milliseconds patience) {
  const Clock::time_point deadline = Clock::now() + patience;
  for (Peer& peer : peers_) tell(peer, frame);
  const auto is_pending = [](const Peer& peer) { return peer.control.is_open() && !peer.outgoing.empty(); };
  while (std::any_of(peers_.begin(), peers_.end(), is_pending) && Clock::now() < deadline) {
    std::this_thread::sleep_for(milliseconds(5));
    for (Peer& peer : peers_) {
      if (is_pending(peer)) flush(peer);
    }
  }
}

void Mesh::come_to(const Collective& what) {
  const std::lock_guard lock(mutex_);
  at_ = what;
}

void Mesh::throw_failure() { throw Error(failure_kind_, failure_); }

void Mesh::fail(ErrorKind kind, const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) {
    failure_ = why;
    failure_kind_ = kind;
    Frame frame;
    frame.type = Frame::Type::kFailure;
    frame.kind = kind;
    frame.at = at_;
    set_text(frame.text, why);
    tell_all(frame, kHearsay);
  }
  throw_failure();
}

void Mesh::check(const Collective& what) {
  std::string why;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.empty()) throw_failure();
    for (std::size_t r = 0; r < peers_.size(); ++r) {
      const Peer& peer = peers_[r];
      if (peer.has_left && peer.at.sequence < what.sequence) {
        why = fmt::format("communicator: rank {} left before {}", r, to_string(what));
      } else if (peer.is_lost && Clock::now() - peer.lost_at > kHearsay) {
        why = fmt::format("communicator: rank {} ended, its connection is closed, during {}", r, to_string(what));
      }
    }
  }
  if (!why.empty()) fail(ErrorKind::kComm, why);
}

void Mesh::fail_late(const Collective& what, std::vector<int> waited_for) {
  std::string why;
  {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    const auto keep = [&](auto&& is_culprit) {
      std::vector<int> kept;
      for (const int r : waited_for) {
        if (is_culprit(peers_[static_cast<std::size_t>(r)])) kept.push_back(r);
      }
      return kept;
    };
    const auto silent = keep([&](const Peer& p) { return now - p.heard > 3 * heartbeat_; });
    const auto different = keep([&](const Peer& p) { return p.at.sequence == what.sequence && p.at != what; });
    const auto behind = keep([&](const Peer& p) { return p.at.sequence < what.sequence; });
    const double limit = seconds(timeout_);
    if (!silent.empty()) {
      why = fmt::format("communicator: {} stopped: no sign for {:.1f} s, during {} with a limit of {:.1f} s",
                        rank_list(silent), seconds(now - peers_[static_cast<std::size_t>(silent[0])].heard),
                        to_string(what), limit);
    } else if (!different.empty()) {
      why = fmt::format("communicator: {} called {}, where rank {} called {}", rank_list(different),
                        to_string(peers_[static_cast<std::size_t>(different[0])].at), rank_, to_string(what));
    } else {
      why = fmt::format("communicator: {} did not come to {} within {:.1f} s",
                        rank_list(behind.empty() ? waited_for : behind), to_string(what), limit);
    }
  }
  fail(ErrorKind::kComm, why);
}

// Data

struct Mesh::Exchange {
  struct Header {
    char magic[8];
    Collective what;
    std::uint64_t bytes;
  };
  struct Peer {
    Header out, in;
    std::size_t sent = 0, received = 0;  // bytes, headers included
    bool differs = false;
  };
};

void Mesh::exchange(const Collective& what, std::span<const std::span<const std::byte>> send,
                    std::span<const std::span<std::byte>> receive) {
  constexpr std::size_t kHeader = sizeof(Exchange::Header);
  constexpr milliseconds kTick{50};
  come_to(what);
  std::vector<Exchange::Peer> states(peers_.size());
  for (std::size_t p = 0; p < states.size(); ++p) {
    states[p].out = {{}, what, send[p].size()};
    std::memcpy(states[p].out.magic, kMagic, sizeof kMagic);
  }
  const auto own = static_cast<std::size_t>(rank_);
  const auto is_sent = [&](std::size_t p) { return states[p].sent == kHeader + send[p].size(); };
  const auto is_received = [&](std::size_t p) { return states[p].received == kHeader + receive[p].size(); };
  Clock::time_point moved = Clock::now(), differed{};
  bool differs = false;

  /// Moves what moves of one message: the header, then the payload.
  const auto step = [&](std::size_t p, auto header, auto payload, std::size_t& done, auto&& move) {
    const auto part = done < kHeader ? header.subspan(done) : payload.subspan(done - kHeader);
    const auto count = move(peers_[p].data, part);
    if (!count) {
      peers_[p].data = Socket();
      const std::lock_guard lock(mutex_);
      return lose(peers_[p]);
    }
    if (*count > 0) moved = Clock::now();
    done += *count;
  };
  const auto fail_different = [&] {
    std::vector<Collective> whats;
    for (std::size_t p = 0; p < states.size(); ++p)
      whats.push_back(states[p].received >= kHeader ? states[p].in.what : what);
    if (const std::string text = difference(whats); !text.empty()) fail(ErrorKind::kComm, "communicator: " + text);
    for (std::size_t p = 0; p < states.size(); ++p) {
      if (states[p].differs)
        fail(ErrorKind::kComm, fmt::format("communicator: rank {} sends {} bytes to rank {}, which expects {}, in {}",
                                           p, states[p].in.bytes, rank_, receive[p].size(), to_string(what)));
    }
    fail(ErrorKind::kComm, "communicator: a message that is not of this program");
  };

  std::vector<pollfd> entries;
  std::vector<std::size_t> ranks;
  while (true) {
    entries.clear();
    ranks.clear();
    std::vector<int> waited_for;
    bool all_headers = true;
    for (std::size_t p = 0; p < states.size(); ++p) {
      if (p == own) continue;
      all_headers = all_headers && states[p].received >= kHeader;
      if (is_sent(p) && is_received(p)) continue;
      waited_for.push_back(static_cast<int>(p));
      short events = 0;
      if (!is_sent(p)) events |= POLLOUT;
      if (!is_received(p) && !states[p].differs) events |= POLLIN;
      if (!peers_[p].data.is_open() || events == 0) continue;
      entries.push_back({peers_[p].data.fd(), events, 0});
      ranks.push_back(p);
    }
    if (differs && (all_headers || Clock::now() - differed > kHearsay)) fail_different();
    if (waited_for.empty()) return;
    if (Clock::now() - moved > timeout_) fail_late(what, waited_for);
    if (poll(entries.data(), entries.size(), static_cast<int>(kTick.count())) == 0) check(what);
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const std::size_t p = ranks[i];
      Exchange::Peer& s = states[p];
      if ((entries[i].revents & POLLOUT) != 0)
        step(p, bytes_of(s.out), send[p], s.sent,
             [](const Socket& socket, auto part) { return send_some(socket, part); });
      if (!peers_[p].data.is_open() || (entries[i].revents & (POLLIN | POLLHUP | POLLERR)) == 0) continue;
      const bool had_header = s.received >= kHeader;
      step(p, writable_bytes_of(s.in), receive[p], s.received,
           [](const Socket& socket, auto part) { return receive_some(socket, part); });
      if (had_header || s.received < kHeader) continue;
      s.differs =
          s.in.what != what || s.in.bytes != receive[p].size() || std::memcmp(s.in.magic, kMagic, sizeof kMagic) != 0;
      if (s.differs && !differs) differed = Clock::now();
      differs = differs || s.differs;
    }
    // A connection that is closed is always ready: time for others' word to arrive passes in check().
    if (std::any_of(waited_for.begin(), waited_for.end(),
                    [&](int r) { return !peers_[static_cast<std::size_t>(r)].data.is_open(); })) {
      check(what);
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
}

}  // namespace rowan::detail
