#include "progress.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "catch.h"

using rowan::app::Progress;
using rowan::app::progress_line;
using rowan::app::ProgressOutput;
using rowan::app::ProgressState;
using rowan::app::ProgressStyle;

namespace {

const ProgressState kMiddle = {120, 250, 1.23401, 0.01, 245760};

// Progress into a string, with a clock that the test turns.
struct Screen {
  std::ostringstream stream;
  double now = 100;
  int columns = 80;

  ProgressOutput output(ProgressStyle style) {
    return {stream, style, [this] { return columns; }, [this] { return now; }};
  }
  std::string text() const { return stream.str(); }
  std::size_t count(const std::string& part) const {
    std::size_t n = 0;
    for (std::size_t at = text().find(part); at != std::string::npos; at = text().find(part, at + 1)) ++n;
    return n;
  }
};

}  // namespace

TEST_CASE("a progress line tells step, loss, time left, speed and learning rate") {
  CHECK(progress_line("pre-train", kMiddle, 16, 0) ==
        "pre-train  120/250  loss 1.2340  0:17 left  15.4k tok/s  lr 1.0e-02");
  CHECK(progress_line("pre-train", kMiddle, 16, 80) ==
        "pre-train  120/250 [====>     ]  loss 1.2340  0:17 left  15.4k tok/s  lr 1.0e-02");
  CHECK(progress_line("tune", {250, 250, 0.5, 1e-4, 512000}, 3725, 0) ==
        "tune  250/250  loss 0.5000  1:02:05  137 tok/s  lr 1.0e-04");
  CHECK(progress_line("tune", {0, 9, std::nan(""), 0, 0}, 0, 0) == "tune  0/9  loss nan  lr 0.0e+00");
}

TEST_CASE("a progress line tells gradient norm and memory where they are known, and counts time from its own start") {
  ProgressState state = kMiddle;
  state.first = 100;
  state.gradient_norm = 0.31234;
  state.memory_bytes = std::size_t{3} << 29;
  CHECK(progress_line("tune", state, 16, 0) ==
        "tune  120/250  loss 1.2340  1:44 left  15.4k tok/s  lr 1.0e-02  norm 0.312  1.5 GiB");
  state.memory_bytes = 5 << 20;
  CHECK(progress_line("tune", state, 16, 0).ends_with("  5 MiB"));
}

TEST_CASE("a progress line never passes the terminal's width") {
  for (int columns = 1; columns < 200; ++columns) {
    CAPTURE(columns);
    const std::string line = progress_line("pre-train", kMiddle, 16, columns);
    CHECK(line.size() <= static_cast<std::size_t>(columns));
    if (columns >= 19 + 13) CHECK(line.find("loss 1.2340") != std::string::npos);
  }
  CHECK(progress_line("pre-train", kMiddle, 16, 60) == "pre-train  120/250 [=======>       ]  loss 1.2340  0:17 left");
  CHECK(progress_line("pre-train", kMiddle, 16, 34) == "pre-train  120/250  loss 1.2340");
  CHECK(progress_line("pre-train", kMiddle, 16, 8) == "pre-trai");
}

TEST_CASE("a progress bar fills from empty to full") {
  const auto bar = [](std::int64_t step) {
    const std::string line = progress_line("", {step, 8, 0, 0, 0}, 0, 200);
    return line.substr(line.find('['), line.find(']') - line.find('[') + 1);
  };
  CHECK(bar(0) == "[>" + std::string(39, ' ') + "]");
  CHECK(bar(4) == "[" + std::string(20, '=') + ">" + std::string(19, ' ') + "]");
  CHECK(bar(8) == "[" + std::string(40, '=') + "]");
  CHECK(bar(9) == bar(8));
}

TEST_CASE("progress without a terminal is a line every five seconds, the first and the last always") {
  Screen screen;
  {
    Progress progress("tune", screen.output(ProgressStyle::kLines));
    for (int step = 1; step <= 12; ++step) {
      screen.now += 1;
      progress.update({step, 12, 0.5, 0.1, 0});
    }
  }
  CHECK(screen.count("\n") == 4);
  for (const char* shown : {" 1/12", " 6/12", "11/12", "12/12"}) CHECK(screen.count(shown) == 1);
  CHECK(screen.count("\r") + screen.count("\x1b") + screen.count("[") == 0);
}

TEST_CASE("progress on a terminal redraws one line at most ten times a second and ends it once") {
  Screen screen;
  {
    Progress progress("tune", screen.output(ProgressStyle::kBar));
    for (int step = 1; step <= 100; ++step) {
      screen.now += 0.01;
      progress.update({step, 100, 0.5, 0.1, 0});
    }
    CHECK(screen.count("\r") >= 9);
    CHECK(screen.count("\r") <= 12);
    CHECK(screen.count("\n") == 0);
    CHECK(screen.count("100/100") == 1);
    progress.close();
    progress.close();
  }
  CHECK(screen.count("\n") == 1);
  CHECK(screen.text().back() == '\n');
  CHECK(screen.count("\r") == screen.count("\x1b[K"));
}

TEST_CASE("progress that is left early shows its last state and ends its line") {
  for (ProgressStyle style : {ProgressStyle::kBar, ProgressStyle::kLines}) {
    Screen screen;
    try {
      Progress progress("tune", screen.output(style));
      progress.update({1, 10, 0.5, 0.1, 0});
      progress.update({2, 10, 0.5, 0.1, 0});
      throw 0;
    } catch (int) {
    }
    CHECK(screen.count(" 2/10") == 1);
    CHECK(screen.text().back() == '\n');
  }
  Screen untouched;
  Progress("tune", untouched.output(ProgressStyle::kBar)).close();
  CHECK(untouched.text().empty());
}

TEST_CASE("a progress bar follows the terminal's width and leaves its last column free") {
  Screen screen;
  Progress progress("pre-train", screen.output(ProgressStyle::kBar));
  for (int columns : {100, 40, 1}) {
    screen.stream.str("");
    screen.columns = columns;
    screen.now += 1;
    progress.update(kMiddle);
    CHECK(screen.text().size() <= static_cast<std::size_t>(std::max(columns - 1, 1)) + 4);  // and \r, ESC [ K
  }
}

TEST_CASE("a message stands on a line of its own above the progress bar") {
  Screen screen;
  Progress progress("tune", screen.output(ProgressStyle::kBar));
  progress.print("before");
  CHECK(screen.text() == "before\n");
  progress.update(kMiddle);
  screen.stream.str("");
  progress.print("saved");
  CHECK(screen.text().substr(0, 10) == "\r\x1b[Ksaved\n");
  CHECK(screen.text().substr(10, 6) == "\rtune ");
}

TEST_CASE("quiet progress writes nothing") {
  Screen screen;
  {
    Progress progress("tune", screen.output(ProgressStyle::kQuiet));
    progress.update({1, 2, 0.5, 0.1, 0});
    progress.print("saved");
    progress.update({2, 2, 0.5, 0.1, 0});
  }
  CHECK(screen.text().empty());
}
