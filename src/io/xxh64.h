// XXH64 (Yann Collet, https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md): a checksum as fast as memory, without
// any protection against those who want to forge it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace rowan::detail {

/// Hashes bytes that come in pieces.
class Xxh64 {
 public:
  void update(const void* data, std::size_t bytes);
  std::uint64_t digest() const;

 private:
  static constexpr std::size_t kStripe = 32;

  void consume(const unsigned char* stripe);

  std::array<std::uint64_t, 4> lanes_{0x60ea27eeadc0b5d6, 0xc2b2ae3d27d4eb4f, 0, 0x61c8864e7a143579};
  std::array<unsigned char, kStripe> rest_{};  // bytes behind the last whole stripe
  std::uint64_t total_ = 0;
};

}  // namespace rowan::detail
