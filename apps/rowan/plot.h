// Metrics of several runs in one picture.
#pragma once

#include <string>
#include <vector>

namespace rowan::app {

struct PlotOptions {
  std::vector<std::string> runs;                ///< directories with metrics.jsonl, or such files
  std::vector<std::string> metrics = {"loss"};  ///< a plot each; names joined by commas share one
  std::string x = "step";
  std::vector<std::string> labels;  ///< one a run; empty: their names
  double smoothing = 0;
  bool log_y = false;
  std::string title;
  std::string out = "plot.svg";
};

/// Writes the picture and prints what is in it.
void run_plot(const PlotOptions& options);

}  // namespace rowan::app
