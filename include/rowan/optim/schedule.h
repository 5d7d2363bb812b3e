// Learning rates over a run, as multiples of the peak rate.
#pragma once

#include <cstdint>
#include <string>

namespace rowan {

/// A schedule is a pure function of the number of attempted steps, so a run that resumes at a step goes on with the
/// same rate. Names and shapes follow Transformers' schedulers; the warm-up follows nanoGPT, so that the first step's
/// rate is not zero.
struct Schedule {
  enum class Type {
    kConstant,  ///< 1
    kLinear,    ///< straight from 1 to min_ratio at total_steps
    kCosine,    ///< half a cosine from 1 to min_ratio at total_steps
    kWsd,       ///< warm-up, stable, decay (arXiv 2404.06395): 1, then straight to min_ratio over the last decay_steps
  };

  Type type = Type::kConstant;
  std::int64_t total_steps = 0;   ///< of the run; kConstant does not use it
  std::int64_t warmup_steps = 0;  ///< of every type: step s below it has the ratio (s + 1) / (warmup_steps + 1)
  double min_ratio = 0;           ///< in [0, 1]; kConstant does not use it
  std::int64_t decay_steps = 0;   ///< kWsd only; 0: a fifth of total_steps, at least 1 (arXiv 2405.18392 uses 20 %)
};

/// "constant", "linear", "cosine", "wsd".
const char* to_string(Schedule::Type type) noexcept;

/// The reverse; also "constant_with_warmup" and "warmup_stable_decay". Throws InvalidArgument naming the text and the
/// accepted names.
Schedule::Type parse_schedule_type(const std::string& text);

/// Throws InvalidArgument naming the field and its value: negative steps, total_steps < 1 where it is used, warm-up
/// (and decay) longer than total_steps, min_ratio outside [0, 1], or min_ratio and decay_steps set for a type that does
/// not use them.
void check_schedule(const Schedule& schedule);

/// What the peak rate is multiplied with in step `step`, counted from 0 over all attempted steps, skipped ones
/// included. min_ratio from total_steps on (kConstant: 1). Throws as check_schedule does, and for step < 0.
double schedule_ratio(const Schedule& schedule, std::int64_t step);

}  // namespace rowan
