// Private backend of Newton-Schulz: the same calls for both devices, but for kernels that only one of them has.
#pragma once

#include <cmath>
#include <cstdint>

#include "rowan/core/dtype.h"
#include "rowan/core/rng.h"
#include "rowan/core/stream.h"
#include "rowan/ops/newton_schulz.h"

namespace rowan {

/// Element (b, i, j) lies at b * batch_stride + i * row_stride + j.
struct NewtonSchulzMatrix {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t batches = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;

  ROWAN_HOST_DEVICE bool is_wide() const { return rows <= cols; }
  ROWAN_HOST_DEVICE std::int64_t short_side() const { return is_wide() ? rows : cols; }
  ROWAN_HOST_DEVICE std::int64_t long_side() const { return is_wide() ? cols : rows; }
};

/// inverse[b] = 1 / (factor ||u_b|| + epsilon), 0 where that divides by zero.
struct InverseNormArguments {
  NewtonSchulzMatrix u;
  const double* square_sums = nullptr;  ///< null: taken from u
  std::int64_t square_sum_count = 0;    ///< a matrix
  std::int64_t square_sum_stride = 0;   ///< from one matrix to the next
  double factor = 1;
  double epsilon = 0;
  bool round_to_bfloat16 = false;  ///< the norm, and again after epsilon
  double* inverse = nullptr;       ///< [batches]
};

/// Steps of the iteration, by value in kernel arguments.
struct NewtonSchulzSteps {
  static constexpr int kMost = 64;
  int count = 0;
  NewtonSchulzCoefficients step[kMost];
};

/// The iteration on Gram matrices in float32: out = Q (u inverse), Q from R = X X^T.
struct GramFloatArguments {
  NewtonSchulzMatrix u;
  NewtonSchulzMatrix out;
  const double* inverse = nullptr;
  NewtonSchulzSteps steps;
};

/// One stack of matrices of the skinny path, in a launch over many. out may be u. Matrices, and the blocks of each
/// kernel, are numbered through all stacks.
struct SkinnyStack {
  NewtonSchulzMatrix u;
  NewtonSchulzMatrix out;
  const double* square_sums = nullptr;  ///< as in InverseNormArguments
  std::int64_t square_sum_count = 0;
  std::int64_t square_sum_stride = 0;
  std::int64_t first_matrix = 0;
  std::int64_t first_gram_block = 0;
  std::int64_t first_apply_block = 0;
};

/// Stacks of one launch with all their scratch memory, on the device. Their u, and their out, share a dtype, and their
/// short sides pad to the same side.
struct SkinnyTable {
  const SkinnyStack* stacks = nullptr;
  const std::int32_t* stack_of_matrix = nullptr;
  const std::int32_t* stack_of_gram_block = nullptr;
  const std::int32_t* stack_of_apply_block = nullptr;
  std::int64_t matrices = 0, gram_blocks = 0, apply_blocks = 0;
  double* inverse = nullptr;     ///< [matrices]
  float* partials = nullptr;     ///< [gram_blocks, side, side]
  float* polynomials = nullptr;  ///< [matrices, side, side]
};

namespace detail {

/// x with `bits` significant bits, rounded to nearest even, at any magnitude.
ROWAN_HOST_DEVICE inline double round_significand(double x, int bits) {
  if (!(x > 0) || x > 1.7976931348623157e308) return x;  // zero, NaN, infinity; norms are not negative
  int exponent = 0;
  const double fraction = frexp(x, &exponent);
  return ldexp(rint(ldexp(fraction, bits)), exponent - bits);
}

ROWAN_HOST_DEVICE inline double inverse_norm(double square_sum, double factor, double epsilon, bool round_to_bfloat16) {
  constexpr int kBits = 8;
  double size = factor * sqrt(square_sum);
  if (round_to_bfloat16)
    size = round_significand(round_significand(size, kBits) + epsilon, kBits);
  else
    size += epsilon;
  return size == 0 ? 0.0 : 1 / size;
}

}  // namespace detail

namespace cpu {
void inverse_norms(const InverseNormArguments& arguments);
/// x = u inverse[b] scale, or its transpose where u is tall, rounded once, in the upper left of x's matrices; zeros
/// elsewhere.
void newton_schulz_load(const NewtonSchulzMatrix& u, const double* inverse, double scale, const NewtonSchulzMatrix& x);
/// q += factor I for square matrices.
void newton_schulz_add_identity(const NewtonSchulzMatrix& q, double factor);
/// out = scale x, or its transpose where out is tall, reading the upper left of x's matrices.
void newton_schulz_store(const NewtonSchulzMatrix& x, double scale, const NewtonSchulzMatrix& out);
void newton_schulz_gram_float(const GramFloatArguments& arguments);
/// The polar factor of u in float64 by one-sided Jacobi rotations.
void polar_factor(const NewtonSchulzMatrix& u, const NewtonSchulzMatrix& out);
}  // namespace cpu

namespace cuda {
/// Doubles of scratch memory for inverse_norms.
std::int64_t inverse_norms_workspace(const InverseNormArguments& arguments);
void inverse_norms(const InverseNormArguments& arguments, double* workspace, StreamRef stream);
void newton_schulz_load(const NewtonSchulzMatrix& u, const double* inverse, double scale, const NewtonSchulzMatrix& x,
                        StreamRef stream);
void newton_schulz_add_identity(const NewtonSchulzMatrix& q, double factor, StreamRef stream);
void newton_schulz_store(const NewtonSchulzMatrix& x, double scale, const NewtonSchulzMatrix& out, StreamRef stream);
/// Side that a short side of up to 64 is padded to, and blocks that a stack takes.
int skinny_side(const NewtonSchulzMatrix& u);
std::int64_t skinny_gram_blocks(const NewtonSchulzMatrix& u);
std::int64_t skinny_apply_blocks(const NewtonSchulzMatrix& u);
/// Norms from square sums, Gram matrices, polynomials, application: four launches. `like` is one of the stacks' u, out.
void newton_schulz_skinny(const SkinnyTable& table, const NewtonSchulzMatrix& u_like,
                          const NewtonSchulzMatrix& out_like, double norm_factor, double epsilon,
                          const NewtonSchulzSteps& steps, StreamRef stream);
/// Floats of scratch memory for newton_schulz_skinny of one stack.
std::int64_t newton_schulz_skinny_workspace(const NewtonSchulzMatrix& u);
void newton_schulz_skinny(const GramFloatArguments& arguments, float* workspace, StreamRef stream);
}  // namespace cuda

}  // namespace rowan
