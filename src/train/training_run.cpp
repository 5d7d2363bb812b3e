#include "rowan/train/training_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <future>
#include <utility>

#include "core/check.h"
#include "rowan/nn/llama_files.h"

namespace rowan {

namespace {

using detail::require;

constexpr const char* kOptimizerFile = "optimizer.safetensors";
constexpr std::int64_t kMostBadSteps = 20;

bool has_lora(const LlamaModel& model) {
  const auto is_factor = [](const Parameter& p) { return p.role == Parameter::Role::kLoraA; };
  return std::any_of(model.parameters().begin(), model.parameters().end(), is_factor);
}

std::uint64_t counter(const CheckpointInfo& info, const char* name) {
  const auto found = info.counters.find(name);
  if (found == info.counters.end())
    detail::fail(ErrorKind::kFormat, "checkpoint of step {}: expected a counter {}, got none", info.step, name);
  return found->second;
}

void check_identity(const CheckpointInfo& info, const std::map<std::string, std::string>& current,
                    const ResumeOptions& options) {
  const std::string name = changed_identity(info.identity, current, options.allowed);
  if (name.empty()) return;
  const auto value = [&](const std::map<std::string, std::string>& identity) {
    const auto found = identity.find(name);
    return found == identity.end() ? std::string("nothing") : found->second;
  };
  const bool is_file = name == "base_model" || name == "data";
  detail::fail(is_file ? ErrorKind::kFormat : ErrorKind::kInvalidArgument,
               "checkpoint of step {}: {} has changed: it was {}, and is now {}", info.step, name, value(info.identity),
               value(current));
}

}  // namespace

TrainingRun::TrainingRun(LlamaModel& model, Optimizer& optimizer, Communicator& communicator,
                         TrainingRunOptions options, StreamRef stream)
    : model_(model),
      optimizer_(optimizer),
      communicator_(communicator),
      options_(std::move(options)),
      stream_(stream),
      trainer_(model, optimizer, communicator, options_.trainer, stream) {
  check_options();
}

void TrainingRun::check_options() const {
  const TrainingRunOptions& o = options_;
  const auto from_zero = [](const char* name, std::int64_t value) {
    require(value >= 0, "TrainingRun: expected {} >= 0, got {}", name, value);
  };
  from_zero("max_steps", o.max_steps);
  from_zero("eval_steps", o.eval_steps);
  from_zero("early_stopping_patience", o.early_stopping_patience);
  from_zero("save_steps", o.save_steps);
  from_zero("save_total_limit", o.save_total_limit);
  require(o.grad_accum >= 1, "TrainingRun: expected grad_accum >= 1, got {}", o.grad_accum);
  const auto counts = [](const HostBatch& batch) { return batch.counted_tokens() > 0; };
  const bool evaluates = o.eval_steps > 0;
  require(evaluates == std::any_of(o.eval_batches.begin(), o.eval_batches.end(), counts),
          "TrainingRun: expected eval_steps with eval_batches that have labels, got one without the other");
  require(evaluates || o.early_stopping_patience == 0, "TrainingRun: early_stopping_patience needs eval_steps");
  require(evaluates || o.best_directory.empty(), "TrainingRun: best_directory needs eval_steps");
  const bool saves = !o.checkpoint_directory.empty();
  require(saves || (o.save_steps == 0 && o.save_total_limit == 0),
          "TrainingRun: save_steps and save_total_limit need a checkpoint_directory");
  require((!saves && o.best_directory.empty()) || !has_lora(model_) || o.adapter,
          "TrainingRun: saving a model with LoRA needs the adapter's configuration");
  for (const Parameter& p : model_.parameters()) {
    if (saves && p.shard.global_rows > 0)
      detail::fail(ErrorKind::kUnsupported, "TrainingRun: checkpoints of split parameters ({}) are not supported",
                   p.name);
  }
}

TrainStep TrainingRun::step(std::span<const HostBatch> micro_batches) {
  const TrainStep step = trainer_.step(micro_batches);
  cancelled_ = on_any_rank(cancel_.load(std::memory_order_relaxed));
  watch_divergence(step);
  record_step(step);
  if (diverged_) return step;
  if (options_.eval_steps > 0 && (is_due(options_.eval_steps) || end() == RunEnd::kDone)) evaluate();
  if (!options_.checkpoint_directory.empty() && (is_due(options_.save_steps) || end())) save();
  return step;
}

void TrainingRun::watch_divergence(const TrainStep& step) {
  bad_steps_ = step.skipped && step.counted_tokens > 0 ? bad_steps_ + 1 : 0;
  diverged_ = !std::isfinite(step.loss) || bad_steps_ >= kMostBadSteps;
}

void TrainingRun::record_step(const TrainStep& step) {
  MetricRecord record{{"step", steps()}};
  if (loader_ != nullptr) {
    const BatchLoaderState at = loader_->state();
    const auto batches = static_cast<double>(loader_->batches_per_epoch() * communicator_.size());
    record.emplace_back("epoch", static_cast<double>(at.epoch) + static_cast<double>(at.position) / batches);
  }
  record.emplace_back("loss", step.loss);
  record.emplace_back("learning_rate", step.learning_rate);
  record.emplace_back("gradient_norm", step.gradient_norm);
  record.emplace_back("tokens", step.tokens);
  record.emplace_back("seconds", step.seconds);
  if (step.seconds > 0) record.emplace_back("tokens_per_second", static_cast<double>(step.tokens) / step.seconds);
  record.emplace_back("skipped", step.skipped);
  for (MetricsSink* sink : options_.sinks) sink->write(record);
  if (options_.on_step) options_.on_step(step);
}

void TrainingRun::evaluate() {
  Evaluation evaluation{steps(), trainer_.evaluate(options_.eval_batches), false};
  evaluation.best = evaluation.loss < best_eval_loss_;
  stale_evaluations_ = evaluation.best ? 0 : stale_evaluations_ + 1;
  if (evaluation.best) best_eval_loss_ = evaluation.loss;
  last_evaluation_ = evaluation;
  if (evaluation.best && !options_.best_directory.empty())
    write_on_first_rank([&] { save_model(options_.best_directory); });
  for (MetricsSink* sink : options_.sinks) sink->write({{"step", evaluation.step}, {"eval_loss", evaluation.loss}});
  if (options_.on_evaluation) options_.on_evaluation(evaluation);
}

RunEnd TrainingRun::train(BatchLoader& loader) {
  loader_ = &loader;
  std::vector<HostBatch> micro_batches;
  while (!end()) {
    std::optional<HostBatch> batch = loader.next();
    if (batch) micro_batches.push_back(std::move(*batch));
    const auto count = static_cast<std::int64_t>(micro_batches.size());
    if (count == 0 || (batch && count < options_.grad_accum)) continue;
    step(micro_batches);
    micro_batches.clear();
  }
  return *end();
}

std::optional<RunEnd> TrainingRun::end() const {
  if (diverged_) return RunEnd::kDiverged;
  if (options_.early_stopping_patience > 0 && stale_evaluations_ >= options_.early_stopping_patience)
    return RunEnd::kStoppedEarly;
  if (options_.max_steps > 0 && steps() >= options_.max_steps) return RunEnd::kDone;
  if (cancelled_) return RunEnd::kCancelled;
  return std::nullopt;
}

CheckpointInfo TrainingRun::checkpoint_info() const {
  const TrainerState trainer = trainer_.state();
  CheckpointInfo info;
  info.step = trainer.steps;
  info.world_size = communicator_.size();
  info.identity = options_.identity;
  info.counters = {{"dropout_step", trainer.dropout_step},
                   {"stale_evaluations", static_cast<std::uint64_t>(stale_evaluations_)},
                   {"bad_steps", static_cast<std::uint64_t>(bad_steps_)}};
  if (loader_ != nullptr) {
    const BatchLoaderState loader = loader_->state();
    info.counters["epoch"] = loader.epoch;
    info.counters["loader_position"] = static_cast<std::uint64_t>(loader.position);
    info.counters["loader_fingerprint"] = loader.fingerprint;
  }
  for (const SplitRows& split : optimizer_.split_rows())
    info.shards.push_back({split.parameter, split.rows, split.first_rows});
  if (std::isfinite(best_eval_loss_)) info.numbers["best_eval_loss"] = best_eval_loss_;
  if (last_evaluation_ && last_evaluation_->step == info.step && std::isfinite(last_evaluation_->loss))
    info.eval_loss = last_evaluation_->loss;
  return info;
}

std::filesystem::path TrainingRun::save() {
  const std::filesystem::path& root = options_.checkpoint_directory;
  require(!root.empty(), "TrainingRun: expected a checkpoint_directory, got none");
  const CheckpointInfo info = checkpoint_info();
  const std::vector<NamedTensor> state = optimizer_.state();  // of all ranks, which make it together
  write_on_first_rank([&] {
    save_checkpoint(root, info, [&](const std::filesystem::path& directory) {
      save_model(directory);
      write_safetensors(directory / kOptimizerFile, state, {}, stream_);
    });
    if (options_.save_total_limit > 0) prune_checkpoints(root, options_.save_total_limit);
  });
  return root / ("checkpoint-" + std::to_string(info.step));
}

void TrainingRun::save_model(const std::filesystem::path& directory) const {
  if (has_lora(model_)) {
    require(options_.adapter.has_value(), "TrainingRun: saving a model with LoRA needs the adapter's configuration");
    save_adapter(directory, model_, *options_.adapter, stream_);
  }
  if (model_.options().train_base) save_base(directory, model_, stream_);
}

void TrainingRun::require_resumable(const Checkpoint& checkpoint, const ResumeOptions& options) const {
  const CheckpointInfo& info = checkpoint.info;
  check_identity(info, options_.identity, options);
  require(options.allow_world_size || info.world_size == communicator_.size(),
          "checkpoint of step {}: world_size has changed: it was {}, and is now {}", info.step, info.world_size,
          communicator_.size());
}

void TrainingRun::resume(const Checkpoint& checkpoint, BatchLoader* loader, const ResumeOptions& options) {
  const CheckpointInfo& info = checkpoint.info;
  require_resumable(checkpoint, options);
  const TrainerState trainer{info.step, counter(info, "dropout_step")};
  const std::uint64_t stale = counter(info, "stale_evaluations"), bad = counter(info, "bad_steps");
  if (loader != nullptr) restore_loader(info, *loader);
  load_model(checkpoint.directory);
  const SafetensorsFile file(checkpoint.directory / kOptimizerFile);
  std::vector<NamedTensor> state;
  for (const TensorInfo& tensor : file.tensors()) state.push_back({tensor.name, file.load(tensor.name, StreamRef())});
  optimizer_.load_state(state, stream_);

  trainer_.restore(trainer);
  stale_evaluations_ = static_cast<std::int64_t>(stale);
  bad_steps_ = static_cast<std::int64_t>(bad);
  const auto best = info.numbers.find("best_eval_loss");
  best_eval_loss_ = best == info.numbers.end() ? std::numeric_limits<double>::infinity() : best->second;
  last_evaluation_.reset();
  if (info.eval_loss) last_evaluation_ = Evaluation{info.step, *info.eval_loss, *info.eval_loss == best_eval_loss_};
}

void TrainingRun::load_model(const std::filesystem::path& directory) {
  if (model_.options().train_base) load_base(model_, ModelFiles(directory), stream_);
  if (has_lora(model_)) load_adapter(model_, AdapterFiles(directory), stream_);
}

void TrainingRun::restore_loader(const CheckpointInfo& info, BatchLoader& loader) const {
  const BatchLoaderState saved{counter(info, "epoch"), static_cast<std::int64_t>(counter(info, "loader_position")),
                               counter(info, "loader_fingerprint")};
  const std::uint64_t own = loader.state().fingerprint;
  const bool same_identity = info.identity == options_.identity;
  if (saved.fingerprint == own || same_identity) {
    loader.restore(saved);
  } else {  // other data or batches, by permission
    loader.restore({saved.epoch, 0, own});
  }
}

std::int32_t TrainingRun::largest_of_ranks(std::int32_t value) const {
  if (communicator_.size() == 1) return value;
  Tensor all = Tensor::from_host(Shape{1}, std::vector<std::int32_t>{value}, stream_);
  communicator_.all_reduce(all, ReduceOp::kMax, stream_);
  communicator_.synchronize(stream_);
  return all.to_vector<std::int32_t>(stream_)[0];
}

/// Whether the flag is set on some rank; a cancelled run ends after the same step on all of them.
bool TrainingRun::on_any_rank(bool flag) const { return largest_of_ranks(flag ? 1 : 0) != 0; }

void TrainingRun::write_on_first_rank(const std::function<void()>& write) const {
  if (communicator_.size() == 1) return write();
  constexpr std::int32_t kDone = 0, kFailed = 1, kBusy = 2;
  // Shorter than any timeout: a rank that writes for long shows that it lives.
  constexpr auto kBeat = std::chrono::milliseconds(20);
  if (communicator_.rank() != 0) {
    std::int32_t state = kBusy;
    while (state == kBusy) state = largest_of_ranks(kDone);
    if (state == kFailed) detail::fail(ErrorKind::kComm, "TrainingRun: expected rank 0 to save, got an error there");
    return;
  }
  std::future<void> writing = std::async(std::launch::async, write);
  while (writing.wait_for(kBeat) != std::future_status::ready) static_cast<void>(largest_of_ranks(kBusy));
  try {
    writing.get();
  } catch (...) {
    static_cast<void>(largest_of_ranks(kFailed));
    throw;
  }
  static_cast<void>(largest_of_ranks(kDone));
}

}  // namespace rowan
