#include "rowan/train/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "rowan/core/error.h"

namespace rowan {
namespace {

constexpr const char* kColors[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"};  // Okabe and Ito
constexpr const char* kInk = "#24292f";
constexpr const char* kMuted = "#6e7781";
constexpr const char* kGrid = "#e4e7eb";
constexpr double kFont = 13;
constexpr double kRow = 20;  // height of a line of text

// About the width of a text in a sans-serif font.
double text_width(const std::string& text) {
  const auto letters = std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; });
  return 0.56 * kFont * static_cast<double>(letters);
}

std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      default:
        out += static_cast<unsigned char>(c) < ' ' ? ' ' : c;
    }
  }
  return out;
}

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -low;

  void include(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
};

// Values of one coordinate and their pixels.
struct Axis {
  Range range;
  bool log = false;
  double first_pixel = 0;
  double last_pixel = 1;
  std::vector<double> ticks = {};

  bool has_place(double value) const { return (log ? value >= 1e-300 : value >= -1e300) && value <= 1e300; }
  double pixel(double value) const {
    const auto scaled = [this](double v) { return log ? std::log10(v) : v; };
    const double part = (scaled(value) - scaled(range.low)) / (scaled(range.high) - scaled(range.low));
    return first_pixel + part * (last_pixel - first_pixel);
  }

  // Gives an empty or single-valued range some width.
  void widen() {
    if (range.low > range.high) range = log ? Range{0.1, 1} : Range{0, 1};
    if (range.high - range.low > 1e-6 * std::max(std::abs(range.low), std::abs(range.high)) + 1e-300) return;
    const double margin = range.low == 0 ? 1 : std::abs(range.low) / 2;
    range = {range.low - margin, range.high + margin};
  }

  // Moves both ends outwards to round values, and puts ticks at these and between; with `about` >= 5 there are two to
  // tell the step.
  void round_outwards(int about) {
    if (log) {
      ticks = log_ticks(range.low / 10, range.high * 10);
      const auto above = std::lower_bound(ticks.begin(), ticks.end(), range.high * (1 - 1e-9));
      const auto below = std::upper_bound(ticks.begin(), ticks.end(), range.low * (1 + 1e-9)) - 1;
      ticks = std::vector<double>(below, above + 1);
    } else {
      ticks = round_ticks(range.low, range.high, about);
      const double step = ticks[1] - ticks[0];
      if (range.low < ticks.front()) ticks.insert(ticks.begin(), ticks.front() - step);
      if (range.high > ticks.back()) ticks.push_back(ticks.back() + step);
    }
    range = {std::min(range.low, ticks.front()), std::max(range.high, ticks.back())};
  }
};

class Plot {
 public:
  explicit Plot(const PlotSpec& spec) : spec_(spec) {
    y_.log = spec.log_y;
    find_ranges();
    lay_out();
  }

  std::string draw() {
    add("<svg xmlns='http://www.w3.org/2000/svg' width='{0}' height='{1}' viewBox='0 0 {0} {1}' role='img' "
        "font-family='system-ui, Segoe UI, Liberation Sans, Arial, sans-serif' font-size='{2}' fill='{3}'>\n",
        spec_.width, spec_.height, kFont, kInk);
    add("<title>{}</title>\n", escaped(spec_.title));
    add("<rect width='{}' height='{}' fill='#ffffff'/>\n", spec_.width, spec_.height);
    draw_axes();
    draw_marks();
    for (std::size_t i = 0; i < spec_.series.size(); ++i) draw_line(spec_.series[i], color(i));
    draw_legend();
    add("</svg>\n");
    return svg_;
  }

 private:
  template <class... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(svg_), format, std::forward<Args>(args)...);
  }

  void add_text(double x, double y, const char* attributes, const std::string& text) {
    if (!text.empty()) add("<text x='{:.1f}' y='{:.1f}' {}>{}</text>\n", x, y, attributes, escaped(text));
  }

  void add_segment(double x1, double y1, double x2, double y2, const char* attributes) {
    add("<line x1='{:.1f}' y1='{:.1f}' x2='{:.1f}' y2='{:.1f}' {}/>\n", x1, y1, x2, y2, attributes);
  }

  static const char* color(std::size_t i) { return kColors[i % std::size(kColors)]; }

  bool has_place(const PlotSeries& series, std::size_t i) const {
    return x_.has_place(series.x[i]) && y_.has_place(series.y[i]);
  }

  void find_ranges() {
    for (const PlotSeries& series : spec_.series) {
      for (std::size_t i = 0; i < series.x.size(); ++i) {
        if (!has_place(series, i)) continue;
        x_.range.include(series.x[i]);
        y_.range.include(series.y[i]);
      }
    }
    for (const PlotMark& level : spec_.levels) {
      if (y_.has_place(level.at)) y_.range.include(level.at);
    }
    for (const PlotMark& event : spec_.events) {
      if (x_.has_place(event.at)) x_.range.include(event.at);
    }
    x_.widen();
    y_.widen();
  }

  void lay_out() {
    double label_width = 0;
    for (const PlotMark& level : spec_.levels) label_width = std::max(label_width, text_width(level.label) + 8);
    left_ = 68;
    right_ = std::max(left_ + 40, spec_.width - 24 - label_width);
    place_legend();
    const bool labelled_events = std::any_of(spec_.events.begin(), spec_.events.end(),
                                             [](const PlotMark& event) { return !event.label.empty(); });
    top_ = legend_bottom_ + (labelled_events ? kRow : 0);
    bottom_ = std::max(top_ + 40, spec_.height - 52.0);

    x_.first_pixel = left_;
    x_.last_pixel = right_;
    y_.first_pixel = bottom_;
    y_.last_pixel = top_;
    x_.ticks = round_ticks(x_.range.low, x_.range.high, std::max(2, static_cast<int>((right_ - left_) / 90)));
    y_.round_outwards(std::max(5, static_cast<int>((bottom_ - top_) / 50)));
  }

  // Legend entries stand in rows under the title.
  void place_legend() {
    double x = left_;
    legend_bottom_ = spec_.title.empty() ? 16 : 42;
    for (std::size_t i = 0; i < spec_.series.size(); ++i) {
      if (spec_.series[i].label.empty()) continue;
      const double width = 28 + text_width(spec_.series[i].label) + 20;
      if (!legend_.empty() && x + width > spec_.width) {
        x = left_;
        legend_bottom_ += kRow;
      }
      legend_.push_back({i, x, legend_bottom_ + 8});
      x += width;
    }
    if (!legend_.empty()) legend_bottom_ += kRow + 8;
  }

  void draw_axes() {
    for (double tick : y_.ticks) {
      const double y = y_.pixel(tick);
      add_segment(left_, y, right_, y, fmt::format("stroke='{}'", kGrid).c_str());
      add_text(left_ - 8, y + 4.5, "text-anchor='end'", fmt::format("{:.10g}", tick));
    }
    const std::string axis = fmt::format("stroke='{}'", kMuted);
    for (double tick : x_.ticks) {
      const double x = x_.pixel(tick);
      add_segment(x, bottom_, x, bottom_ + 5, axis.c_str());
      add_text(x, bottom_ + 20, "text-anchor='middle'", fmt::format("{:.10g}", tick));
    }
    add_segment(left_, bottom_, right_, bottom_, axis.c_str());
    add_text(left_, 26, "font-size='16' font-weight='600'", spec_.title);
    add_text((left_ + right_) / 2, spec_.height - 12.0, "text-anchor='middle'", spec_.x_label);
    const double middle = (top_ + bottom_) / 2;
    add_text(18, middle, fmt::format("text-anchor='middle' transform='rotate(-90 18 {:.1f})'", middle).c_str(),
             spec_.y_label);
  }

  void draw_marks() {
    const std::string dashed = fmt::format("stroke='{}' stroke-dasharray='5 4'", kMuted);
    for (const PlotMark& event : spec_.events) {
      if (!x_.has_place(event.at)) continue;
      const double x = x_.pixel(event.at);
      add_segment(x, top_, x, bottom_, dashed.c_str());
      const bool fits_right = x + text_width(event.label) < spec_.width;
      add_text(x, top_ - 6, fits_right ? "text-anchor='start'" : "text-anchor='end'", event.label);
    }
    std::vector<PlotMark> levels;
    std::copy_if(spec_.levels.begin(), spec_.levels.end(), std::back_inserter(levels),
                 [this](const PlotMark& level) { return y_.has_place(level.at); });
    std::stable_sort(levels.begin(), levels.end(), [](const PlotMark& a, const PlotMark& b) { return a.at < b.at; });
    double lowest_free = spec_.height;
    for (const PlotMark& level : levels) {  // from the bottom up, no label on another
      const double y = y_.pixel(level.at);
      add_segment(left_, y, right_, y, dashed.c_str());
      const double label_y = std::min(y, lowest_free);
      add_text(right_ + 8, label_y + 4.5, "text-anchor='start'", level.label);
      if (!level.label.empty()) lowest_free = label_y - kFont - 2;
    }
  }

  void draw_line(const PlotSeries& series, const char* stroke) {
    for (std::size_t i = 0; i < series.x.size();) {
      std::size_t end = i;
      while (end < series.x.size() && has_place(series, end)) ++end;
      if (end - i == 1) {
        add("<circle cx='{:.1f}' cy='{:.1f}' r='3' fill='{}'/>\n", x_.pixel(series.x[i]), y_.pixel(series.y[i]),
            stroke);
      } else if (end > i) {
        add("<polyline fill='none' stroke='{}' stroke-width='1.8' stroke-linejoin='round' points='", stroke);
        for (; i < end; ++i) add("{:.1f},{:.1f} ", x_.pixel(series.x[i]), y_.pixel(series.y[i]));
        svg_.back() = '\'';
        add("/>\n");
      }
      i = end + 1;
    }
  }

  void draw_legend() {
    for (const auto& [series, x, y] : legend_) {
      add_segment(x, y, x + 20, y, fmt::format("stroke='{}' stroke-width='3'", color(series)).c_str());
      add_text(x + 28, y + 4.5, "text-anchor='start'", spec_.series[series].label);
    }
  }

  struct LegendEntry {
    std::size_t series;
    double x, y;
  };

  const PlotSpec& spec_;
  std::string svg_;
  Axis x_, y_;
  double left_ = 0, right_ = 0, top_ = 0, bottom_ = 0, legend_bottom_ = 0;
  std::vector<LegendEntry> legend_;
};

}  // namespace

std::vector<double> round_ticks(double low, double high, int about) {
  if (!(low < high) || !std::isfinite(high - low) || about < 1) return {};
  const double rough = (high - low) / about;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  double step = 10 * power;
  for (double factor : {5, 2, 1}) {
    if (factor * power >= rough * (1 - 1e-9)) step = factor * power;
  }
  const double slack = 1e-9 * step;  // an end that is a tick but for rounding
  const double first = std::ceil((low - slack) / step);
  std::vector<double> ticks;
  for (int i = 0; i <= about + 1; ++i) {
    const double tick = (first + i) * step;
    if (tick > high + slack) break;
    ticks.push_back(tick);
  }
  return ticks;
}

std::vector<double> log_ticks(double low, double high) {
  if (!(0 < low && low < high) || !std::isfinite(high)) return {};
  std::vector<double> ticks, powers;
  for (double exponent = std::floor(std::log10(low)); exponent <= std::ceil(std::log10(high)); ++exponent) {
    for (double factor : {1, 2, 5}) {
      const double tick = factor * std::pow(10, exponent);
      if (tick < low * (1 - 1e-9) || tick > high * (1 + 1e-9)) continue;
      ticks.push_back(tick);
      if (factor == 1) powers.push_back(tick);
    }
  }
  return ticks.size() > 10 ? powers : ticks;
}

std::string line_plot_svg(const PlotSpec& spec) {
  if (spec.width < 200 || spec.height < 200) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("line_plot_svg: expected at least 200 x 200 pixels, got {} x {}", spec.width, spec.height));
  }
  for (const PlotSeries& series : spec.series) {
    if (series.x.size() == series.y.size()) continue;
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("line_plot_svg: series \"{}\": expected as many x as y, got {} and {}", series.label,
                            series.x.size(), series.y.size()));
  }
  return Plot(spec).draw();
}

std::string stacked_plots_svg(const std::vector<PlotSpec>& specs) {
  if (specs.empty()) throw Error(ErrorKind::kInvalidArgument, "stacked_plots_svg: expected at least one plot");
  if (specs.size() == 1) return line_plot_svg(specs[0]);
  int width = 0, height = 0;
  std::string plots;
  for (const PlotSpec& spec : specs) {
    plots += fmt::format("<g transform='translate(0 {})'>\n{}</g>\n", height, line_plot_svg(spec));
    width = std::max(width, spec.width);
    height += spec.height;
  }
  return fmt::format(
      "<svg xmlns='http://www.w3.org/2000/svg' width='{0}' height='{1}' viewBox='0 0 {0} {1}'>\n{2}</svg>\n", width,
      height, plots);
}

}  // namespace rowan
