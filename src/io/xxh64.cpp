#include "io/xxh64.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace rowan::detail {

namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F, kPrime3 = 0x165667B19E3779F9,
                        kPrime4 = 0x85EBCA77C2B2AE63, kPrime5 = 0x27D4EB2F165667C5;

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

template <class Word>
Word read(const unsigned char* from) {
  Word word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

std::uint64_t round(std::uint64_t lane, std::uint64_t word) { return std::rotl(lane + word * kPrime2, 31) * kPrime1; }

}  // namespace

void Xxh64::consume(const unsigned char* stripe) {
  for (std::size_t i = 0; i < lanes_.size(); ++i) lanes_[i] = round(lanes_[i], read<std::uint64_t>(stripe + 8 * i));
}

void Xxh64::update(const void* data, std::size_t bytes) {
  const auto* from = static_cast<const unsigned char*>(data);
  const std::size_t held = total_ % kStripe;
  total_ += bytes;
  if (held > 0) {
    const std::size_t taken = std::min(bytes, kStripe - held);
    std::memcpy(rest_.data() + held, from, taken);
    from += taken;
    bytes -= taken;
    if (held + taken < kStripe) return;
    consume(rest_.data());
  }
  for (; bytes >= kStripe; from += kStripe, bytes -= kStripe) consume(from);
  if (bytes > 0) std::memcpy(rest_.data(), from, bytes);
}

std::uint64_t Xxh64::digest() const {
  std::uint64_t hash = kPrime5;
  if (total_ >= kStripe) {
    hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) + std::rotl(lanes_[3], 18);
    for (const std::uint64_t lane : lanes_) hash = (hash ^ round(0, lane)) * kPrime1 + kPrime4;
  }
  hash += total_;
  const unsigned char* from = rest_.data();
  std::size_t left = total_ % kStripe;
  for (; left >= 8; from += 8, left -= 8)
    hash = std::rotl(hash ^ round(0, read<std::uint64_t>(from)), 27) * kPrime1 + kPrime4;
  if (left >= 4) {
    hash = std::rotl(hash ^ (read<std::uint32_t>(from) * kPrime1), 23) * kPrime2 + kPrime3;
    from += 4;
    left -= 4;
  }
  for (; left > 0; ++from, --left) hash = std::rotl(hash ^ (*from * kPrime5), 11) * kPrime1;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace rowan::detail
