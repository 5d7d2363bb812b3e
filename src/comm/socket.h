// TCP sockets with deadlines.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace rowan::detail {

using Clock = std::chrono::steady_clock;

/// Owns a file descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) noexcept : fd_(fd) {}
  ~Socket();
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

  int fd() const noexcept { return fd_; }
  bool is_open() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// A name or number that means this machine alone: "localhost", 127.x.x.x, "::1".
bool is_loopback(const std::string& address);

/// Listens at a port (0: one that is free), on the loopback device where `address` means it, else on every device.
/// Throws Io naming the port.
Socket listen_at(const std::string& address, int port);
int port_of(const Socket& listener);
/// The number of the other end's address.
std::string peer_address(const Socket& socket);

/// Connects, trying again until the deadline while nobody listens there. Throws Comm when time is up, Io for a name
/// that is not known. Sockets of both functions do not block and send small messages at once.
Socket connect_to(const std::string& address, int port, Clock::time_point deadline);
/// The next connection, or nothing at the deadline.
std::optional<Socket> accept_from(const Socket& listener, Clock::time_point deadline);

/// Whole messages. False when the other end closed, or time is up.
bool send_all(const Socket& socket, std::span<const std::byte> bytes, Clock::time_point deadline);
bool receive_all(const Socket& socket, std::span<std::byte> bytes, Clock::time_point deadline);

/// What of a message passes without waiting: a byte count, 0 where none does now, nothing where the other end is gone.
std::optional<std::size_t> send_some(const Socket& socket, std::span<const std::byte> bytes);
std::optional<std::size_t> receive_some(const Socket& socket, std::span<std::byte> bytes);

/// A trivially copyable value as bytes.
template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}
template <class T>
std::span<std::byte> writable_bytes_of(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

}  // namespace rowan::detail
