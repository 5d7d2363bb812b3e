// Private backend of the Muown row operations: the same calls for both devices.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>

#include "ops/muown_math.h"
#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

/// A matrix operand: element (batch b, line i, position j) lies at b * batch_stride + i * line_stride + j. A line is a
/// row of memory: one output neuron, or, in transposed storage, one input of all neurons.
struct MuownOperand {
  void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t line_stride = 0;
};

struct MuownShape {
  std::int64_t batches = 0;
  std::int64_t neurons = 0;
  std::int64_t inputs = 0;
  bool transposed = false;  ///< lines are inputs
  DType dtype = DType::kFloat32;
  DType update_dtype = DType::kBFloat16;

  std::int64_t rows() const { return batches * neurons; }
};

/// Whether all lines of an operand (null: yes) can be moved four elements of `size` bytes at a time.
inline bool moves_in_quads(const MuownShape& shape, const MuownOperand& operand, std::size_t size) {
  constexpr std::int64_t kQuad = 4;
  return (shape.transposed ? shape.neurons : shape.inputs) % kQuad == 0 &&
         reinterpret_cast<std::uintptr_t>(operand.data) % (kQuad * size) == 0 && operand.batch_stride % kQuad == 0 &&
         operand.line_stride % kQuad == 0;
}

/// Row tensors are contiguous, [batches * neurons].
struct MuownPrepareArguments {
  std::int64_t first_block = 0;  ///< of a launch over many matrices
  MuownShape shape;
  MuownOperand weight, gradient, momentum, update, direction;  ///< direction.data may be null
  bool quads = false;                                          ///< all of them move in quads
  const void* magnitude = nullptr;
  const void* norm = nullptr;
  void* magnitude_grad = nullptr;
  double* row_square_sum = nullptr;
  void* row_max = nullptr;
  const double* control = nullptr;  ///< null: factor 1, never skip
  double mu = 0;
  bool nesterov = true;
  double epsilon = 0;
};

/// Where each row block ends and its c; by value in kernel arguments.
struct MuownScales {
  static constexpr int kMost = 64;
  int count = 0;
  std::int64_t end[kMost] = {};
  double scale[kMost] = {};
};

struct MuownFinishArguments {
  std::int64_t first_block = 0;
  MuownShape shape;
  MuownOperand weight, gradient, update, value;  ///< gradient and value may be null
  bool quads = false;                            ///< weight and update move in quads
  bool value_quads = false;
  DType value_dtype = DType::kBFloat16;
  void* magnitude = nullptr;
  void* norm = nullptr;
  void* first_moment = nullptr;
  void* second_moment = nullptr;
  const void* magnitude_grad = nullptr;
  const double* control = nullptr;
  const double* rates = nullptr;       ///< lr, weight decay
  const std::int64_t* step = nullptr;  ///< t
  double beta1 = 0;
  double beta2 = 0;
  double epsilon = 0;
  double magnitude_lr = 1;
  bool warm = false;
  bool angular = false;
  std::int64_t angular_warmup = 0;
  MuownScales scales;
};

struct MuownInitArguments {
  MuownShape shape;
  MuownOperand weight;
  void* magnitude = nullptr;
  void* norm = nullptr;
  double epsilon = 0;
  bool warm = false;
  bool angular = false;
};

namespace detail {

/// c of a neuron's row block.
ROWAN_HOST_DEVICE inline double scale_of(const MuownScales& scales, std::int64_t neuron) {
  int block = 0;
  while (block + 1 < scales.count && neuron >= scales.end[block]) ++block;
  return scales.scale[block];
}

/// The factor of O in a neuron's direction.
ROWAN_HOST_DEVICE inline double direction_rate(const MuownFinishArguments& a, std::int64_t neuron) {
  constexpr double kDecay = 0.001;
  const double rate = a.rates[0] * scale_of(a.scales, neuron);
  if (!a.angular || *a.step <= a.angular_warmup) return rate;
  return rate / (1 + kDecay * static_cast<double>(*a.step - a.angular_warmup));
}

ROWAN_HOST_DEVICE inline double decay_of(const MuownFinishArguments& a) {
  return a.angular ? 0.0 : a.rates[0] * a.rates[1];
}

ROWAN_HOST_DEVICE inline FinishConstants finish_constants(const MuownFinishArguments& a) {
  FinishConstants k;
  k.decay = decay_of(a);
  k.magnitude_rate = a.rates[0] * a.magnitude_lr;
  k.beta1 = a.beta1;
  k.beta2 = a.beta2;
  k.correction1 = 1 / (1 - whole_power(a.beta1, *a.step));
  k.correction2 = 1 / (1 - whole_power(a.beta2, *a.step));
  k.epsilon = a.epsilon;
  k.factor = control_factor(a.control);
  k.warm = a.warm;
  k.angular = a.angular;
  return k;
}

/// g and r of a new row of length `norm`.
template <class T>
ROWAN_HOST_DEVICE inline void init_row(double norm, const MuownInitArguments& a, T& magnitude, T& direction_norm) {
  const T size = static_cast<T>(at_least(norm, a.epsilon));
  magnitude = a.warm && norm == 0 ? T(0) : size;
  direction_norm = a.angular ? T(1) : size;
}

}  // namespace detail

namespace cpu {
void muown_prepare(const MuownPrepareArguments& arguments);
void muown_finish(const MuownFinishArguments& arguments);
void muown_init(const MuownInitArguments& arguments);
}  // namespace cpu

/// Matrices of one launch: on the device, their arguments and, for each block, which of them it works on.
template <class Arguments>
struct MuownTable {
  const Arguments* matrices = nullptr;
  const std::int32_t* matrix_of_block = nullptr;
  std::int64_t blocks = 0;
};

namespace cuda {
/// Matrices in [.., out, in] of equal kind, update type included, can share a launch, of so many blocks for each.
struct MuownRowKind {
  int width_class = 0;
  DType update_dtype = DType::kBFloat16;
  friend auto operator<=>(const MuownRowKind&, const MuownRowKind&) = default;
};
MuownRowKind muown_row_kind(const MuownShape& shape);
std::int64_t muown_row_blocks(const MuownShape& shape);
void muown_prepare(const MuownRowKind& kind, const MuownTable<MuownPrepareArguments>& table, StreamRef stream);
void muown_finish(const MuownRowKind& kind, const MuownTable<MuownFinishArguments>& table, StreamRef stream);

/// Bytes of scratch memory on the device that the calls below need for such a matrix.
std::size_t muown_workspace_bytes(const MuownShape& shape);
void muown_prepare(const MuownPrepareArguments& arguments, void* workspace, StreamRef stream);
void muown_finish(const MuownFinishArguments& arguments, void* workspace, StreamRef stream);
void muown_init(const MuownInitArguments& arguments, void* workspace, StreamRef stream);
}  // namespace cuda

}  // namespace rowan
