// Line plots as SVG, for loss curves.
#pragma once

#include <string>
#include <vector>

namespace rowan {

struct PlotSeries {
  std::string label;      ///< in the legend; without one the series is not listed there
  std::vector<double> x;  ///< as many as y
  std::vector<double> y;
};

/// A dashed line across the whole plot.
struct PlotMark {
  double at = 0;
  std::string label;
};

struct PlotSpec {
  std::string title;
  std::string x_label;
  std::string y_label;
  std::vector<PlotSeries> series;
  std::vector<PlotMark> levels;  ///< horizontal, at a value of y: a bound, an entropy
  std::vector<PlotMark> events;  ///< vertical, at a value of x: where something begins
  bool log_y = false;
  int width = 840;  ///< pixels, at least 200; so is the height
  int height = 480;
};

/// The plot as one SVG document on a white background; all texts are UTF-8. A point that has no place (NaN, beyond
/// 1e300, or below 1e-300 on a logarithmic axis) is left out and parts its line in two; a point alone is a dot. Equal
/// specs give equal bytes. Throws InvalidArgument when a series' x and y differ in length or the size is too small.
std::string line_plot_svg(const PlotSpec& spec);

/// Plots below one another in one SVG document. Throws as line_plot_svg, and InvalidArgument for no plots.
std::string stacked_plots_svg(const std::vector<PlotSpec>& specs);

/// The multiples of 1, 2 or 5 times a power of ten within [low, high], in a spacing that gives at most about + 1 of
/// them. None unless low < high and the range is finite.
std::vector<double> round_ticks(double low, double high, int about);

/// 1, 2 and 5 times the powers of ten within [low, high], or powers of ten alone where that gives more than ten. None
/// unless 0 < low < high < infinity.
std::vector<double> log_ticks(double low, double high);

}  // namespace rowan
