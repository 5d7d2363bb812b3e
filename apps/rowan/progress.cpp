#include "progress.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string_view>
#include <vector>

namespace rowan::app {
namespace {

constexpr double kBarPeriod = 0.1;  // seconds
constexpr double kLinePeriod = 5;
constexpr int kDefaultColumns = 80;  // where the terminal does not tell
constexpr int kShortestBar = 8;
constexpr int kLongestBar = 40;
constexpr std::string_view kGap = "  ";

std::string duration(double seconds) {
  const auto s = static_cast<std::int64_t>(std::clamp(seconds, 0.0, 1e15));
  if (s < 3600) return fmt::format("{}:{:02}", s / 60, s % 60);
  return fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

std::string rate(double per_second) {
  if (per_second < 1e3) return fmt::format("{:.0f}", per_second);
  if (per_second < 1e6) return fmt::format("{:.1f}k", per_second / 1e3);
  return fmt::format("{:.1f}M", per_second / 1e6);
}

std::string memory_text(double bytes) {
  return bytes < 0x1p30 ? fmt::format("{:.0f} MiB", bytes / 0x1p20) : fmt::format("{:.1f} GiB", bytes / 0x1p30);
}

std::string bar(const ProgressState& state, int width) {
  const double part = std::clamp(static_cast<double>(state.step) / static_cast<double>(state.total), 0.0, 1.0);
  const int full = static_cast<int>(part * width);
  std::string text(static_cast<std::size_t>(full), '=');
  if (full < width) text += '>';
  text.resize(static_cast<std::size_t>(width), ' ');
  return fmt::format("[{}]", text);
}

int terminal_columns() {
  winsize size{};
  return ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : kDefaultColumns;
}

double steady_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

ProgressOutput ProgressOutput::standard_error() {
  const char* terminal = std::getenv("TERM");
  const bool moves = terminal != nullptr && std::string_view(terminal) != "dumb" && ::isatty(STDERR_FILENO) == 1;
  return {std::cerr, moves ? ProgressStyle::kBar : ProgressStyle::kLines, terminal_columns, steady_seconds};
}

std::string progress_line(const std::string& label, const ProgressState& state, double seconds, int columns) {
  const std::string total = fmt::to_string(state.total);
  const std::string head = fmt::format("{}{}{:>{}}/{}", label, kGap, state.step, total.size(), total);
  std::vector<std::string> facts = {fmt::format("loss {:.4f}", state.loss)};
  if (state.step >= state.total) {
    facts.push_back(duration(seconds));
  } else if (state.step > state.first) {
    const auto left = static_cast<double>(state.total - state.step);
    facts.push_back(duration(seconds / static_cast<double>(state.step - state.first) * left) + " left");
  }
  if (seconds > 0) facts.push_back(rate(static_cast<double>(state.tokens) / seconds) + " tok/s");
  facts.push_back(fmt::format("lr {:.1e}", state.learning_rate));
  if (state.gradient_norm != 0) facts.push_back(fmt::format("norm {:.3g}", state.gradient_norm));
  if (state.memory_bytes > 0) facts.push_back(memory_text(static_cast<double>(state.memory_bytes)));

  if (columns <= 0) return fmt::format("{}{}{}", head, kGap, fmt::join(facts, kGap));
  const auto length = [](const std::string& text) { return static_cast<int>(text.size()); };
  const int frame = 3;  // a blank and two brackets
  const bool has_bar = state.total > 0 && length(head) + frame + kShortestBar + 2 + length(facts[0]) <= columns;
  int room = columns - length(head) - (has_bar ? frame + kShortestBar : 0);
  std::string tail;
  for (const std::string& fact : facts) {
    room -= 2 + length(fact);
    if (room < 0) break;
    tail.append(kGap).append(fact);
  }
  if (!has_bar) return (head + tail).substr(0, static_cast<std::size_t>(columns));
  const int width = columns - length(head) - length(tail) - frame;
  return fmt::format("{} {}{}", head, bar(state, std::min(width, kLongestBar)), tail);
}

Progress::Progress(std::string label, ProgressOutput output)
    : label_(std::move(label)), output_(std::move(output)), start_(output_.seconds()) {}

Progress::~Progress() {
  try {
    close();
  } catch (...) {  // a display is not worth an exception
  }
}

void Progress::update(const ProgressState& state) {
  const double period = output_.style == ProgressStyle::kBar ? kBarPeriod : kLinePeriod;
  const bool first = !started_;
  started_ = true;
  state_ = state;
  pending_ = true;
  if (first || state.step >= state.total || output_.seconds() - last_shown_ >= period) show();
}

void Progress::show() {
  last_shown_ = output_.seconds();
  pending_ = false;
  const double elapsed = last_shown_ - start_;
  if (output_.style == ProgressStyle::kBar) {
    // One column stays free: a full line would make some terminals wrap.
    output_.stream << '\r' + progress_line(label_, state_, elapsed, std::max(output_.columns() - 1, 1)) + "\x1b[K"
                   << std::flush;
    line_is_open_ = true;
  } else if (output_.style == ProgressStyle::kLines) {
    output_.stream << progress_line(label_, state_, elapsed, 0) + '\n' << std::flush;
  }
}

void Progress::print(const std::string& line) {
  if (output_.style == ProgressStyle::kQuiet) return;
  output_.stream << (line_is_open_ ? "\r\x1b[K" : "") + line + '\n' << std::flush;
  if (line_is_open_) show();
}

void Progress::close() {
  if (pending_) show();
  if (line_is_open_) output_.stream << '\n' << std::flush;
  line_is_open_ = false;
}

}  // namespace rowan::app
