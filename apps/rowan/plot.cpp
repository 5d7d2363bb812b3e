#include "plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <limits>
#include <optional>
#include <set>
#include <sstream>

#include "exit_code.h"
#include "output_paths.h"
#include "rowan/core/error.h"
#include "rowan/io/atomic_file.h"
#include "rowan/train/metrics.h"
#include "rowan/train/plot.h"

namespace rowan::app {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const std::string& message) { throw Error(ErrorKind::kInvalidArgument, message); }

std::optional<double> number(const MetricRecord& record, const std::string& name) {
  for (const auto& [key, value] : record) {
    if (key != name) continue;
    if (const auto* real = std::get_if<double>(&value)) return *real;
    if (const auto* integer = std::get_if<std::int64_t>(&value)) return static_cast<double>(*integer);
    if (const auto* flag = std::get_if<bool>(&value)) return *flag ? 1 : 0;
  }
  return std::nullopt;
}

std::string stage_of(const MetricRecord& record) {
  for (const auto& [key, value] : record) {
    if (const auto* text = std::get_if<std::string>(&value); text != nullptr && key == "stage") return *text;
  }
  return "";
}

struct Run {
  std::string path;
  std::string label;
  std::vector<MetricRecord> records;
};

std::vector<Run> read_runs(const PlotOptions& options) {
  if (!options.labels.empty() && options.labels.size() != options.runs.size())
    refuse(
        fmt::format("plot: expected a label for each of {} runs, got {}", options.runs.size(), options.labels.size()));
  std::vector<Run> runs;
  std::set<std::string> names;
  for (const std::string& path : options.runs) {
    std::error_code ignored;
    const fs::path file = fs::is_directory(path, ignored) ? fs::path(path) / "metrics.jsonl" : fs::path(path);
    const fs::path name = fs::path(path).lexically_normal();
    runs.push_back({path, (name.has_filename() ? name : name.parent_path()).filename().string(),
                    reading_input([&] { return read_metrics(file); })});
    names.insert(runs.back().label);
  }
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (names.size() < runs.size()) runs[i].label = runs[i].path;  // the names alone do not tell them apart
    if (!options.labels.empty()) runs[i].label = options.labels[i];
  }
  return runs;
}

/// Averages as TensorBoard's slider does: exponentially, without a bias to zero at the start. What is not finite stays.
void smooth(std::vector<double>& values, double weight) {
  double sum = 0, correction = 1;
  for (double& value : values) {
    if (!std::isfinite(value)) continue;
    sum = weight * sum + (1 - weight) * value;
    correction *= weight;
    value = sum / (1 - correction);
  }
}

/// One line for each stage of the run.
std::vector<PlotSeries> series_of(const Run& run, const std::string& metric, const PlotOptions& options) {
  std::vector<PlotSeries> lines;
  std::vector<std::string> stages;
  std::vector<double> sums;  // of x where it is counted up
  for (const MetricRecord& record : run.records) {
    const std::string stage = stage_of(record);
    const auto place = static_cast<std::size_t>(std::ranges::find(stages, stage) - stages.begin());
    if (place == stages.size()) {
      stages.push_back(stage);
      lines.push_back({stage.empty() ? run.label : run.label + " " + stage, {}, {}});
      sums.push_back(0);
    }
    double x = number(record, options.x).value_or(std::numeric_limits<double>::quiet_NaN());
    if (options.x != "step") x = sums[place] += std::isfinite(x) ? x : 0;
    const std::optional<double> y = number(record, metric);
    if (!y || std::isnan(x)) continue;
    PlotSeries& line = lines[place];
    while (!line.x.empty() && line.x.back() >= x && options.x == "step") {  // a run resumed from an earlier step
      line.x.pop_back();
      line.y.pop_back();
    }
    line.x.push_back(x);
    line.y.push_back(*y);
  }
  std::erase_if(lines, [](const PlotSeries& line) { return line.x.empty(); });
  for (PlotSeries& line : lines) smooth(line.y, options.smoothing);
  return lines;
}

std::vector<std::string> split(const std::string& names) {
  std::vector<std::string> parts;
  std::istringstream stream(names);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

std::string metrics_of(const std::vector<Run>& runs) {
  std::set<std::string> names;
  for (const Run& run : runs) {
    for (const MetricRecord& record : run.records) {
      for (const auto& [name, value] : record) {
        if (name != "step" && !std::holds_alternative<std::string>(value)) names.insert(name);
      }
    }
  }
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
}

PlotSpec plot_of(const std::vector<Run>& runs, const std::string& names, const PlotOptions& options) {
  PlotSpec plot;
  plot.x_label = options.x == "step" ? "step" : options.x + " so far";
  plot.y_label = names;
  plot.log_y = options.log_y;
  const std::vector<std::string> metrics = split(names);
  for (const std::string& metric : metrics) {
    const std::size_t before = plot.series.size();
    for (const Run& run : runs) {
      for (PlotSeries& line : series_of(run, metric, options)) {
        if (metrics.size() > 1) line.label += " " + metric;
        plot.series.push_back(std::move(line));
      }
    }
    if (plot.series.size() == before)
      refuse(fmt::format("plot: no run has a metric '{}'; there are {}", metric, metrics_of(runs)));
  }
  if (plot.series.empty()) refuse("plot: expected the name of a metric");
  if (options.smoothing > 0) plot.y_label += fmt::format(", smoothed {:g}", options.smoothing);
  return plot;
}

}  // namespace

void run_plot(const PlotOptions& options) {
  const std::vector<Run> runs = read_runs(options);
  std::vector<PlotSpec> plots;
  for (const std::string& names : options.metrics) plots.push_back(plot_of(runs, names, options));
  plots[0].title = options.title;
  InputPaths inputs;
  for (const std::filesystem::path run : options.runs)
    inputs.emplace_back("the runs", std::filesystem::is_directory(run) ? run / "metrics.jsonl" : run);
  require_output_file(options.out, inputs);
  write_text_file(options.out, stacked_plots_svg(plots));
  for (const PlotSpec& plot : plots) {
    for (const PlotSeries& line : plot.series)
      std::cout << fmt::format("{}: {}, {} points\n", plot.y_label, line.label, line.x.size());
  }
  std::cout << fmt::format("wrote {}\n", options.out);
}

}  // namespace rowan::app
