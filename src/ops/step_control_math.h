// The scalar part of the step control, the same on both devices.
#pragma once

#include <cmath>

#include "rowan/core/rng.h"
#include "rowan/ops/step_control.h"

namespace rowan::detail {

inline constexpr double kLargestStepNorm = 1e18;

ROWAN_HOST_DEVICE inline void finish_step_control(double* control, double max_norm) {
  const double norm = sqrt(control[StepControl::kSquareSum]);
  const double factor = max_norm > 0 && norm > max_norm ? max_norm / norm : 1.0;
  const bool skip = !(norm * factor <= kLargestStepNorm);  // also for NaN and infinity
  control[StepControl::kFactor] = skip ? 1.0 : factor;
  control[StepControl::kSkip] = skip ? 1.0 : 0.0;
  if (skip) control[StepControl::kSkipCount] += 1.0;
}

ROWAN_HOST_DEVICE inline void count_skipped_step(double* control) {
  control[StepControl::kSquareSum] = 0.0;
  control[StepControl::kFactor] = 1.0;
  control[StepControl::kSkip] = 1.0;
  control[StepControl::kSkipCount] += 1.0;
}

ROWAN_HOST_DEVICE inline void advance_step(const double* control, bool active, std::int64_t* step,
                                           double* parameter_control) {
  for (int i = 0; i < 4; ++i) parameter_control[i] = control[i];
  if (!active) parameter_control[StepControl::kSkip] = 1.0;
  if (parameter_control[StepControl::kSkip] == 0.0) *step += 1;
}

}  // namespace rowan::detail
