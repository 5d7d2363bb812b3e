// A whole training run: steps, evaluation, checkpoints, records, until it is done, stopped early or cancelled.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rowan/io/checkpoint.h"
#include "rowan/io/peft_adapter.h"
#include "rowan/train/batch_loader.h"
#include "rowan/train/metrics.h"
#include "rowan/train/trainer.h"

namespace rowan {

/// One evaluation on the held-out batches.
struct Evaluation {
  std::int64_t step = 0;  ///< optimizer steps done
  double loss = 0;        ///< nats a counted token
  bool best = false;      ///< the lowest so far
};

struct TrainingRunOptions {
  TrainerOptions trainer;
  std::int64_t max_steps = 0;   ///< optimizer steps of the whole run, those before a resume included; 0: no end
  std::int64_t grad_accum = 1;  ///< batches of the loader that make one step; the last step of an epoch may have fewer

  std::vector<HostBatch> eval_batches;
  std::int64_t eval_steps = 0;  ///< evaluates after every so many steps, and at the end; 0: never
  /// Ends the run after this many evaluations in a row without a new lowest loss; 0: does not.
  std::int64_t early_stopping_patience = 0;
  /// Where the model is written at every new lowest loss, as save_model does; empty: nowhere.
  std::filesystem::path best_directory;

  std::filesystem::path checkpoint_directory;  ///< empty: no checkpoints
  std::int64_t save_steps = 0;                 ///< saves after every so many steps, and at the end; 0: at the end alone
  /// Checkpoints kept: the newest, and beside them the one of the lowest evaluation loss; 0: all.
  std::int64_t save_total_limit = 0;
  /// What the run is made from and with; see CheckpointInfo.
  std::map<std::string, std::string> identity;
  /// How PEFT should see the LoRA factors that are saved; needed where a model with LoRA is saved.
  std::optional<AdapterConfig> adapter;

  /// Receive a record of every step: step, epoch (with a loader), loss, learning_rate, gradient_norm, tokens, seconds,
  /// tokens_per_second, skipped; and of every evaluation: step, eval_loss. They outlive the run.
  std::vector<MetricsSink*> sinks;
  std::function<void(const TrainStep&)> on_step;
  std::function<void(const Evaluation&)> on_evaluation;
};

/// What may differ from the run that a checkpoint was saved by.
struct ResumeOptions {
  /// True for names of the identity that may differ; empty: none may.
  std::function<bool(const std::string& name)> allowed;
  bool allow_world_size = false;  ///< another number of ranks; then the run does not go on bit for bit
};

/// Why a run ended.
enum class RunEnd {
  kDone,          ///< max_steps
  kStoppedEarly,  ///< see early_stopping_patience
  kCancelled,     ///< cancel()
  kDiverged,      ///< a loss that is not finite, or twenty gradients in a row: the weights are those before
};

/// Trains a model. Either train() takes batches from a loader, or the caller brings its own:
///
///     while (!run.end()) run.step(micro_batches);
///
/// A run that is resumed from a checkpoint goes on bit for bit as if it had never stopped, from any step. Model,
/// optimizer and communicator outlive it. Not thread-safe but for cancel(). With several ranks, all of them make the
/// same calls; rank 0 writes.
class TrainingRun {
 public:
  /// Throws InvalidArgument for options out of range or without effect, as Trainer.
  TrainingRun(LlamaModel& model, Optimizer& optimizer, Communicator& communicator, TrainingRunOptions options,
              StreamRef stream);

  /// One optimizer step over all micro-batches, and then what is due after it: records, an evaluation, a checkpoint.
  /// The step that ends the run saves, and evaluates unless the run was cancelled; nothing is saved of one that
  /// diverged. Throws as Trainer::step, and Io where something could not be written: the step is then taken, and the
  /// run can go on.
  TrainStep step(std::span<const HostBatch> micro_batches);

  /// Steps with the loader's batches until the run ends.
  RunEnd train(BatchLoader& loader);

  /// Nothing while the run goes on.
  std::optional<RunEnd> end() const;

  /// Ends the run after the step at hand. For any thread, and for signal handlers.
  void cancel() noexcept { cancel_.store(true, std::memory_order_relaxed); }

  /// Saves a checkpoint now and returns its path. Throws InvalidArgument without a checkpoint_directory.
  std::filesystem::path save();

  /// Takes over where a checkpoint's run stood. Without a loader, where it stood in the data is the caller's to know. A
  /// loader of other data or batches (where that is allowed) begins its epoch anew. Throws, with the model possibly
  /// partly loaded, Format or InvalidArgument where the checkpoint does not fit: naming the part of the identity that
  /// changed (Format for base_model and data), or the tensor.
  /// A collective operation; what each rank can see for itself is checked before the first exchange, by
  /// require_resumable.
  void resume(const Checkpoint& checkpoint, BatchLoader* loader = nullptr, const ResumeOptions& options = {});
  /// Throws as resume() does for another identity or world size.
  void require_resumable(const Checkpoint& checkpoint, const ResumeOptions& options) const;

  /// Rank 0 writes, and rethrows what `write` throws; the others wait for it, however long it takes, and throw Comm
  /// where it failed. `write` runs on a thread of its own where there are others, and holds no collective operation.
  void write_on_first_rank(const std::function<void()>& write) const;

  /// Writes what was trained: LoRA factors as a PEFT directory, base weights as a Hugging Face directory.
  void save_model(const std::filesystem::path& directory) const;

  /// Steps attempted so far.
  std::int64_t steps() const noexcept { return trainer_.steps(); }
  /// Infinity before the first evaluation.
  double best_eval_loss() const noexcept { return best_eval_loss_; }

 private:
  void check_options() const;
  bool is_due(std::int64_t interval) const { return interval > 0 && steps() % interval == 0; }
  void record_step(const TrainStep& step);
  void watch_divergence(const TrainStep& step);
  void evaluate();
  CheckpointInfo checkpoint_info() const;
  void load_model(const std::filesystem::path& directory);
  void restore_loader(const CheckpointInfo& info, BatchLoader& loader) const;
  bool on_any_rank(bool flag) const;
  std::int32_t largest_of_ranks(std::int32_t value) const;

  LlamaModel& model_;
  Optimizer& optimizer_;
  Communicator& communicator_;
  TrainingRunOptions options_;
  StreamRef stream_;
  Trainer trainer_;
  BatchLoader* loader_ = nullptr;  // where the batches come from

  std::atomic<bool> cancel_{false};
  bool cancelled_ = false;  // on some rank, seen by all
  bool diverged_ = false;
  std::int64_t bad_steps_ = 0;  // skipped in a row for their gradients
  double best_eval_loss_ = std::numeric_limits<double>::infinity();
  std::int64_t stale_evaluations_ = 0;  // in a row without a new lowest loss
  std::optional<Evaluation> last_evaluation_;
};

}  // namespace rowan
