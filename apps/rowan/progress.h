// How far a run is: a bar on a terminal, plain lines elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>

namespace rowan::app {

struct ProgressState {
  std::int64_t step = 0;  ///< steps done
  std::int64_t total = 0;
  double loss = 0;
  double learning_rate = 0;
  std::int64_t tokens = 0;       ///< in all steps of this phase so far
  std::int64_t first = 0;        ///< steps that were done before this phase
  double gradient_norm = 0;      ///< shown unless 0
  std::size_t memory_bytes = 0;  ///< likewise
};

enum class ProgressStyle { kQuiet, kLines, kBar };

/// Where progress goes to.
struct ProgressOutput {
  std::ostream& stream;
  ProgressStyle style;
  std::function<int()> columns;     ///< the terminal's width now
  std::function<double()> seconds;  ///< a clock that never goes back

  /// Standard error: a bar when it is a terminal that can go back in a line, else lines. Results have standard output
  /// to themselves.
  static ProgressOutput standard_error();
};

/// "tune  120/250 [====>     ]  loss 1.2340  0:12 left  15.2k tok/s  lr 1.0e-02  norm 0.31  1.2 GiB" in at most
/// `columns` columns: what stands last is left out first, the bar when it would leave no room for the loss. With
/// `columns` 0 everything but the bar.
std::string progress_line(const std::string& label, const ProgressState& state, double seconds, int columns);

/// Shows one phase of a run. A bar is redrawn at most ten times a second, lines come every five seconds; the first and
/// the last state are always shown. Nothing but text, carriage return and erase-to-end-of-line goes to the terminal, so
/// that whatever ends the program leaves it usable.
class Progress {
 public:
  explicit Progress(std::string label, ProgressOutput output = ProgressOutput::standard_error());
  /// Closes.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void update(const ProgressState& state);
  /// Writes a line of its own above the bar.
  void print(const std::string& line);
  /// Shows the last state, if it was not yet, and ends the line. Does nothing the second time.
  void close();

 private:
  void show();

  std::string label_;
  ProgressOutput output_;
  double start_;
  double last_shown_ = 0;
  ProgressState state_;
  bool pending_ = false;       // state_ was not shown
  bool line_is_open_ = false;  // the cursor stands behind a bar
  bool started_ = false;
};

}  // namespace rowan::app
