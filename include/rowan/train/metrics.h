// What a run measured, one JSON object a line.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace rowan {

using MetricValue = std::variant<bool, std::int64_t, double, std::string>;
/// Names and values of one line, in the order in which they are written: {{"step", 3}, {"loss", 0.25}}.
using MetricRecord = std::vector<std::pair<std::string, MetricValue>>;

/// Appends records to a JSON Lines file. A line is handed to the operating system whole before write() returns, so a
/// reader sees every step at once and a killed run loses at most the line it was writing.
class MetricsWriter {
 public:
  /// Opens `path`, which is made when it is missing. A last line without its newline, left by a run that was killed, is
  /// removed. Throws Io naming the file.
  explicit MetricsWriter(const std::filesystem::path& path);

  /// A double is written with the fewest digits that read back to the same bits, NaN and infinities as null, a byte
  /// that is not UTF-8 as U+FFFD. Throws Io when the line could not be stored (nothing of it stays in the file),
  /// InvalidArgument when a name comes twice.
  void write(const MetricRecord& record);

 private:
  struct Close {
    void operator()(std::FILE* file) const noexcept { std::fclose(file); }
  };

  std::filesystem::path path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace rowan
