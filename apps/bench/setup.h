// What all benchmarks need: a device with its measured ceilings, random tensors, and a place for results.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "rowan/core/tensor.h"
#include "timing.h"

namespace rowan::bench {

struct Options {
  std::string device = "auto";
  std::string results;   ///< folder for JSON files; empty: none are written
  bool peers = false;    ///< also time PyTorch and PEFT through python3
  bool all = false;      ///< every combination instead of one axis at a time
  bool ceilings = true;  ///< measure copy speed and launch time first
  TimingOptions timing;
};

/// Results of one benchmark: tables for people, JSON for programs, figures for summary.json.
class Report {
 public:
  using Row = nlohmann::ordered_json;

  /// A flat object; rows of a table have the same members, which become its columns.
  void add(const std::string& table, Row row);
  /// One figure of summary.json.
  void figure(const std::string& name, double value) { figures_[name] = value; }
  /// Prints a table: numbers with up to four significant digits.
  void print(const std::string& table) const;
  /// Writes FOLDER/NAME.json and adds the figures to FOLDER/summary.json.
  void write(const std::string& folder, const std::string& name, const Row& environment) const;

 private:
  std::vector<std::pair<std::string, std::vector<Row>>> tables_;
  std::map<std::string, double> figures_;
};

class Setup {
 public:
  explicit Setup(const Options& options);

  StreamRef stream() const noexcept { return stream_; }
  const TimingOptions& timing() const noexcept { return options_.timing; }
  const Options& options() const noexcept { return options_; }
  bool on_cuda() const noexcept { return stream_.device().is_cuda(); }

  /// Bytes read plus written a microsecond by a large copy; measured in this run.
  double copy_bytes_per_us() const noexcept { return copy_bytes_per_us_; }
  double floor_us(double bytes) const noexcept { return bytes / copy_bytes_per_us_; }
  /// Buffer sets to rotate over so that calls that touch `bytes` each find nothing in the L2 cache (three times its
  /// size), at most `most`.
  int rotations(double bytes, int most = 640) const;

  /// Random normal values times `scale`, rows with spare columns where asked for.
  Tensor random(const Shape& shape, DType dtype, double scale = 1, std::int64_t slack = 0);
  /// Overwrites a tensor of rank 2 with such values.
  void randomize(const Tensor& tensor, double scale = 1);

  /// Card, driver, versions, commit, date; copy speed and launch time where measured.
  Report::Row environment() const;

 private:
  Options options_;
  Stream stream_;
  Tensor pool_;  // float32 random values that all tensors are cut from
  std::int64_t next_ = 0;
  double l2_bytes_ = 0, copy_bytes_per_us_ = 0, launch_us_ = 0;
};

}  // namespace rowan::bench
