// Metrics as TensorBoard reads them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

#include "rowan/train/metrics.h"

namespace rowan {

/// Writes an event file (TFRecord framing with masked CRC32C, protobuf Event messages with Summary values) into a
/// directory that `tensorboard --logdir` is given. Each writer makes a file of its own; one that takes up a run at an
/// earlier step hides what the run before it wrote from that step on. Every record is handed to the operating system
/// whole before a call returns.
class TensorBoardWriter final : public MetricsSink {
 public:
  /// Makes the directory where needed, and DIRECTORY/events.out.tfevents.SECONDS.HOST.PID.N. Throws Io naming what it
  /// could not make.
  explicit TensorBoardWriter(const std::filesystem::path& directory);

  /// One scalar a numeric or boolean value, at the record's "step" (0 without one); texts are left out. The time is
  /// now. Throws Io when it could not be stored.
  void write(const MetricRecord& record) override;
  /// One scalar; wall_time in seconds since 1970.
  void add_scalar(std::string_view tag, double value, std::int64_t step, double wall_time);

  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  struct Close {
    void operator()(std::FILE* file) const noexcept { std::fclose(file); }
  };

  void write_event(std::int64_t step, double wall_time, std::string_view fields);
  void write_record(std::string_view data);

  std::filesystem::path path_;
  std::unique_ptr<std::FILE, Close> file_;
  bool started_ = false;
};

}  // namespace rowan
