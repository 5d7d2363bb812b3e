// Orthogonalisation by a fixed number of Newton-Schulz steps, as in Muon (Keller Jordan,
// kellerjordan.github.io/posts/muon) and Gram Newton-Schulz (Dao-AILab), with other coefficient sets as options (Polar
// Express: arXiv 2505.16932).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "rowan/core/tensor.h"

namespace rowan {

/// How the polynomial is evaluated. All but kSvd compute the same polynomial of U / (||U||_F + eps); p is the shorter
/// side.
enum class NewtonSchulzPath {
  kAuto,      ///< kSkinny up to p = 64, else kGram
  kStandard,  ///< X <- a X + (b G + c G^2) X with G = X X^T; everything stored in bfloat16, the norm rounded to it, as
              ///< the reference
  kGram,      ///< the recursion on the p x p Gram matrix, applied to U twice. CUDA: float16 products; CPU: float32 ones
  kSkinny,    ///< p <= 64: Gram matrix and recursion in float32, applied once
  kGramFp32,  ///< kGram with float32 storage and without its restart, for Gram matrices that were summed over ranks
  kSvd,       ///< the exact polar factor U V^T in float64, zero where a singular value is zero; CPU only, for tests
};

/// "auto", "standard", "gram", "skinny", "gram_fp32", "svd".
const char* to_string(NewtonSchulzPath path) noexcept;
/// Throws InvalidArgument naming the text when it is none of them.
NewtonSchulzPath parse_newton_schulz_path(const std::string& text);

/// One step's X <- a X + b X X^T X + c (X X^T)^2 X.
struct NewtonSchulzCoefficients {
  double a = 3.4445;
  double b = -4.7750;
  double c = 2.0315;
};

/// A schedule of coefficients: step i uses entry i, later steps the last one.
struct NewtonSchulzSchedule {
  std::vector<NewtonSchulzCoefficients> coefficients;
  double norm_factor = 1.0;  ///< U is divided by norm_factor ||U|| + eps
};

/// "jordan" (the default: 3.4445, -4.7750, 2.0315), "quintic" (five steps that differ) or "polar_express" (five steps,
/// made safe for rounding, with norm_factor 1.02). Throws InvalidArgument naming the text otherwise.
NewtonSchulzSchedule newton_schulz_schedule(const std::string& name);

struct NewtonSchulzOptions {
  NewtonSchulzPath path = NewtonSchulzPath::kAuto;
  NewtonSchulzSchedule schedule = newton_schulz_schedule("jordan");
  int steps = 5;
  double epsilon = 1e-7;  ///< added to the norm; 0 gives exact scale invariance
};

/// The path that kAuto stands for with matrices of this size; other paths as they are.
NewtonSchulzPath resolve_newton_schulz_path(NewtonSchulzPath path, std::int64_t rows, std::int64_t columns) noexcept;

/// out = NS(U) for each matrix of u [.., N, K] (rank 2 to 4): its singular vectors with singular values driven to about
/// 1 (0.68 to 1.13 for inputs in [0.01, 1] ||U|| and the default coefficients). u and out bfloat16 or float32, each its
/// own, also float64 on the CPU for kSvd; adjacent elements in the last dimension, any row stride, leading dimensions
/// that one stride walks; so slices of rows or columns fit. Transposed matrices give transposed results, so the layout
/// needs no option. row_square_sum, when not null: float64 [.., n] on u's device, whose sum over n is the square of the
/// matrix's Frobenius norm (as muown_prepare leaves it for the same rows or columns; last stride 1); without it the
/// norm costs one more pass. The norm is right for every magnitude of float32; a zero matrix gives zero, NaN and
/// infinity spread over their own matrix alone. Writes out, which must not overlap u. Every path's error against the
/// exact polynomial is at most kStandard's. On the CPU a matrix gets the same bits in a batch of any size. Throws
/// InvalidArgument when shapes, dtypes, strides, devices or options do not fit (kSkinny with p > 64 too), Unsupported
/// for kSvd on CUDA.
void newton_schulz(const Tensor& u, Tensor& out, const NewtonSchulzOptions& options, StreamRef stream,
                   const Tensor* row_square_sum = nullptr);

/// One entry of a SkinnyBatch: matrices, and their square sums as newton_schulz takes them.
struct SkinnyItem {
  Tensor matrices;        ///< U [.., N, K], becomes NS(U)
  Tensor row_square_sum;  ///< float64 [.., n]
};

/// Matrices of any shapes with a shorter side of at most 64 that are orthogonalised in place, again and again, by the
/// path kSkinny. On CUDA four launches for all that share a dtype and pad to the same side (16, 32 or 64). It keeps the
/// tensors alive and owns the tables of their addresses and the scratch memory, so that run() allocates nothing.
class SkinnyBatch {
 public:
  SkinnyBatch() = default;
  /// Throws InvalidArgument as newton_schulz does with kSkinny, whatever the path in `options`.
  SkinnyBatch(std::span<const SkinnyItem> items, const NewtonSchulzOptions& options, StreamRef stream);

  void run(StreamRef stream) const;

  struct Table;

 private:
  std::shared_ptr<const Table> table_;
};

}  // namespace rowan
