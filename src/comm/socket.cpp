#include "comm/socket.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "core/check.h"

namespace rowan::detail {

namespace {

[[noreturn]] void fail_os(const std::string& what) { fail(ErrorKind::kIo, "{}: {}", what, std::strerror(errno)); }

void set_option(const Socket& socket, int level, int option, int value) {
  setsockopt(socket.fd(), level, option, &value, sizeof value);
}

/// Milliseconds until a deadline, for poll: 0 when it is over.
int remaining_ms(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left + 1, 0, 3600000));
}

/// False when the deadline is over.
bool wait_for(const Socket& socket, short events, Clock::time_point deadline) {
  while (Clock::now() < deadline) {
    pollfd entry{socket.fd(), events, 0};
    const int ready = poll(&entry, 1, remaining_ms(deadline));
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) fail_os("poll");
  }
  return false;
}

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const std::string& address, int port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (status != 0) fail(ErrorKind::kIo, "rendezvous: address \"{}\": {}", address, gai_strerror(status));
  return {found, freeaddrinfo};
}

Socket open_socket(int family) { return Socket(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)); }

/// Closed where it does not connect.
Socket try_connect(const addrinfo& to, Clock::time_point deadline) {
  Socket socket = open_socket(to.ai_family);
  if (!socket.is_open()) return {};
  if (connect(socket.fd(), to.ai_addr, to.ai_addrlen) != 0) {
    if (errno != EINPROGRESS || !wait_for(socket, POLLOUT, deadline)) return {};
    int error = 0;
    socklen_t length = sizeof error;
    if (getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) return {};
  }
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  return socket;
}

template <class F>
std::optional<std::size_t> transfer(F&& call) {
  const ssize_t count = call();
  if (count > 0) return static_cast<std::size_t>(count);
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return 0;
  return std::nullopt;
}

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.rfind("127.", 0) == 0 ||
         address.rfind("::ffff:127.", 0) == 0;
}

Socket listen_at(const std::string& address, int port) {
  const bool local = is_loopback(address);
  const bool six = address == "::1" || !local;
  Socket socket = open_socket(six ? AF_INET6 : AF_INET);
  sockaddr_storage bound{};
  socklen_t length = 0;
  if (six && socket.is_open()) {
    auto* const in6 = reinterpret_cast<sockaddr_in6*>(&bound);
    in6->sin6_family = AF_INET6;
    in6->sin6_addr = local ? in6addr_loopback : in6addr_any;
    in6->sin6_port = htons(static_cast<std::uint16_t>(port));
    length = sizeof *in6;
    set_option(socket, IPPROTO_IPV6, IPV6_V6ONLY, 0);  // IPv4 arrives here too
  } else {
    if (six) socket = open_socket(AF_INET);  // a machine without IPv6
    auto* const in = reinterpret_cast<sockaddr_in*>(&bound);
    in->sin_family = AF_INET;
    in->sin_addr.s_addr = htonl(local ? INADDR_LOOPBACK : INADDR_ANY);
    in->sin_port = htons(static_cast<std::uint16_t>(port));
    length = sizeof *in;
  }
  if (!socket.is_open()) fail_os("rendezvous: socket");
  set_option(socket, SOL_SOCKET, SO_REUSEADDR, 1);
  if (bind(socket.fd(), reinterpret_cast<sockaddr*>(&bound), length) != 0)
    fail_os(fmt::format("rendezvous: port {}", port));
  if (listen(socket.fd(), SOMAXCONN) != 0) fail_os(fmt::format("rendezvous: port {}", port));
  return socket;
}

int port_of(const Socket& listener) {
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (getsockname(listener.fd(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) fail_os("rendezvous: getsockname");
  const bool six = bound.ss_family == AF_INET6;
  return ntohs(six ? reinterpret_cast<sockaddr_in6*>(&bound)->sin6_port
                   : reinterpret_cast<sockaddr_in*>(&bound)->sin_port);
}

std::string peer_address(const Socket& socket) {
  sockaddr_storage peer{};
  socklen_t length = sizeof peer;
  char text[NI_MAXHOST] = "";
  if (getpeername(socket.fd(), reinterpret_cast<sockaddr*>(&peer), &length) != 0) fail_os("rendezvous: getpeername");
  getnameinfo(reinterpret_cast<sockaddr*>(&peer), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  return text;
}

Socket connect_to(const std::string& address, int port, Clock::time_point deadline) {
  constexpr auto kPause = std::chrono::milliseconds(20);
  const Addresses addresses = resolve(address, port);
  while (Clock::now() < deadline) {
    for (const addrinfo* to = addresses.get(); to != nullptr; to = to->ai_next) {
      Socket socket = try_connect(*to, deadline);
      if (socket.is_open()) return socket;
    }
    std::this_thread::sleep_for(kPause);
  }
  fail(ErrorKind::kComm, "rendezvous: nobody answers at {} port {}", address, port);
}

std::optional<Socket> accept_from(const Socket& listener, Clock::time_point deadline) {
  while (wait_for(listener, POLLIN, deadline)) {
    Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.is_open()) {
      set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
      return socket;
    }
    if (errno == EMFILE || errno == ENFILE || errno == EBADF) fail_os("rendezvous: accept");
  }
  return std::nullopt;
}

std::optional<std::size_t> send_some(const Socket& socket, std::span<const std::byte> bytes) {
  if (bytes.empty()) return 0;
  return transfer([&] { return send(socket.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT); });
}

std::optional<std::size_t> receive_some(const Socket& socket, std::span<std::byte> bytes) {
  if (bytes.empty()) return 0;
  return transfer([&] { return recv(socket.fd(), bytes.data(), bytes.size(), MSG_DONTWAIT); });
}

bool send_all(const Socket& socket, std::span<const std::byte> bytes, Clock::time_point deadline) {
  while (!bytes.empty()) {
    if (!wait_for(socket, POLLOUT, deadline)) return false;
    const auto sent = send_some(socket, bytes);
    if (!sent) return false;
    bytes = bytes.subspan(*sent);
  }
  return true;
}

bool receive_all(const Socket& socket, std::span<std::byte> bytes, Clock::time_point deadline) {
  while (!bytes.empty()) {
    if (!wait_for(socket, POLLIN, deadline)) return false;
    const auto got = receive_some(socket, bytes);
    if (!got) return false;
    bytes = bytes.subspan(*got);
  }
  return true;
}

}  // namespace rowan::detail
