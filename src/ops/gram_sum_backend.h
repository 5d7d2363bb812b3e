// Private backend of ops/gram_sum.h: what is neither a product nor a scaled copy.
#pragma once

#include <cmath>
#include <cstdint>

#include "ops/newton_schulz_backend.h"
#include "rowan/core/stream.h"

namespace rowan {

namespace detail {

/// 2^-e with 2^(e-1) <= largest < 2^e; 1 where there is nothing to scale.
ROWAN_HOST_DEVICE inline double gram_power(double largest) {
  if (!(largest > 0) || largest > 1.7976931348623157e308) return 1;
  int exponent = 0;
  frexp(largest, &exponent);
  return ldexp(1.0, -exponent);
}

}  // namespace detail

struct GramNormArguments {
  const float* gram = nullptr;  ///< [batches, side, side]
  const float* largest = nullptr;
  std::int64_t batches = 0;
  std::int64_t side = 0;
  double factor = 1;
  double epsilon = 0;
  double* inverse = nullptr;         ///< 1 / nu
  double* inverse_square = nullptr;  ///< 1 / nu^2
};

namespace cpu {
void gram_largest(const NewtonSchulzMatrix& t, float* largest);
void gram_powers(const float* largest, std::int64_t count, double* powers);
void gram_norms(const GramNormArguments& arguments);
}  // namespace cpu

namespace cuda {
void gram_largest(const NewtonSchulzMatrix& t, float* largest, StreamRef stream);
void gram_powers(const float* largest, std::int64_t count, double* powers, StreamRef stream);
void gram_norms(const GramNormArguments& arguments, StreamRef stream);
}  // namespace cuda

}  // namespace rowan
