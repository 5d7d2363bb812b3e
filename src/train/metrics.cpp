#include "rowan/train/metrics.h"

#include <fmt/format.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "rowan/core/error.h"
#include "rowan/io/atomic_file.h"

namespace rowan {
namespace {

constexpr std::int64_t kMostBytes = std::int64_t{1} << 32;

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
  errno = 0;
  const bool stored = std::fwrite(text.data(), 1, text.size(), file_.get()) == text.size();
  if (std::fflush(file_.get()) != 0 || !stored) fail(path_, errno == 0 ? "write failed" : std::strerror(errno));
}

void drop_metrics_after(const std::filesystem::path& path, std::int64_t step) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return;
  const std::string text = read_text_file(path, kMostBytes);
  std::size_t kept = 0;
  for (std::size_t end = 0; (end = text.find('\n', kept)) != std::string::npos; kept = end + 1) {
    const auto line = nlohmann::json::parse(text.data() + kept, text.data() + end, nullptr, false);
    const auto at = line.is_object() ? line.find("step") : line.end();
    if (at == line.end() || !at->is_number_integer() || at->get<std::int64_t>() > step) break;
  }
  if (kept < text.size()) write_text_file(path, std::string_view(text).substr(0, kept));
}

}  // namespace rowan
