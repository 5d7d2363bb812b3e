#include "rowan/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/check.h"

namespace rowan {

using Type = Schedule::Type;

const char* to_string(Type type) noexcept {
  switch (type) {
    case Type::kConstant:
      return "constant";
    case Type::kLinear:
      return "linear";
    case Type::kCosine:
      return "cosine";
    case Type::kWsd:
      return "wsd";
  }
  return "unknown";
}

Type parse_schedule_type(const std::string& text) {
  for (const Type type : {Type::kConstant, Type::kLinear, Type::kCosine, Type::kWsd}) {
    if (text == to_string(type)) return type;
  }
  if (text == "constant_with_warmup") return Type::kConstant;
  if (text == "warmup_stable_decay") return Type::kWsd;
  detail::fail(ErrorKind::kInvalidArgument, "schedule: expected constant, linear, cosine or wsd, got \"{}\"", text);
}

namespace {

std::int64_t decay_steps(const Schedule& s) {
  return s.decay_steps > 0 ? s.decay_steps : std::max<std::int64_t>(s.total_steps / 5, 1);
}

/// From 0 at `begin` to 1 at total_steps and beyond.
double progress(const Schedule& s, std::int64_t begin, std::int64_t step) {
  if (step >= s.total_steps) return 1;
  if (step <= begin) return 0;
  return static_cast<double>(step - begin) / static_cast<double>(s.total_steps - begin);
}

}  // namespace

void check_schedule(const Schedule& s) {
  detail::require(s.warmup_steps >= 0, "schedule: expected warmup_steps >= 0, got {}", s.warmup_steps);
  detail::require(s.decay_steps >= 0, "schedule: expected decay_steps >= 0, got {}", s.decay_steps);
  detail::require(s.min_ratio >= 0 && s.min_ratio <= 1, "schedule: expected min_ratio in [0, 1], got {}", s.min_ratio);
  detail::require(s.type == Type::kWsd || s.decay_steps == 0,
                  "schedule: expected decay_steps with wsd only, got {} with {}", s.decay_steps, to_string(s.type));
  if (s.type == Type::kConstant) {
    detail::require(s.min_ratio == 0, "schedule: expected no min_ratio with constant, got {}", s.min_ratio);
    return;
  }
  detail::require(s.total_steps >= 1, "schedule: expected total_steps >= 1 for {}, got {}", to_string(s.type),
                  s.total_steps);
  const std::int64_t decay = s.type == Type::kWsd ? decay_steps(s) : 0;
  detail::require(s.warmup_steps <= s.total_steps - decay,
                  "schedule: expected at most {} warmup_steps of {} total_steps with {} of decay, got {}",
                  s.total_steps - decay, s.total_steps, decay, s.warmup_steps);
}

double schedule_ratio(const Schedule& s, std::int64_t step) {
  check_schedule(s);
  detail::require(step >= 0, "schedule: expected step >= 0, got {}", step);
  if (step < s.warmup_steps) return static_cast<double>(step + 1) / static_cast<double>(s.warmup_steps + 1);
  double left = 1;  // of the way from min_ratio up to 1
  switch (s.type) {
    case Type::kConstant:
      return 1;
    case Type::kLinear:
      left = 1 - progress(s, s.warmup_steps, step);
      break;
    case Type::kCosine:
      left = 0.5 * (1 + std::cos(std::numbers::pi * progress(s, s.warmup_steps, step)));
      break;
    case Type::kWsd:
      left = 1 - progress(s, s.total_steps - decay_steps(s), step);
      break;
  }
  return s.min_ratio + (1 - s.min_ratio) * left;
}

}  // namespace rowan
