#include "rowan/train/metrics.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>

#include "io/file_size_signal.h"
#include "io/input_file.h"
#include "io/json.h"
#include "rowan/core/error.h"
#include "rowan/io/atomic_file.h"

namespace rowan {
namespace {

constexpr std::int64_t kMaxBytes = std::int64_t{1} << 30;  // of a file that is read

[[noreturn]] void fail(const std::filesystem::path& path, const std::string& what) {
  throw Error(ErrorKind::kIo, fmt::format("metrics: {}: {}", path.string(), what));
}

// The size of the file up to and with its last newline.
std::uintmax_t size_of_whole_lines(std::FILE* file, std::uintmax_t size) {
  while (size > 0) {
    if (std::fseek(file, static_cast<long>(size - 1), SEEK_SET) != 0 || std::fgetc(file) == '\n') break;
    --size;
  }
  std::rewind(file);  // C asks for it between reading and writing
  return size;
}

// Writes all of `text` and returns 0, or the error's number.
int write_all(int file, std::string_view text) {
  const detail::FileSizeSignalBlock no_signal;
  while (!text.empty()) {
    const ssize_t put = ::write(file, text.data(), text.size());
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return put < 0 ? errno : ENOSPC;
    text.remove_prefix(static_cast<std::size_t>(put));
  }
  return 0;
}

}  // namespace

MetricsWriter::MetricsWriter(const std::filesystem::path& path) : path_(path), file_(std::fopen(path.c_str(), "ab+")) {
  if (!file_) fail(path_, std::strerror(errno));
  std::error_code error;
  if (!std::filesystem::is_regular_file(path_, error)) return;
  const std::uintmax_t size = std::filesystem::file_size(path_, error);
  if (error) fail(path_, error.message());
  const std::uintmax_t whole = size_of_whole_lines(file_.get(), size);
  if (whole < size) std::filesystem::resize_file(path_, whole, error);
  if (error) fail(path_, error.message());
}

void MetricsWriter::write(const MetricRecord& record) {
  nlohmann::ordered_json line = nlohmann::ordered_json::object();
  for (const auto& [name, value] : record) {
    if (line.contains(name)) {
      throw Error(ErrorKind::kInvalidArgument, fmt::format("metrics: expected each name once, got \"{}\" twice", name));
    }
    std::visit([&, &key = name](const auto& v) { line[key] = v; }, value);
  }
  const std::string text = line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + '\n';
  const int file = ::fileno(file_.get());
  struct stat before {};
  if (::fstat(file, &before) != 0) fail(path_, std::strerror(errno));
  const int error = write_all(file, text);
  if (error == 0) return;
  // A part of the line would spoil the next one.
  if (S_ISREG(before.st_mode) && ::ftruncate(file, before.st_size) != 0)
    fail(path_, std::string(std::strerror(error)) + "; a part of the line stays in the file");
  fail(path_, std::strerror(error));
}

void drop_metrics_after(const std::filesystem::path& path, std::int64_t step) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return;
  const std::string text = read_text_file(path, kMaxBytes);
  std::size_t kept = 0;
  for (std::size_t end = 0; (end = text.find('\n', kept)) != std::string::npos; kept = end + 1) {
    const auto line = nlohmann::json::parse(text.data() + kept, text.data() + end, nullptr, false);
    const auto at = line.is_object() ? line.find("step") : line.end();
    if (at == line.end() || !at->is_number_integer() || at->get<std::int64_t>() > step) break;
  }
  if (kept < text.size()) write_text_file(path, std::string_view(text).substr(0, kept));
}

namespace {

MetricValue metric_value(const std::string& where, const std::string& name, const nlohmann::ordered_json& value) {
  if (value.is_null()) return std::numeric_limits<double>::quiet_NaN();
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_string()) return value.get<std::string>();
  if (value.is_number_integer() && value.get<double>() < 0x1p63) return value.get<std::int64_t>();
  if (value.is_number()) return value.get<double>();
  detail::fail_format(where,
                      detail::quote(name) + ": expected a number, a text or a boolean, got " + detail::describe(value));
}

}  // namespace

std::vector<MetricRecord> read_metrics(const std::filesystem::path& path) {
  const std::string text = read_text_file(path, kMaxBytes);
  std::vector<MetricRecord> records;
  std::int64_t number = 0;
  std::size_t begin = 0;
  for (std::size_t end; (end = text.find('\n', begin)) != text.npos; begin = end + 1) {
    const std::string where = fmt::format("{}:{}", path.string(), ++number);
    const std::string_view line(text.data() + begin, end - begin);
    detail::JsonScanner(where).scan(line);
    const auto json = nlohmann::ordered_json::parse(line);
    if (!json.is_object()) detail::fail_format(where, "expected an object, got " + detail::describe(json));
    MetricRecord record;
    for (const auto& [name, value] : json.items()) record.emplace_back(name, metric_value(where, name, value));
    records.push_back(std::move(record));
  }
  return records;
}

}  // namespace rowan
