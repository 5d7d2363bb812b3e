// What a run measures, and where it goes.
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
/// Names and values measured at one time, in the order in which they are written: {{"step", 3}, {"loss", 0.25}}. A
/// training run's records begin with "step" (int64, optimizer steps done); those of a step and those of an evaluation
/// share no other name ("loss", "eval_loss").
using MetricRecord = std::vector<std::pair<std::string, MetricValue>>;

/// Takes what a run measures: a file, a display, a monitoring service. Called from one thread.
class MetricsSink {
 public:
  virtual ~MetricsSink() = default;
  MetricsSink(const MetricsSink&) = delete;
  MetricsSink& operator=(const MetricsSink&) = delete;

  /// Throws Io when the record could not be stored; the run then ends with that error.
  virtual void write(const MetricRecord& record) = 0;

 protected:
  MetricsSink() = default;
};

/// Appends records to a JSON Lines file. A line is handed to the operating system whole before write() returns, so a
/// reader sees every step at once and a killed run loses at most the line it was writing.
class MetricsWriter final : public MetricsSink {
 public:
  /// Opens `path`, which is made when it is missing. A last line without its newline, left by a run that was killed, is
  /// removed. Throws Io naming the file.
  explicit MetricsWriter(const std::filesystem::path& path);

  /// A double is written with the fewest digits that read back to the same bits, NaN and infinities as null, a byte
  /// that is not UTF-8 as U+FFFD. Throws Io when the line could not be stored (nothing of it stays in the file),
  /// InvalidArgument when a name comes twice.
  void write(const MetricRecord& record) override;

 private:
  struct Close {
    void operator()(std::FILE* file) const noexcept { std::fclose(file); }
  };

  std::filesystem::path path_;
  std::unique_ptr<std::FILE, Close> file_;
};

/// Drops the records of a JSON Lines file from the first one on whose "step" is above `step`: what a run that goes on
/// from a checkpoint of that step is about to write again. Replaces the file atomically; no error where there is none.
/// Throws Io.
void drop_metrics_after(const std::filesystem::path& path, std::int64_t step);

/// The records of a JSON Lines file, null as NaN; a last line without its newline, which may be torn, is passed over.
/// Throws Io when the file cannot be read; Format naming file and line for what is no object of numbers, texts and
/// booleans.
std::vector<MetricRecord> read_metrics(const std::filesystem::path& path);

}  // namespace rowan
