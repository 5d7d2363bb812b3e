#include "rowan/optim/schedule.h"

#include <cmath>
#include <limits>
#include <string>

#include "catch.h"
#include "rowan/core/error.h"

using namespace rowan;
using Type = Schedule::Type;

namespace {

bool near(double a, double b) { return std::abs(a - b) <= 1e-15; }

template <class F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kInvalidArgument);
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("warm-up climbs in equal steps from above zero to the peak, in every schedule") {
  for (const Type type : {Type::kConstant, Type::kLinear, Type::kCosine, Type::kWsd}) {
    Schedule s;
    s.type = type;
    s.total_steps = 100;
    s.warmup_steps = 4;
    CAPTURE(to_string(type));
    for (int step = 0; step < 4; ++step) CHECK(near(schedule_ratio(s, step), 0.2 * (step + 1)));
    CHECK(schedule_ratio(s, 4) == 1);
    s.warmup_steps = 0;
    CHECK(schedule_ratio(s, 0) == 1);
  }
}

TEST_CASE("constant stays at the peak for ever") {
  CHECK(schedule_ratio({}, 0) == 1);
  CHECK(schedule_ratio({}, 1LL << 60) == 1);
}

TEST_CASE("linear falls in a straight line to min_ratio at the last step and stays there") {
  const Schedule s{Type::kLinear, 110, 10, 0.2, 0};
  CHECK(schedule_ratio(s, 10) == 1);
  CHECK(near(schedule_ratio(s, 60), 0.6));
  CHECK(near(schedule_ratio(s, 109), 0.2 + 0.8 * 0.01));
  CHECK(schedule_ratio(s, 110) == 0.2);
  CHECK(schedule_ratio(s, 1000) == 0.2);
}

TEST_CASE("cosine falls along half a wave to min_ratio at the last step and stays there") {
  const Schedule s{Type::kCosine, 100, 20, 0.1, 0};
  CHECK(schedule_ratio(s, 20) == 1);
  CHECK(near(schedule_ratio(s, 60), 0.55));
  CHECK(near(schedule_ratio(s, 40), 0.1 + 0.9 * 0.5 * (1 + std::sqrt(0.5))));
  CHECK(schedule_ratio(s, 100) == 0.1);
  CHECK(schedule_ratio(s, 101) == 0.1);
}

TEST_CASE("wsd holds the peak and falls over its last steps, a fifth of all when not said otherwise") {
  Schedule s{Type::kWsd, 100, 10, 0, 40};
  CHECK(schedule_ratio(s, 10) == 1);
  CHECK(schedule_ratio(s, 60) == 1);
  CHECK(near(schedule_ratio(s, 70), 0.75));
  CHECK(near(schedule_ratio(s, 99), 0.025));
  CHECK(schedule_ratio(s, 100) == 0);
  s.decay_steps = 0;
  CHECK(schedule_ratio(s, 80) == 1);
  CHECK(near(schedule_ratio(s, 90), 0.5));
  s = {Type::kWsd, 2, 0, 0, 0};
  CHECK(schedule_ratio(s, 1) == 1);
  CHECK(schedule_ratio(s, 2) == 0);
}

TEST_CASE("schedules never rise after the warm-up nor leave [min_ratio, 1]") {
  for (const Type type : {Type::kLinear, Type::kCosine, Type::kWsd}) {
    for (const std::int64_t warmup : {0, 1, 7, 29}) {
      const Schedule s{type, 37, warmup, 0.3, 0};
      double before = 1;
      for (std::int64_t step = warmup; step < 60; ++step) {
        const double ratio = schedule_ratio(s, step);
        CHECK(ratio <= before);
        CHECK(ratio >= 0.3);
        before = ratio;
      }
    }
  }
}

TEST_CASE("schedule names are read and written as the common trainers spell them") {
  for (const Type type : {Type::kConstant, Type::kLinear, Type::kCosine, Type::kWsd})
    CHECK(parse_schedule_type(to_string(type)) == type);
  CHECK(parse_schedule_type("constant_with_warmup") == Type::kConstant);
  CHECK(parse_schedule_type("warmup_stable_decay") == Type::kWsd);
  for (const char* text : {"", "Cosine", "polynomial"}) {
    const std::string message = refusal([&] { parse_schedule_type(text); });
    CHECK(message.find("\"" + std::string(text) + "\"") != std::string::npos);
    CHECK(message.find("constant, linear, cosine or wsd") != std::string::npos);
  }
}

TEST_CASE("schedules that make no sense are refused naming the field") {
  const auto names = [](const Schedule& s, const std::string& word) {
    const std::string message = refusal([&] { schedule_ratio(s, 0); });
    CAPTURE(message);
    CHECK(message.find(word) != std::string::npos);
  };
  names({Type::kLinear, 10, -1, 0, 0}, "warmup_steps >= 0, got -1");
  names({Type::kLinear, 0, 0, 0, 0}, "total_steps >= 1");
  names({Type::kCosine, 10, 11, 0, 0}, "got 11");
  names({Type::kWsd, 10, 6, 0, 5}, "got 6");
  names({Type::kWsd, 10, 0, 0, -5}, "decay_steps");
  names({Type::kCosine, 10, 0, 0, 5}, "decay_steps with wsd only");
  names({Type::kCosine, 10, 0, 1.5, 0}, "min_ratio");
  names({Type::kCosine, 10, 0, std::numeric_limits<double>::quiet_NaN(), 0}, "min_ratio");
  names({Type::kConstant, 0, 0, 0.5, 0}, "no min_ratio with constant");
  CHECK(refusal([] { schedule_ratio({}, -1); }).find("step >= 0, got -1") != std::string::npos);
}
