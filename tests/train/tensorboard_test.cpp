#include "rowan/train/tensorboard.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <map>

#include "catch.h"
#include "rowan/core/error.h"
#include "support/files.h"

namespace rowan {
namespace {

using test::ScratchDirectory;

/// CRC-32C bit by bit, without the table of the writer.
std::uint32_t crc32c(const std::string& data) {
  std::uint32_t crc = 0xFFFFFFFFu;
  for (const char c : data) {
    for (int bit = 0; bit < 8; ++bit) {
      const bool one = ((crc ^ static_cast<unsigned char>(c) >> bit) & 1) != 0;
      crc = (crc >> 1) ^ (one ? 0x82F63B78u : 0);
    }
  }
  return ~crc;
}
std::uint32_t masked(std::uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u; }

template <class T>
T read(const std::string& bytes, std::size_t at) {
  T value;
  REQUIRE(at + sizeof(T) <= bytes.size());
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

std::vector<std::string> records_of(const std::string& file) {
  std::vector<std::string> records;
  for (std::size_t at = 0; at < file.size();) {
    const auto length = read<std::uint64_t>(file, at);
    CHECK(read<std::uint32_t>(file, at + 8) == masked(crc32c(file.substr(at, 8))));
    records.push_back(file.substr(at + 12, length));
    CHECK(read<std::uint32_t>(file, at + 12 + length) == masked(crc32c(records.back())));
    at += 16 + length;
  }
  return records;
}

/// Fields of a protobuf message by number: raw bytes for lengths and fixed sizes, the value for varints.
struct Field {
  std::uint64_t number = 0;
  std::string bytes;
};
std::multimap<std::uint64_t, Field> fields_of(const std::string& message) {
  std::multimap<std::uint64_t, Field> fields;
  std::size_t at = 0;
  const auto varint = [&] {
    std::uint64_t value = 0;
    for (int shift = 0;; shift += 7) {
      const auto byte = read<std::uint8_t>(message, at++);
      value |= std::uint64_t{byte & 0x7Fu} << shift;
      if (byte < 0x80) return value;
    }
  };
  while (at < message.size()) {
    const std::uint64_t key = varint();
    Field field;
    if (key % 8 == 0) {
      field.number = varint();
    } else {
      const std::uint64_t size = key % 8 == 1 ? 8 : key % 8 == 5 ? 4 : varint();
      field.bytes = message.substr(at, size);
      at += size;
    }
    fields.emplace(key / 8, field);
  }
  return fields;
}

struct Event {
  double wall_time = 0;
  std::int64_t step = 0;
  std::string version;
  std::uint64_t session = 0;
  std::vector<std::pair<std::string, float>> scalars;
};

std::vector<Event> events_of(const std::filesystem::path& path) {
  std::vector<Event> events;
  for (const std::string& record : records_of(test::read_file(path))) {
    Event event;
    for (const auto& [number, field] : fields_of(record)) {
      if (number == 1) event.wall_time = read<double>(field.bytes, 0);
      if (number == 2) event.step = static_cast<std::int64_t>(field.number);
      if (number == 3) event.version = field.bytes;
      if (number == 7) event.session = fields_of(field.bytes).find(1)->second.number;
      if (number != 5) continue;
      for (const auto& [one, value] : fields_of(field.bytes)) {
        CHECK(one == 1);
        const auto parts = fields_of(value.bytes);
        event.scalars.emplace_back(parts.find(1)->second.bytes, read<float>(parts.find(2)->second.bytes, 0));
      }
    }
    events.push_back(event);
  }
  return events;
}

}  // namespace

TEST_CASE("the checksum of event files is CRC-32C") { CHECK(crc32c("123456789") == 0xE3069283u); }

TEST_CASE("an event file holds its version, a session start, and each record's scalars at its step") {
  const ScratchDirectory scratch;
  TensorBoardWriter writer(scratch / "events");
  CHECK(writer.path().filename().string().starts_with("events.out.tfevents."));
  writer.write({{"step", std::int64_t{300}},
                {"loss", 2.5},
                {"skipped", true},
                {"tokens", std::int64_t{-7}},
                {"stage", std::string("tune")}});
  writer.write({{"stage", std::string("no scalar")}});
  writer.add_scalar("eval_loss", 1.0 / 3, std::int64_t{1} << 40, 1234.5);
  const auto events = events_of(writer.path());  // without closing the file: records are there at once
  REQUIRE(events.size() == 4);
  CHECK(events[0].version == "brain.Event:2");
  CHECK(events[0].wall_time > 1.6e9);
  CHECK(events[1].session == 1);
  CHECK(events[1].step == 300);
  CHECK(events[2].step == 300);
  CHECK(events[2].scalars ==
        std::vector<std::pair<std::string, float>>{{"loss", 2.5f}, {"skipped", 1.0f}, {"tokens", -7.0f}});
  CHECK(events[3].step == std::int64_t{1} << 40);
  CHECK(events[3].wall_time == 1234.5);
  CHECK(events[3].scalars == std::vector<std::pair<std::string, float>>{{"eval_loss", 1.0f / 3}});
}

TEST_CASE("event files hold NaN, infinities and long names") {
  const ScratchDirectory scratch;
  TensorBoardWriter writer(scratch.path());
  const std::string name(300, 'n');
  writer.write({{name, std::numeric_limits<double>::infinity()}, {"nan", std::nan("")}});
  const auto events = events_of(writer.path());
  REQUIRE(events.size() == 3);
  CHECK(events[2].step == 0);
  CHECK(events[2].scalars[0] == std::pair{name, std::numeric_limits<float>::infinity()});
  CHECK(std::isnan(events[2].scalars[1].second));
}

TEST_CASE("two writers of one directory write two files") {
  const ScratchDirectory scratch;
  const TensorBoardWriter first(scratch.path()), second(scratch.path());
  CHECK(first.path() != second.path());
}

TEST_CASE("events that cannot be stored are an Io error") {
  const ScratchDirectory scratch;
  test::write_file(scratch / "file", "");
  CHECK_THROWS_AS(TensorBoardWriter(scratch / "file"), Error);
}

}  // namespace rowan
