#include "support/gguf_reader.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "support/files.h"

namespace rowan::test {

namespace {

class Cursor {
 public:
  explicit Cursor(const std::string& bytes) : bytes_(bytes) {}

  template <class T>
  T take() {
    T value;
    std::memcpy(&value, take(sizeof(T)).data(), sizeof(T));
    return value;
  }
  std::string take(std::uint64_t count) {
    if (count > bytes_.size() - at_) throw std::runtime_error("GGUF: the file ends early");
    at_ += count;
    return bytes_.substr(at_ - count, count);
  }
  std::string take_string() { return take(take<std::uint64_t>()); }
  std::uint64_t at() const { return at_; }

 private:
  const std::string& bytes_;
  std::uint64_t at_ = 0;
};

double half_value(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double magnitude = exponent == 0    ? std::ldexp(fraction, -24)
                           : exponent == 31 ? (fraction == 0 ? INFINITY : NAN)
                                            : std::ldexp(1024 + fraction, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

}  // namespace

GgufFile::GgufFile(const std::filesystem::path& path) {
  const std::string bytes = read_file(path);
  Cursor cursor(bytes);
  if (cursor.take(4) != "GGUF") throw std::runtime_error("GGUF: another magic number");
  version = cursor.take<std::uint32_t>();
  const auto tensor_count = cursor.take<std::uint64_t>(), metadata_count = cursor.take<std::uint64_t>();
  for (std::uint64_t i = 0; i < metadata_count; ++i) {
    const std::string key = cursor.take_string();
    switch (cursor.take<std::uint32_t>()) {
      case 4:
        numbers[key] = cursor.take<std::uint32_t>();
        break;
      case 6:
        reals[key] = cursor.take<float>();
        break;
      case 8:
        texts[key] = cursor.take_string();
        break;
      default:
        throw std::runtime_error("GGUF: a value of another type");
    }
  }
  for (std::uint64_t i = 0; i < tensor_count; ++i) {
    const std::string name = cursor.take_string();
    TensorEntry entry;
    entry.extents.resize(cursor.take<std::uint32_t>());
    for (std::uint64_t& extent : entry.extents) extent = cursor.take<std::uint64_t>();
    entry.type = cursor.take<std::uint32_t>();
    entry.offset = cursor.take<std::uint64_t>();
    if (entry.offset % 32 != 0 || entry.type > 1 || !tensors.emplace(name, entry).second)
      throw std::runtime_error("GGUF: a tensor that is not aligned, of another type, or listed twice");
  }
  const std::uint64_t data = (cursor.at() + 31) / 32 * 32;
  for (auto& [name, entry] : tensors) {
    std::uint64_t count = 1;
    for (const std::uint64_t extent : entry.extents) count *= extent;
    entry.offset += data;
    const std::uint64_t size = entry.type == 0 ? 4 : 2;
    if (entry.offset + count * size > bytes.size()) throw std::runtime_error("GGUF: a tensor passes the end");
    for (std::uint64_t i = 0; i < count; ++i) {
      float real = 0;
      std::uint16_t half = 0;
      if (size == 4) std::memcpy(&real, bytes.data() + entry.offset + 4 * i, 4);
      if (size == 2) std::memcpy(&half, bytes.data() + entry.offset + 2 * i, 2);
      entry.values.push_back(size == 4 ? real : half_value(half));
    }
  }
}

}  // namespace rowan::test
