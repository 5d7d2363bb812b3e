// The arithmetic of one Muown row between its sums and its elements, the same on both devices. T is the weight's type.
#pragma once

#include <cmath>

#include "rowan/core/rng.h"
#include "rowan/ops/step_control.h"

namespace rowan::detail {

/// x to the power of a whole number, by squaring: the same bits on every device.
ROWAN_HOST_DEVICE inline double whole_power(double x, std::int64_t n) {
  double result = 1;
  for (; n > 0; n >>= 1) {
    if (n & 1) result *= x;
    x *= x;
  }
  return result;
}

/// The larger of x and floor; NaN stays NaN.
template <class T>
ROWAN_HOST_DEVICE inline T at_least(T x, T floor) {
  return x < floor ? floor : x;
}

/// g^: the magnitude kept away from zero, with its sign.
template <class T>
ROWAN_HOST_DEVICE inline T guarded_magnitude(T g, T epsilon) {
  const T size = at_least(g < 0 ? -g : g, epsilon);
  return g < 0 ? -size : size;
}

/// The gradient's factor and whether the step is skipped; no control: 1 and never.
ROWAN_HOST_DEVICE inline double control_factor(const double* control) {
  return control ? control[StepControl::kFactor] : 1.0;
}
ROWAN_HOST_DEVICE inline bool control_skips(const double* control) {
  return control && control[StepControl::kSkip] != 0.0;
}

/// What muown_finish needs beside the rows, from options and device values.
struct FinishConstants {
  double decay = 0;           ///< lr * weight decay
  double magnitude_rate = 0;  ///< lr * magnitude_lr
  double beta1 = 0;
  double beta2 = 0;
  double correction1 = 1;  ///< 1 / (1 - beta1^t)
  double correction2 = 1;
  double epsilon = 0;
  double factor = 1;  ///< of the gradient
  bool warm = false;
  bool angular = false;
};

/// Least magnitude of a row whose direction is angular.
inline constexpr double kLeastAngularMagnitude = 1e-7;

/// Sums over one row; d = W (r / g^) - lr c O.
struct FinishSums {
  double dd = 0;
  double dw = 0;  ///< <d, W>, needed with decay
  double ww = 0;  ///< needed with decay and for rows that may be cold
  double oo = 0;  ///< the last two only for rows that may be cold
  double go = 0;  ///< <G, O>
  int moved = 0;  ///< lr c O is not zero everywhere
};

enum class RowMode : int {
  kKeep,  ///< W and r stay as they are
  kStep,  ///< W' = scale d - decay W
  kWake,  ///< W' = scale O
};

template <class T>
struct RowPlan {
  T scale = 0;
  T decay = 0;
  RowMode mode = RowMode::kKeep;
};

/// The scalars of one row, read and written by finish_row.
template <class T>
struct RowState {
  T magnitude;
  T norm;
  T first_moment;
  T second_moment;
};

/// True when the row's W may be zero by the cold rule, so that the sums oo and go are needed.
template <class T>
ROWAN_HOST_DEVICE inline bool may_be_cold(const FinishConstants& k, T magnitude) {
  return k.warm && magnitude == 0;
}

template <class T>
ROWAN_HOST_DEVICE inline RowPlan<T> finish_row(const FinishConstants& k, const FinishSums& sums, T magnitude_grad,
                                               RowState<T>& row) {
  const bool cold = may_be_cold(k, row.magnitude) && sums.ww == 0;
  if (cold && sums.oo == 0) return {};
  const double length = cold ? sqrt(sums.oo) : 1.0;
  const double gg = cold ? -k.factor * sums.go / length : static_cast<double>(magnitude_grad);
  const double m = k.beta1 * row.first_moment + (1 - k.beta1) * gg;
  const double v = k.beta2 * row.second_moment + (1 - k.beta2) * gg * gg;
  double moved = row.magnitude - k.magnitude_rate * (m * k.correction1) / (sqrt(v * k.correction2) + k.epsilon);
  if (k.angular && !cold) {
    const double size = at_least(row.magnitude < 0 ? -moved : moved, kLeastAngularMagnitude);
    moved = row.magnitude < 0 ? -size : size;
  }
  const T g = static_cast<T>(moved);
  row.first_moment = static_cast<T>(m);
  row.second_moment = static_cast<T>(v);
  if (!sums.moved && g == row.magnitude && k.decay == 0) return {};

  RowPlan<T> plan;
  if (cold) {
    plan.mode = RowMode::kWake;
    plan.scale = static_cast<T>(-static_cast<double>(g) / length);
    row.magnitude = g;
    row.norm = k.angular ? T(1) : at_least(g < 0 ? -g : g, static_cast<T>(k.epsilon));
    return plan;
  }
  const double n = at_least(sqrt(sums.dd), k.epsilon);
  plan.mode = RowMode::kStep;
  plan.scale = static_cast<T>(static_cast<double>(g) / n);
  plan.decay = static_cast<T>(k.decay);
  row.norm = k.angular ? T(1) : static_cast<T>(n);
  row.magnitude = g;
  if (k.decay != 0) {
    // W' = f d - w W, so its length and its product with d follow from the sums; no second pass over the row.
    const double f = plan.scale, w = plan.decay;
    const double square = f * f * sums.dd - 2 * f * w * sums.dw + w * w * sums.ww;
    const double size = at_least(sqrt(at_least(square, 0.0)), k.epsilon);
    row.magnitude = static_cast<T>(f * sums.dd - w * sums.dw < 0 ? -size : size);
  }
  return plan;
}

}  // namespace rowan::detail
