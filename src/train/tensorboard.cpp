#include "rowan/train/tensorboard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <type_traits>

#include "rowan/core/error.h"
#include "rowan/io/atomic_file.h"

namespace rowan {
namespace {

static_assert(std::endian::native == std::endian::little, "TFRecord and protobuf are little-endian");

[[noreturn]] void fail(const std::filesystem::path& path, int error) {
  throw Error(ErrorKind::kIo, fmt::format("{}: cannot write events: {}", path.string(), std::strerror(error)));
}

constexpr std::array<std::uint32_t, 256> make_crc32c_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < table.size(); ++i) {
    std::uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0x82F63B78u : 0);  // Castagnoli, reflected
    table[i] = crc;
  }
  return table;
}

/// As TFRecord stores it: masked, since a CRC over data that holds CRCs is weak.
std::uint32_t masked_crc32c(std::string_view data) {
  static constexpr std::array kTable = make_crc32c_table();
  std::uint32_t crc = ~0u;
  for (const char c : data) crc = crc >> 8 ^ kTable[(crc ^ static_cast<unsigned char>(c)) & 0xFF];
  return std::rotr(~crc, 15) + 0xA282EAD8u;
}

template <class T>
std::string bytes_of(T value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {reinterpret_cast<const char*>(&value), sizeof(T)};
}

// Protobuf: a field is its key (number and wire type) and its value.

std::string varint(std::uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}
std::string key(std::uint64_t field, std::uint64_t wire_type) { return varint(field << 3 | wire_type); }
std::string varint_field(std::uint64_t field, std::uint64_t value) { return key(field, 0) + varint(value); }
std::string double_field(std::uint64_t field, double value) { return key(field, 1) + bytes_of(value); }
std::string float_field(std::uint64_t field, float value) { return key(field, 5) + bytes_of(value); }
std::string bytes_field(std::uint64_t field, std::string_view value) {
  return key(field, 2) + varint(value.size()) + std::string(value);
}

// Fields of tensorflow/core/util/event.proto and framework/summary.proto.
constexpr std::uint64_t kEventWallTime = 1, kEventStep = 2, kEventFileVersion = 3, kEventSummary = 5,
                        kEventSessionLog = 7, kSessionLogStatus = 1, kSessionStart = 1, kSummaryValue = 1,
                        kValueTag = 1, kValueSimpleValue = 2;

std::string scalar(std::string_view tag, double value) {
  return bytes_field(kSummaryValue,
                     bytes_field(kValueTag, tag) + float_field(kValueSimpleValue, static_cast<float>(value)));
}

double now() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

std::string host_name() {
  char name[256] = {};
  if (::gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0') return "localhost";
  for (char& c : name) c = c == '/' ? '-' : c;
  return name;
}

}  // namespace

TensorBoardWriter::TensorBoardWriter(const std::filesystem::path& directory) {
  make_directories(directory);
  static std::atomic<unsigned> counter{0};
  path_ = directory / fmt::format("events.out.tfevents.{:010}.{}.{}.{}", static_cast<std::int64_t>(now()), host_name(),
                                  ::getpid(), counter++);
  file_.reset(std::fopen(path_.c_str(), "wbx"));
  if (!file_) fail(path_, errno);
  write_record(double_field(kEventWallTime, now()) + bytes_field(kEventFileVersion, "brain.Event:2"));
}

void TensorBoardWriter::write(const MetricRecord& record) {
  std::int64_t step = 0;
  std::string values;
  for (const auto& [name, value] : record) {
    if (const auto* integer = std::get_if<std::int64_t>(&value); integer != nullptr && name == "step") {
      step = *integer;
    } else if (integer != nullptr) {
      values += scalar(name, static_cast<double>(*integer));
    } else if (const auto* real = std::get_if<double>(&value)) {
      values += scalar(name, *real);
    } else if (const auto* flag = std::get_if<bool>(&value)) {
      values += scalar(name, *flag ? 1 : 0);
    }
  }
  if (!values.empty()) write_event(step, now(), bytes_field(kEventSummary, values));
}

void TensorBoardWriter::add_scalar(std::string_view tag, double value, std::int64_t step, double wall_time) {
  write_event(step, wall_time, bytes_field(kEventSummary, scalar(tag, value)));
}

void TensorBoardWriter::write_event(std::int64_t step, double wall_time, std::string_view fields) {
  const std::string head =
      double_field(kEventWallTime, wall_time) + varint_field(kEventStep, static_cast<std::uint64_t>(step));
  if (!started_) {  // makes TensorBoard drop what earlier files hold from this step on
    write_record(head + bytes_field(kEventSessionLog, varint_field(kSessionLogStatus, kSessionStart)));
    started_ = true;
  }
  write_record(head + std::string(fields));
}

void TensorBoardWriter::write_record(std::string_view data) {
  const std::string length = bytes_of(static_cast<std::uint64_t>(data.size()));
  const std::string record =
      length + bytes_of(masked_crc32c(length)) + std::string(data) + bytes_of(masked_crc32c(data));
  errno = 0;
  const bool stored = std::fwrite(record.data(), 1, record.size(), file_.get()) == record.size();
  if (std::fflush(file_.get()) != 0 || !stored) fail(path_, errno == 0 ? EIO : errno);
}

}  // namespace rowan
