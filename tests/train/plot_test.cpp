#include "rowan/train/plot.h"

#include <cmath>
#include <cstdlib>
#include <limits>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/core/rng.h"

using rowan::line_plot_svg;
using rowan::log_ticks;
using rowan::PlotSpec;
using rowan::round_ticks;

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t n = 0;
  for (std::size_t at = text.find(part); at != text.npos; at = text.find(part, at + part.size())) ++n;
  return n;
}

// A check for the XML that plots consist of: elements nest, attribute values stand in quotes, text holds no bare markup
// and no control byte. Empty when all is well.
std::string xml_fault(const std::string& xml) {
  std::vector<std::string> open;
  std::size_t roots = 0;
  for (std::size_t at = 0; at < xml.size();) {
    const char c = xml[at];
    if (static_cast<unsigned char>(c) < ' ' && c != '\n') return "control byte";
    if (c == '&') {
      const std::string entity = xml.substr(at, xml.find(';', at) - at);
      if (entity != "&amp" && entity != "&lt" && entity != "&gt") return "entity " + entity.substr(0, 10);
    }
    if (c == '>') return "bare >";
    if (c != '<') {
      ++at;
      continue;
    }
    const std::size_t end = xml.find('>', at);
    if (end == xml.npos) return "unclosed tag";
    std::string tag = xml.substr(at + 1, end - at - 1);
    at = end + 1;
    if (tag[0] == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return "unexpected </" + tag.substr(1) + ">";
      open.pop_back();
      continue;
    }
    const bool closed = tag.back() == '/';
    if (closed) tag.pop_back();
    const std::string name = tag.substr(0, tag.find(' '));
    if (tag.find('<') != tag.npos || count(tag, "'") != 2 * count(tag, "='")) return "attributes of " + name;
    if (open.empty() && roots++ > 0) return "second root";
    if (!closed) open.push_back(name);
  }
  return open.empty() && roots == 1 ? "" : "unclosed element";
}

// The numbers between `before` and the next quote.
std::vector<double> numbers_after(const std::string& svg, const std::string& before) {
  std::vector<double> numbers;
  const std::size_t at = svg.find(before);
  if (at == svg.npos) return numbers;
  const char* text = svg.c_str() + at + before.size();
  while (*text != '\'') {
    char* end = nullptr;
    numbers.push_back(std::strtod(text, &end));
    if (end == text) return {};
    text = *end == ',' || *end == ' ' ? end + 1 : end;
  }
  return numbers;
}

bool close(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!(std::abs(a[i] - b[i]) <= 1e-12 * std::abs(b[i]))) return false;
  }
  return true;
}

PlotSpec loss_curve() {
  PlotSpec spec;
  spec.title = "loss";
  spec.x_label = "step";
  spec.y_label = "nats per byte";
  spec.series = {{"pre-training", {0, 1, 2, 3}, {5.5, 2, 1, 0.5}}, {"fine-tuning", {3, 4, 5}, {4, 0.5, 0.4}}};
  spec.levels = {{0.43, "entropy, plain"}, {0.36, "entropy, pirate"}};
  spec.events = {{3, "LoRA"}};
  return spec;
}

}  // namespace

TEST_CASE("round ticks are multiples of 1, 2 or 5 times a power of ten within the range") {
  CHECK(close(round_ticks(0, 10, 5), {0, 2, 4, 6, 8, 10}));
  CHECK(close(round_ticks(0.36, 5.5, 6), {1, 2, 3, 4, 5}));
  CHECK(close(round_ticks(-1, 1, 4), {-1, -0.5, 0, 0.5, 1}));
  CHECK(close(round_ticks(0, 0.3, 3), {0, 0.1, 0.2, 0.3}));
  CHECK(close(round_ticks(1.3e6, 2.2e6, 5), {1.4e6, 1.6e6, 1.8e6, 2e6, 2.2e6}));
  CHECK(close(round_ticks(0, 700, 5), {0, 200, 400, 600}));
}

TEST_CASE("round ticks stay within range and number for any range") {
  rowan::Rng rng(2);
  for (int trial = 0; trial < 5000; ++trial) {
    const double low = rng.normal() * std::pow(10, static_cast<double>(rng.below(20)) - 10);
    const double high = low + rng.uniform() * std::pow(10, static_cast<double>(rng.below(20)) - 10);
    const int about = 5 + static_cast<int>(rng.below(6));
    const std::vector<double> ticks = round_ticks(low, high, about);
    CAPTURE(low, high, about);
    if (high - low < 1e-6 * std::abs(low)) continue;  // beyond double's digits nothing is promised
    CHECK(ticks.size() >= 2);
    CHECK(ticks.size() <= static_cast<std::size_t>(about + 1));
    for (std::size_t i = 0; i < ticks.size(); ++i) {
      CHECK(ticks[i] >= low - 1e-6 * (high - low));
      CHECK(ticks[i] <= high + 1e-6 * (high - low));
      if (i > 0) CHECK(ticks[i] > ticks[i - 1]);
    }
  }
}

TEST_CASE("logarithmic ticks are 1, 2 and 5 in each decade, or powers of ten where there are many decades") {
  CHECK(close(log_ticks(0.2, 10), {0.2, 0.5, 1, 2, 5, 10}));
  CHECK(close(log_ticks(0.3, 0.4), {}));
  CHECK(close(log_ticks(1e-4, 10), {1e-4, 1e-3, 1e-2, 0.1, 1, 10}));
}

TEST_CASE("a range without extent or end has no ticks") {
  for (const auto& [low, high] :
       std::vector<std::pair<double, double>>{{1, 1}, {2, 1}, {kNaN, 1}, {0, kInfinity}, {-1e308, 1e308}}) {
    CHECK(round_ticks(low, high, 5).empty());
  }
  for (const auto& [low, high] :
       std::vector<std::pair<double, double>>{{0, 1}, {-1, 1}, {1, 1}, {1, kInfinity}, {kNaN, 1}}) {
    CHECK(log_ticks(low, high).empty());
  }
}

TEST_CASE("a loss curve shows every series, level and event") {
  PlotSpec spec = loss_curve();
  spec.log_y = GENERATE(false, true);
  const std::string svg = line_plot_svg(spec);
  CHECK(xml_fault(svg) == "");
  CHECK(count(svg, "<polyline") == 2);
  CHECK(count(svg, "stroke-dasharray") == 3);
  for (const char* text :
       {"loss", "step", "nats per byte", "pre-training", "fine-tuning", "entropy, plain", "entropy, pirate", "LoRA"}) {
    CAPTURE(text);
    CHECK(count(svg, std::string(">") + text + "</text>") == 1);
  }
  CHECK(svg == line_plot_svg(spec));
}

TEST_CASE("points lie where the axes say, within the picture") {
  PlotSpec spec;
  spec.log_y = GENERATE(false, true);
  spec.series = {{"", {0, 5, 10}, spec.log_y ? std::vector<double>{0.01, 1, 100} : std::vector<double>{-2, 0, 2}}};
  const std::vector<double> p = numbers_after(line_plot_svg(spec), "points='");
  REQUIRE(p.size() == 6);
  CHECK(std::abs(p[2] - (p[0] + p[4]) / 2) <= 0.1);
  CHECK(std::abs(p[3] - (p[1] + p[5]) / 2) <= 0.1);
  CHECK(p[0] < p[4]);
  CHECK(p[1] > p[5]);  // up is larger
  for (std::size_t i = 0; i < 6; i += 2) {
    CHECK(p[i] >= 0);
    CHECK(p[i] <= spec.width);
    CHECK(p[i + 1] >= 0);
    CHECK(p[i + 1] <= spec.height);
  }
}

TEST_CASE("points without a place are skipped and part their line") {
  PlotSpec spec;
  spec.series = {{"a", {0, 1, 2, 3, 4, 5, kNaN, 7}, {1, 2, kNaN, 3, kInfinity, 2, 1, 2}}};
  const std::string svg = line_plot_svg(spec);
  CHECK(count(svg, "<polyline") == 1);  // 0-1
  CHECK(count(svg, "<circle") == 3);    // 3, 5 and 7
  CHECK(count(svg, "nan") == 0);
  CHECK(count(svg, "inf") == 0);
  CHECK(xml_fault(svg) == "");
}

TEST_CASE("a logarithmic axis has no place for zero and negative values") {
  PlotSpec spec;
  spec.log_y = true;
  spec.series = {{"a", {0, 1, 2, 3, 4}, {1, 0.5, 0, -1, 0.25}}};
  spec.levels = {{0, "nowhere"}};
  const std::string svg = line_plot_svg(spec);
  CHECK(count(svg, "<polyline") == 1);
  CHECK(count(svg, "<circle") == 1);
  CHECK(count(svg, "nowhere") == 0);
  CHECK(count(svg, "nan") + count(svg, "inf") == 0);
}

TEST_CASE("plots of nothing, of one point and of extreme values are valid") {
  std::vector<PlotSpec> specs(8);
  specs[1].series = {{"empty", {}, {}}};
  specs[2].series = {{"nothing finite", {0, 1}, {kNaN, -kInfinity}}};
  specs[3].series = {{"one point", {3}, {0.5}}};
  specs[4].series = {{"constant", {0, 1, 2}, {7, 7, 7}}};
  specs[5].series = {{"huge", {0, 1, 2}, {-1e308, 1e308, 0}}};
  specs[6].series = {{"tiny", {0, 1, 2}, {0, 5e-324, 1e-320}}};
  specs[7].series = {{"diverged", {0, 1, 2, 3, 4}, {1e-299, 1, 1e6, 1e30, 1e300}}};
  for (PlotSpec& spec : specs) {
    for (bool log_y : {false, true}) {
      spec.log_y = log_y;
      const std::string svg = line_plot_svg(spec);
      CAPTURE(spec.series.empty() ? "" : spec.series[0].label, log_y, svg);
      CHECK(xml_fault(svg) == "");
      CHECK(count(svg, "='nan") + count(svg, ",nan") + count(svg, "='inf") + count(svg, ">nan") == 0);
    }
  }
}

TEST_CASE("any text in a plot is escaped") {
  PlotSpec spec = loss_curve();
  const std::string nasty = "a<b> & \"c\" 'd' \x01\n</svg> \xc3\xa9";
  spec.title = spec.x_label = spec.y_label = spec.series[0].label = spec.levels[0].label = spec.events[0].label = nasty;
  const std::string svg = line_plot_svg(spec);
  CHECK(xml_fault(svg) == "");
  CHECK(count(svg, "a&lt;b&gt; &amp; \"c\" 'd'   &lt;/svg&gt; \xc3\xa9") == 7);  // the title also names the picture
}

TEST_CASE("labels of neighbouring levels do not cover one another") {
  PlotSpec spec = loss_curve();
  spec.levels = {{0.36, "lower"}, {0.37, "upper"}};
  const std::string svg = line_plot_svg(spec);
  const auto y_of = [&](const std::string& label) {
    const std::size_t end = svg.find(">" + label + "<");
    return numbers_after(svg.substr(svg.rfind("<text", end)), "y='").at(0);
  };
  CHECK(y_of("lower") - y_of("upper") >= 13);
}

TEST_CASE("a malformed plot is refused") {
  PlotSpec spec = loss_curve();
  spec.series[0].y.pop_back();
  CHECK_THROWS_AS(line_plot_svg(spec), rowan::Error);
  spec = loss_curve();
  spec.height = 199;
  CHECK_THROWS_AS(line_plot_svg(spec), rowan::Error);
}

TEST_CASE("stacked plots stand below one another in one document") {
  PlotSpec a, b;
  a.title = "first";
  b.title = "second";
  a.height = 300;
  b.width = 500;
  const std::string svg = rowan::stacked_plots_svg({a, b});
  CHECK(svg.find("width='840' height='780'") != std::string::npos);
  CHECK(svg.find("translate(0 300)") < svg.find("second"));
  CHECK(svg.find("translate(0 300)") > svg.find("first"));
  CHECK(rowan::stacked_plots_svg({a}) == line_plot_svg(a));
  CHECK_THROWS_AS(rowan::stacked_plots_svg({}), rowan::Error);
}
