// Steps a model's parameters: one interface over Muown, Muon and AdamW, chosen by parameter group.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "rowan/comm/communicator.h"
#include "rowan/core/tensor.h"
#include "rowan/nn/parameter.h"
#include "rowan/ops/step_control.h"
#include "rowan/optim/parameter_group.h"

namespace rowan {

/// What may change from step to step.
struct StepValues {
  double learning_rate = 3e-4;
  double weight_decay_scale = 1.0;  ///< multiplies the weight decay of every group
};

struct OptimizerOptions {
  std::vector<ParameterGroup> groups;  ///< a parameter belongs to the first group that takes it
  double max_gradient_norm = 0;        ///< gradients are scaled down to this global norm; 0: not
};

/// Holds masters, moments and counters. It is made for a list of parameters and takes the same list, in the same order,
/// at every step; frozen parameters in it are passed over. A parameter takes part in a step when it has a gradient
/// (grad is defined and has_grad is true); otherwise it, its state and its count t stay as they are.
///
/// A step is skipped, and counted, when a gradient is not finite or the norm after clipping exceeds 1e18: then nothing
/// but the skip count changes. The decision is taken on the device; the host learns of it by report().
///
/// Not thread-safe. Everything runs on the stream given, which must belong to the device of the parameters.
/// Rank r of several holds rows [first_rows[r], first_rows[r + 1]) of a parameter's state, the last one up to `rows`.
struct SplitRows {
  std::string parameter;
  std::int64_t rows = 0;
  std::vector<std::int64_t> first_rows;
};

class Optimizer {
 public:
  virtual ~Optimizer() = default;
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// One step: stage(), then apply().
  void step(std::span<const Parameter> parameters, const StepValues& values, StreamRef stream,
            Communicator& communicator) {
    stage(parameters, values, stream);
    apply(parameters, stream, communicator);
  }

  /// Sends the step's values, and which parameters have a gradient, to the device. Throws InvalidArgument for a
  /// learning rate or scale that is negative or not finite, or parameters that are not those of the constructor.
  virtual void stage(std::span<const Parameter> parameters, const StepValues& values, StreamRef stream) = 0;

  /// Steps with what stage() sent, and writes each changed master, rounded, to its parameter's value. The host never
  /// waits, and from the second call with gradients at the same addresses it allocates nothing but what operations need
  /// while they run: a recorded apply() can be replayed after another stage(). Gradients are of master's dtype and
  /// value's shape, and preserved.
  ///
  /// Over several ranks all of them make the same calls. Gradients of parameters that every rank holds whole are
  /// already equal on all ranks. A parameter whose shard says so is split: the ranks hold its output neurons one after
  /// the other, any number each, with gradients on all ranks or on none; the step is that of the whole parameter, to
  /// the bit on the CPU where one rank orthogonalises it and no max_gradient_norm is set, else to float32 rounding
  /// (rowan/optim/shard_cost.h says when). Throws
  /// InvalidArgument when a gradient does not fit, before anything is written, and where the ranks' parts do not make a
  /// whole.
  virtual void apply(std::span<const Parameter> parameters, StreamRef stream, Communicator& communicator) = 0;

  /// Counts a step that the caller does not take (no counted token in its batch) as skipped.
  virtual void skip_step(StreamRef stream) = 0;

  /// What the last step did; waits for the stream.
  virtual StepReport report(StreamRef stream) const = 0;

  /// Everything that a later step depends on but the parameters' values: masters that are not the values themselves,
  /// moments, magnitudes, counts. The tensors share memory with the optimizer.
  virtual std::vector<NamedTensor> state() const = 0;

  /// Takes over a state that an optimizer of equal options and parameters gave, from any device, bit for bit, and
  /// refreshes the values of parameters with a master of their own. Throws Format, with nothing changed, naming the
  /// first tensor that is missing, left over or of another shape or dtype.
  virtual void load_state(std::span<const NamedTensor> state, StreamRef stream) = 0;

  virtual const OptimizerOptions& options() const noexcept = 0;

  /// How the state of parameters is split over ranks; empty where each rank holds it whole.
  virtual std::vector<SplitRows> split_rows() const { return {}; }

  /// Whether a step sums the ranks' gradients itself (rowan/optim/data_parallel.h).
  virtual bool sums_gradients() const noexcept { return false; }

 protected:
  Optimizer() = default;
};

/// Makes an optimizer for the trainable ones among `parameters`, whose values are set by now. A parameter without a
/// master gets one here: its value where that is float32 (float64), else a float32 copy. Throws InvalidArgument for
/// settings out of range, two parameters of one name, a trainable parameter that no group takes, a group with a name
/// pattern that takes none, or one whose algorithm cannot step it.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerOptions& options, std::span<const Parameter> parameters,
                                          StreamRef stream);

}  // namespace rowan
