// The row arithmetic of the Muown optimizer (arXiv 2605.10797; kcc-lion/muown; NVIDIA NeMo Automodel
// `optim/muown_triton`): each output neuron's weights are kept as magnitude times unit direction; the direction follows
// an orthogonalised momentum, the magnitude Adam. One step of a matrix is muown_prepare, then newton_schulz
// (rowan/ops/newton_schulz.h) on its update, then muown_finish.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "rowan/core/tensor.h"
#include "rowan/ops/matrix_layout.h"

namespace rowan {

/// What becomes of a row whose weights and magnitude are all zero (every row of a LoRA B at the start).
enum class ColdRows {
  kFloor,  ///< its magnitude counts as eps, as in NeMo Automodel
  kWarm,   ///< it takes the direction of its first update: u = -O/||O||, magnitude from 0 by Adam, r = max(|g|, eps)
};

/// What a row's direction is.
enum class MuownDirection {
  kUnnormalised,  ///< Muown: moved as a vector of length r, which is remembered from step to step
  /// AngularMuown (arXiv 2606.23637): kept at length 1, so r = 1; steps of lr kappa_t sqrt(max(1, rows / columns)) with
  /// kappa_t = 1 / (1 + 0.001 max(0, t - angular_warmup)); magnitudes never pass through zero; no weight decay; cold
  /// rows start warm.
  kAngular,
};

/// A run of output neurons that is orthogonalised by itself (the q, k, v parts of a fused projection).
struct RowBlock {
  std::int64_t rows = 0;         ///< output neurons held here
  std::int64_t global_rows = 0;  ///< output neurons of the unsharded block; 0: `rows`
};

/// At most this many row blocks a matrix.
inline constexpr std::size_t kMaxRowBlocks = 64;

struct MuownOptions {
  MatrixLayout layout = MatrixLayout::kOutIn;
  double momentum = 0.95;  ///< M' = momentum M + D (heavy ball)
  bool nesterov = true;    ///< U = D + momentum M' instead of M'
  double beta1 = 0.9;      ///< Adam on the magnitude
  double beta2 = 0.95;
  double epsilon = 1e-8;
  ColdRows cold_rows = ColdRows::kFloor;
  MuownDirection direction = MuownDirection::kUnnormalised;
  std::int64_t angular_warmup = 0;  ///< steps before kappa_t falls; kAngular
  double update_scale = 1.0;
  double magnitude_lr = 1.0;         ///< the magnitude's learning rate is lr times this
  std::vector<RowBlock> row_blocks;  ///< empty: all rows are one block. Else the rows add up to N.
};

/// Optimizer state of weights [.., N, K] (kOutIn) or [.., K, N] (kInOut); the weight's dtype, contiguous. Row tensors
/// are [.., N].
struct MuownState {
  Tensor magnitude;      ///< g, with sign: W_i = g_i u_i
  Tensor norm;           ///< r, length of the direction's last unnormalised step
  Tensor momentum;       ///< M, shape of the weight
  Tensor first_moment;   ///< m of Adam on g
  Tensor second_moment;  ///< v
};

/// What muown_prepare writes. Contiguous; row tensors are [.., N].
struct MuownUpdate {
  Tensor update;  ///< U, shape of the weight: bfloat16, or float32 where asked for (float64 beside float64 weights)
  Tensor magnitude_grad;  ///< <G_i, u_i>, the weight's dtype
  Tensor row_square_sum;  ///< float64: sum of squares of each row of U as stored
  Tensor row_max;    ///< the weight's dtype: largest magnitude of each row of U as stored; NaN where the row holds one
  Tensor direction;  ///< optional (may be undefined): d0 = W (r / g^), shape and dtype of the weight
};

/// Values of one step that kernels read from the device, so that a captured graph sees new ones.
struct MuownStep {
  Tensor rates;    ///< float64 [2]: learning rate, weight decay
  Tensor step;     ///< int64 [1]: t, from 1
  Tensor control;  ///< StepControl, float64 [4] (rowan/ops/step_control.h); undefined: factor 1, never skip
};

/// An answer with its reason.
struct MuownSupport {
  bool supported = false;
  std::string reason;  ///< why not; empty when supported
  explicit operator bool() const noexcept { return supported; }
};

/// Whether the operations below take such a weight with these options; never throws for a bad weight or option. A
/// weight has rank 2 to 4, float32 (float64 on the CPU), adjacent elements in its last dimension, any row stride, and
/// leading dimensions that one stride walks. kAngular wants cold_rows kWarm.
MuownSupport muown_supported(const Tensor& weight, const MuownOptions& options);

/// c = update_scale 0.2 sqrt(max(rows, columns)): the factor that gives an orthogonal update the size of an Adam step.
double muown_scale(std::int64_t global_rows, std::int64_t columns, double update_scale = 1.0);

/// Creates the state of a weight: g = r = max(||W_i||, eps) and zeros; with ColdRows::kWarm an all-zero row starts with
/// g = 0, r = eps; with kAngular every r is 1. Throws InvalidArgument where muown_supported says no.
MuownState muown_init(const Tensor& weight, const MuownOptions& options, StreamRef stream);

/// Allocates what muown_prepare writes (without `direction`); `dtype` is that of the update.
MuownUpdate muown_empty_update(const Tensor& weight, const MuownOptions& options, DType dtype, StreamRef stream);

/// For each row, with g^ = g or eps with the sign of g where |g| < eps, and u = W / g^:
///     gg = <G, u>;  D = (g^ / r) (G - u gg);  M' = momentum M + D;  U = D + momentum M' (nesterov) or M'.
/// weight and gradient (of its shape and dtype; rows may be strided) and all state but `momentum` are read; M becomes
/// M' and the tensors of `out` are written. G is the gradient times control's factor. When control says skip, nothing
/// is written, in `out` neither. Arithmetic in float32 with float64 sums (all float64 for float64), one rounding of U.
/// Zero elements: no work. Throws InvalidArgument when shapes, dtypes, strides, devices or options do not fit, or
/// outputs overlap inputs.
void muown_prepare(const Tensor& weight, const Tensor& gradient, MuownState& state, const MuownOptions& options,
                   const Tensor& control, MuownUpdate& out, StreamRef stream);

/// With O the orthogonalised update (`update`, shape of the weight, bfloat16 or float32 (or float64), rows may be
/// strided), gg from muown_prepare and c = muown_scale of the row's block, for each row:
///     d = W (r / g^) - lr c O                      in float32, whatever O's dtype
///     m' = b1 m + (1-b1) gg;  v' = b2 v + (1-b2) gg^2
///     g' = g - magnitude_lr lr (m'/(1-b1^t)) / (sqrt(v'/(1-b2^t)) + eps)
///     n = ||d||;  W' = g' d / max(n, eps);  r' = max(n, eps)
///     weight decay w > 0:  W' -= lr w W;  g' = copysign(max(||W'||, eps), <W', d>)   (g never turns a row against its
///     direction)
/// weight and all state but M are updated. A row with lr c O = 0 everywhere, g' = g to the bit and lr w = 0 keeps W and
/// r to the bit. Rows with W = 0 and g = 0 under ColdRows::kWarm: where O_i = 0 nothing changes; else u = -O_i/||O_i||,
/// gg = <G_i, u> with control's factor in G (the only use of `gradient`, which may be undefined under kFloor), Adam as
/// above, W' = g' u, r' = max(|g'|, eps), no decay. `value`, when given, receives W' rounded to its dtype (bfloat16,
/// float16 or float32, shape of the weight, own row stride), kept rows included. When control says skip, nothing is
/// written. With kAngular the factor of O is the one described there, r' = 1, g' = copysign(max(|g'|, 1e-7), g), and w
/// is taken as 0. Inputs are preserved. Throws InvalidArgument when shapes, dtypes, strides, devices or options do not
/// fit, or outputs overlap inputs.
void muown_finish(Tensor& weight, const Tensor& gradient, MuownState& state, const Tensor& update,
                  const Tensor& magnitude_grad, const MuownOptions& options, const MuownStep& step, Tensor* value,
                  StreamRef stream);

/// One matrix of a batch: the arguments of muown_prepare and muown_finish.
struct MuownItem {
  Tensor weight;
  Tensor gradient;
  MuownState state;
  MuownOptions options;
  MuownUpdate update;
  Tensor orthogonal;  ///< O, the `update` of muown_finish; may be the memory of update.update
  Tensor value;       ///< undefined: none
  MuownStep step;
};

/// Matrices of any shapes that are stepped together again and again. On CUDA those in kOutIn layout take one launch for
/// each kind of row (up to 16, 32, 64, 128, 512, 1024, 4096, 8192 and more columns), however many they are; the others
/// one by one. It keeps the tensors alive and owns the tables of their addresses, so that steps of matrices in kOutIn
/// allocate nothing.
class MuownBatch {
 public:
  MuownBatch() = default;
  /// Throws InvalidArgument as muown_prepare and muown_finish do.
  MuownBatch(std::span<const MuownItem> items, StreamRef stream);

  /// muown_prepare of every matrix.
  void prepare(StreamRef stream) const;
  /// muown_finish of every matrix.
  void finish(StreamRef stream) const;

  struct Table;

 private:
  std::shared_ptr<const Table> table_;
};

}  // namespace rowan
