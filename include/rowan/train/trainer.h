// The training loop's one step, and evaluation.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "rowan/comm/communicator.h"
#include "rowan/nn/llama.h"
#include "rowan/optim/optimizer.h"
#include "rowan/optim/schedule.h"

namespace rowan {

struct TrainerOptions {
  double learning_rate = 3e-4;  ///< the peak; the schedule multiplies it
  Schedule schedule;
};

/// What one step did.
struct TrainStep {
  std::int64_t step = 0;  ///< attempted steps before this one
  double loss = 0;        ///< nats a counted token, mean over the whole step; 0 where none counts
  std::int64_t tokens = 0;
  std::int64_t counted_tokens = 0;  ///< labels that are not kIgnoredLabel
  double learning_rate = 0;
  double gradient_norm = 0;  ///< before clipping
  bool skipped = false;      ///< no counted token, or a gradient that is not finite: nothing but counters changed
  double seconds = 0;        ///< wall time
};

/// Where a trainer stands: all that a checkpoint keeps of it.
struct TrainerState {
  std::int64_t steps = 0;          ///< attempted
  std::uint64_t dropout_step = 0;  ///< forward passes so far: each draws its own dropout masks
};

/// Trains a model with an optimizer: gradients of all micro-batches of a step are summed, normalised by the step's
/// counted tokens, and the optimizer steps once. Model, optimizer and communicator outlive it.
///
/// With several ranks (data parallel) each has the model with equal values, an optimizer of
/// make_data_parallel_optimizer and micro-batches of its own, any number of them; tokens, losses and gradients are
/// those of all ranks together, and all ranks make the same calls and get the same results.
class Trainer {
 public:
  Trainer(LlamaModel& model, Optimizer& optimizer, Communicator& communicator, const TrainerOptions& options,
          StreamRef stream);

  /// One optimizer step over micro-batches with labels. The loss equals the mean over all counted tokens however they
  /// are split. Throws InvalidArgument for ids or labels outside the vocabulary before anything is changed.
  TrainStep step(std::span<const HostBatch> micro_batches);
  TrainStep step(const HostBatch& batch) { return step(std::span(&batch, 1)); }

  /// Mean nats a counted token over all batches, the same ones on every rank: they share the work. NaN where none
  /// counts.
  double evaluate(std::span<const HostBatch> batches);

  std::int64_t steps() const noexcept { return step_; }
  TrainerState state() const noexcept { return {step_, micro_step_}; }
  void restore(const TrainerState& state) noexcept {
    step_ = state.steps;
    micro_step_ = state.dropout_step;
  }

 private:
  LlamaModel& model_;
  Optimizer& optimizer_;
  Communicator& communicator_;
  TrainerOptions options_;
  StreamRef stream_;
  std::vector<Parameter> parameters_;
  std::int64_t step_ = 0;
  std::uint64_t micro_step_ = 0;  // see TrainerState::dropout_step
};

/// Mean nats a counted token over all batches; NaN where none counts. With a communicator its ranks, which hold the
/// same model and batches, share the work and get the same mean.
double evaluate(LlamaModel& model, std::span<const HostBatch> batches, StreamRef stream);
double evaluate(LlamaModel& model, std::span<const HostBatch> batches, Communicator& communicator, StreamRef stream);

}  // namespace rowan
