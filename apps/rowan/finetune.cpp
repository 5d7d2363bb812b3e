#include "finetune.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <vector>

#include "exit_code.h"
#include "finetune_options.h"
#include "optimizer_groups.h"
#include "options.h"
#include "output_paths.h"
#include "progress.h"
#include "rowan/comm/communicator.h"
#include "rowan/core/allocator.h"
#include "rowan/core/error.h"
#include "rowan/io/atomic_file.h"
#include "rowan/nn/llama_files.h"
#include "rowan/optim/data_parallel.h"
#include "rowan/text/dataset.h"
#include "rowan/train/memory_estimate.h"
#include "rowan/train/metrics.h"
#include "rowan/train/plot.h"
#include "rowan/train/tensorboard.h"
#include "rowan/train/training_run.h"
#include "text_options.h"

namespace rowan::app {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

[[noreturn]] void fail(ErrorKind kind, const std::string& message) { throw Error(kind, "finetune: " + message); }

// What is trained

/// "all-linear", names separated by commas, or a regular expression.
void set_targets(const std::string& text, AdapterConfig& config) {
  if (text == "all-linear" || text.find_first_of("*+?()[]{}|^$\\") != std::string::npos) {
    config.target_pattern = text;
    return;
  }
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    config.target_modules.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
}

AdapterConfig adapter_config(const FinetuneOptions& o, const std::optional<AdapterFiles>& files) {
  AdapterConfig config;
  if (files) {
    config = files->config();
  } else {
    config.r = o.lora_r;
    config.lora_alpha = o.lora_alpha;
    config.use_rslora = o.use_rslora;
    set_targets(o.target_modules, config);
  }
  if (!files || o.given.contains("lora-dropout")) config.lora_dropout = o.lora_dropout;
  config.base_model_name_or_path = o.model;
  return config;
}

/// A run's inputs, read and checked; no weight is read yet.
struct Plan {
  FinetuneOptions options;  // resolved
  ModelConfig config;
  std::optional<ModelFiles> weights;
  std::optional<AdapterFiles> start;  // the adapter to go on from
  std::optional<AdapterConfig> adapter;
  LlamaOptions model;
  OptimizerOptions optimizer;
  std::optional<BatchLoader> loader;
  std::vector<HostBatch> eval_batches;
  std::int64_t steps = 0;
  MemoryEstimate memory;
};

std::vector<TokenRow> read_rows(const FinetuneOptions& o, const std::string& path, const ModelConfig& config) {
  const DatasetOptions options{.model = o.model, .chat_template = o.chat_template, .mask_prompts = o.mask_prompts};
  std::vector<TokenRow> rows = reading_input([&] { return read_dataset(path, options); });
  for (const TokenRow& row : rows) {
    const auto id = std::max_element(row.input_ids.begin(), row.input_ids.end());
    const auto label = std::max_element(row.labels.begin(), row.labels.end());
    if (id == row.input_ids.end() || std::max<std::int64_t>(*id, *label) < config.vocab_size) continue;
    fail(ErrorKind::kFormat, fmt::format("{}: token id {} is not below the model's vocab_size {}", path,
                                         std::max<std::int64_t>(*id, *label), config.vocab_size));
  }
  return rows;
}

/// A rank's share of the batches of training.
struct Share {
  std::int64_t rank = 0, world = 1;
};

BatchLoader make_loader(const FinetuneOptions& o, const std::string& path, const ModelConfig& config, bool shuffle,
                        Share share) {
  const BatchLoaderOptions options{.batch_size = o.batch_size,
                                   .max_length = o.max_length,
                                   .packing = o.packing,
                                   .shuffle = shuffle,
                                   .seed = o.seed,
                                   .rank = share.rank,
                                   .world = share.world};
  std::vector<TokenRow> rows = read_rows(o, path, config);
  try {
    return BatchLoader(std::move(rows), options);
  } catch (const Error& error) {
    fail(ErrorKind::kFormat, fmt::format("{}: {}", path, error.what()));
  }
}

std::int64_t longest_sequence(const ModelConfig& config) {
  const std::int64_t window = config.sliding_window;
  return window == 0 ? config.max_position_embeddings : std::min(config.max_position_embeddings, window);
}

void resolve_lengths(FinetuneOptions& o, const ModelConfig& config) {
  const std::int64_t longest = longest_sequence(config);
  if (o.max_length > longest)
    fail(ErrorKind::kInvalidArgument,
         fmt::format("--max-length: expected at most the {} tokens that the model takes, got {}", longest,
                     o.max_length));
  if (o.max_length == 0) o.max_length = std::min<std::int64_t>(1024, longest);
  if (o.epochs == 0 && o.max_steps == 0) o.epochs = 3;
}

/// Optimizer steps of the run; a step does not reach across epochs.
std::int64_t total_steps(const FinetuneOptions& o, std::int64_t steps_per_epoch) {
  const std::int64_t by_epochs = o.epochs * steps_per_epoch;
  if (o.epochs == 0) return o.max_steps;
  return o.max_steps == 0 ? by_epochs : std::min(o.max_steps, by_epochs);
}

Plan make_plan(const FinetuneOptions& given, Device device, Share share) {
  Plan plan;
  plan.options = given;
  FinetuneOptions& o = plan.options;
  check_finetune_options(o);
  if (!o.dry_run) require_run_directory(o.out, {{"--model", o.model}, {"--adapter", o.adapter}});
  plan.config = reading_input([&] { return read_model_config(o.model); });
  resolve_lengths(o, plan.config);
  o.dtype = o.dtype.empty() ? to_string(plan.config.dtype) : o.dtype;
  plan.model.dtype = parse_dtype(o.dtype, {DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  plan.model.recompute = o.recompute;
  plan.model.seed = o.seed;
  plan.model.train_base = o.method == "full";
  reading_input([&] {
    plan.weights.emplace(o.model);
    check_base(*plan.weights, plan.config);
    if (o.adapter.empty()) return;
    plan.start.emplace(o.adapter);
    static_cast<void>(plan.start->match(linear_shapes(plan.config)));
  });
  if (o.method == "lora") {
    plan.adapter = adapter_config(o, plan.start);
    o.lora_dropout = plan.adapter->lora_dropout;
    plan.model.lora = lora_for(*plan.adapter, plan.config);
  }
  plan.optimizer.groups = optimizer_groups(o.optimizer_groups, parse_algorithm(o.optimizer), o.weight_decay);
  plan.optimizer.max_gradient_norm = o.max_grad_norm;

  plan.loader.emplace(make_loader(o, o.data, plan.config, true, share));
  const std::int64_t steps_per_epoch = (plan.loader->batches_per_epoch() + o.grad_accum - 1) / o.grad_accum;
  plan.steps = total_steps(o, steps_per_epoch);
  if (!o.eval_data.empty()) {
    if (o.eval_steps == 0) o.eval_steps = steps_per_epoch;
    BatchLoader eval = make_loader(o, o.eval_data, plan.config, false, {});
    while (std::optional<HostBatch> batch = eval.next()) plan.eval_batches.push_back(std::move(*batch));
  }
  require_texts_for(o.chat_template, o.mask_prompts, {o.data, o.eval_data});
  plan.memory = estimate_memory(plan.config, plan.model, plan.optimizer, plan.loader->most_tokens(), device);
  return plan;
}

// What a resumed run must share

/// Options that a resumed run may change freely: they do not touch what is computed, or are compared by content.
bool is_free(const std::string& name) {
  static const std::set<std::string> free = {
      "model",     "data",  "out",    "adapter",     "eval_data", "save_steps", "save_total_limit",
      "recompute", "ranks", "device", "comm_timeout"};
  return free.contains(name);
}

/// Parts of the identity that fix what is trained, whatever is allowed.
bool is_fixed(const std::string& name) {
  static const std::set<std::string> fixed = {"base_model",       "adapter",       "method",     "dtype",
                                              "lora_r",           "lora_alpha",    "use_rslora", "optimizer",
                                              "optimizer_groups", "target_modules"};
  return fixed.contains(name);
}

std::string fingerprint_of_model(const ModelFiles& weights) {
  std::vector<fs::path> files{weights.directory() / "config.json"};
  for (const SafetensorsFile& file : weights.files()) files.push_back(file.path());
  return fingerprint_of_files(files);
}

std::map<std::string, std::string> identity_of(const Plan& plan, Device device) {
  const FinetuneOptions& o = plan.options;
  std::map<std::string, std::string> identity;
  const Json options = Json::parse(resolved_config(o));
  for (const auto& [name, value] : options.items()) {
    if (!is_free(name)) identity[name] = value.is_string() ? value.get<std::string>() : value.dump();
  }
  reading_input([&] {
    identity["base_model"] = fingerprint_of_model(*plan.weights);
    identity["data"] = fingerprint_of_file(o.data);
    if (!o.eval_data.empty()) identity["eval_data"] = fingerprint_of_file(o.eval_data);
    if (plan.start)
      identity["adapter"] =
          fingerprint_of_files({fs::path(o.adapter) / "adapter_config.json", plan.start->file().path()});
  });
  identity["device"] = device.is_cuda() ? "cuda" : "cpu";
  return identity;
}

ResumeOptions resume_options(const FinetuneOptions& o) {
  ResumeOptions options;
  options.allow_world_size = o.allow_world_size;
  options.allowed = [&o](const std::string& name) {
    return name == "data" ? o.allow_data_change : o.allow_config_change && !is_fixed(name);
  };
  return options;
}

/// The flag that would have allowed a change, as advice.
std::string with_advice(const Error& error) {
  const std::string text = error.what();
  const auto names = [&](const std::string& name) {
    return text.find(": " + name + " has changed") != std::string::npos;
  };
  if (names("world_size")) return text + " (--allow-world-size goes on nevertheless, not bit for bit)";
  if (names("data")) return text + " (--allow-data-change goes on with the new rows)";
  if (error.kind() != ErrorKind::kInvalidArgument || text.find(" has changed") == std::string::npos) return text;
  const std::size_t begin = text.find(": ") + 2;
  const std::string name = text.substr(begin, text.find(" has changed") - begin);
  return is_fixed(name) ? text : text + " (--allow-config-change goes on nevertheless)";
}

// Signals

std::atomic<TrainingRun*> interruptible{nullptr};
volatile std::sig_atomic_t last_signal = 0;

void interrupt(int signal) {
  last_signal = signal;
  if (TrainingRun* run = interruptible.load()) run->cancel();
}

/// While it lives, the first SIGINT or SIGTERM cancels the run; a second one of its kind ends the program at once.
class SignalHandlers {
 public:
  explicit SignalHandlers(TrainingRun& run) {
    last_signal = 0;
    interruptible = &run;
    struct sigaction action {};
    action.sa_handler = interrupt;
    action.sa_flags = static_cast<int>(SA_RESETHAND | SA_RESTART);
    ::sigaction(SIGINT, &action, &previous_int_);
    ::sigaction(SIGTERM, &action, &previous_term_);
  }
  ~SignalHandlers() {
    ::sigaction(SIGINT, &previous_int_, nullptr);
    ::sigaction(SIGTERM, &previous_term_, nullptr);
    interruptible = nullptr;
  }
  SignalHandlers(const SignalHandlers&) = delete;
  SignalHandlers& operator=(const SignalHandlers&) = delete;

 private:
  struct sigaction previous_int_ {
  }, previous_term_{};
};

// What a run shows and leaves

/// The curves of all steps so far, those before a resume included.
std::string loss_plot(const fs::path& metrics, const FinetuneOptions& o) {
  PlotSeries train{"training loss", {}, {}}, eval{"evaluation loss", {}, {}};
  for (const MetricRecord& record : read_metrics(metrics)) {
    double step = 0;
    for (const auto& [name, value] : record) {
      if (name == "step") step = static_cast<double>(std::get<std::int64_t>(value));
      for (PlotSeries* series : {&train, &eval}) {
        if (name != (series == &train ? "loss" : "eval_loss")) continue;
        series->x.push_back(step);
        series->y.push_back(std::get<double>(value));
      }
    }
  }
  PlotSpec plot;
  plot.title = fmt::format("rowan finetune ({}, {})", o.method, o.optimizer);
  plot.x_label = "step";
  plot.y_label = "loss, nats per token";
  plot.series = {train};
  if (!eval.x.empty()) plot.series.push_back(eval);
  return line_plot_svg(plot);
}

/// The loss of the last step before `steps`, as the metrics tell it.
double last_loss_of(const fs::path& metrics, std::int64_t steps) {
  double last = std::numeric_limits<double>::quiet_NaN();
  if (!fs::exists(metrics)) return last;
  for (const MetricRecord& record : read_metrics(metrics)) {
    std::optional<double> loss;
    std::int64_t step = 0;
    for (const auto& [name, value] : record) {
      if (name == "step") step = std::get<std::int64_t>(value);
      if (name == "loss") loss = std::get<double>(value);
    }
    if (loss && step <= steps) last = *loss;
  }
  return last;
}

std::string size_text(std::int64_t bytes) {
  const auto b = static_cast<double>(bytes);
  return b < 0x1p30 ? fmt::format("{:.1f} MiB", b / 0x1p20) : fmt::format("{:.2f} GiB", b / 0x1p30);
}

void print_plan(const Plan& plan) {
  const MemoryEstimate& m = plan.memory;
  if (plan.options.json) {
    const Json line = {{"parameters", m.parameters},
                       {"trainable_parameters", m.trainable_parameters},
                       {"steps", plan.steps},
                       {"memory_estimate_bytes", m.total()},
                       {"weights_bytes", m.weights},
                       {"gradients_bytes", m.gradients},
                       {"optimizer_bytes", m.optimizer},
                       {"activations_bytes", m.activations},
                       {"update_bytes", m.update}};
    std::cout << line.dump() << '\n';
    return;
  }
  std::cout << fmt::format(
      "{} trainable parameters of {} ({:.3f} %), {} optimizer steps\n"
      "memory, about {}: weights {}, gradients and masters {}, optimizer {}, activations {}, update {}\n",
      m.trainable_parameters, m.parameters,
      100 * static_cast<double>(m.trainable_parameters) / static_cast<double>(m.parameters), plan.steps,
      size_text(m.total()), size_text(m.weights), size_text(m.gradients), size_text(m.optimizer),
      size_text(m.activations), size_text(m.update));
}

/// The directory of a run.
struct RunDirectory {
  fs::path out;
  bool full;

  fs::path checkpoints() const { return out / "checkpoints"; }
  fs::path metrics() const { return out / "metrics.jsonl"; }
  fs::path tensorboard() const { return out / "tensorboard"; }
  fs::path result() const { return out / (full ? "model" : "adapter"); }
  fs::path best() const { return out / (full ? "best-model" : "best-adapter"); }
};

/// Opened with the first record, so that a run that is refused leaves the files as they were.
class Sinks final : public MetricsSink {
 public:
  explicit Sinks(RunDirectory directory) : directory_(std::move(directory)) {}
  void write(const MetricRecord& record) override {
    if (!lines_) {
      lines_ = std::make_unique<MetricsWriter>(directory_.metrics());
      tensorboard_ = std::make_unique<TensorBoardWriter>(directory_.tensorboard());
    }
    lines_->write(record);
    tensorboard_->write(record);
  }

 private:
  RunDirectory directory_;
  std::unique_ptr<MetricsWriter> lines_;
  std::unique_ptr<TensorBoardWriter> tensorboard_;
};

TrainingRunOptions run_options(const Plan& plan, const RunDirectory& directory, Device device) {
  const FinetuneOptions& o = plan.options;
  TrainingRunOptions options;
  options.trainer.learning_rate = o.learning_rate;
  options.trainer.schedule.type = parse_schedule_type(o.lr_scheduler);
  options.trainer.schedule.total_steps = plan.steps;
  options.trainer.schedule.warmup_steps = o.warmup_steps;
  options.max_steps = plan.steps;
  options.grad_accum = o.grad_accum;
  options.eval_batches = plan.eval_batches;
  options.eval_steps = o.eval_steps;
  options.early_stopping_patience = o.early_stopping_patience;
  if (!plan.eval_batches.empty()) options.best_directory = directory.best();
  options.checkpoint_directory = directory.checkpoints();
  options.save_steps = o.save_steps;
  options.save_total_limit = o.save_total_limit;
  options.identity = identity_of(plan, device);
  options.adapter = plan.adapter;
  return options;
}

/// The checkpoint to go on from; nothing for a new run, whose directory must hold none.
std::optional<Checkpoint> find_checkpoint(const FinetuneOptions& o, const RunDirectory& directory, Progress& progress) {
  if (o.resume.empty()) {
    if (list_checkpoints(directory.checkpoints()).empty()) return std::nullopt;
    fail(ErrorKind::kInvalidArgument,
         fmt::format("{} holds checkpoints of another run: give --resume latest, or another --out", o.out));
  }
  return reading_input([&] {
    if (o.resume != "latest") return open_checkpoint(o.resume);
    return open_newest_checkpoint(directory.checkpoints(), [&](const std::string& cause) {
      progress.print("passing over a damaged checkpoint: " + cause);
    });
  });
}

void load_weights(const Plan& plan, LlamaModel& model, StreamRef stream) {
  reading_input([&] { load_base(model, *plan.weights, stream); });
  if (plan.start) {
    reading_input([&] { load_adapter(model, *plan.start, stream); });
  } else {
    model.init_adapter(plan.options.seed, stream);
  }
}

/// Errors of resuming, with what the user can do.
template <class F>
void advised(const F& resume) {
  try {
    resume();
  } catch (const Error& error) {
    throw Error(error.kind() == ErrorKind::kIo ? ErrorKind::kFormat : error.kind(), with_advice(error));
  }
}

/// What a model's directory holds beside configuration and weights, for tokenizing and generating.
void copy_companions(const fs::path& from, const fs::path& to) {
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
        "merges.txt", "tokenizer.model", "chat_template.jinja", "generation_config.json"}) {
    if (fs::is_regular_file(from / name)) copy_file_atomically(from / name, to / name);
  }
}

const char* name_of(RunEnd end) {
  switch (end) {
    case RunEnd::kDone:
      return "done";
    case RunEnd::kStoppedEarly:
      return "stopped early";
    case RunEnd::kCancelled:
      return "interrupted";
    case RunEnd::kDiverged:
      return "diverged";
  }
  return "?";
}

/// One run from its plan to its files.
class Finetuning {
 public:
  Finetuning(Plan& plan, const RankPlace& place, StreamRef stream, std::shared_ptr<TrackingAllocator> memory)
      : plan_(plan),
        place_(place),
        communicator_(*place.communicator),
        stream_(stream),
        memory_(std::move(memory)),
        directory_{plan.options.out, plan.options.method == "full"},
        progress_("finetune", output(plan.options, is_first())) {}

  void run() {
    std::optional<Checkpoint> checkpoint;
    std::optional<RunLock> lock;
    run_alike(place_, [&] {
      checkpoint = find_checkpoint(plan_.options, directory_, progress_);
      if (is_first()) lock.emplace(directory_.out);
    });
    require_one_checkpoint(checkpoint);
    if (is_first()) say_what_is_left_out();
    LlamaModel model(plan_.config, plan_.model, stream_);
    std::unique_ptr<Optimizer> optimizer;
    Sinks sinks(directory_);
    std::optional<TrainingRun> training;
    run_alike(place_, [&] {
      load_weights(plan_, model, stream_);
      optimizer = make_data_parallel_optimizer(plan_.optimizer, model.parameters(), communicator_, stream_);
      require_groups_used(plan_.optimizer, model.trainable_parameters());
      TrainingRunOptions options = run_options(plan_, directory_, stream_.device());
      options.on_step = [this](const TrainStep& step) { show(step); };
      options.on_evaluation = [this](const Evaluation& e) { show(e); };
      if (is_first()) options.sinks = {&sinks};
      training.emplace(model, *optimizer, communicator_, std::move(options), stream_);
    });
    TrainingRun& run = *training;
    if (checkpoint) {
      run_alike(place_, [&] { advised([&] { run.require_resumable(*checkpoint, resume_options(plan_.options)); }); });
      advised([&] { run.resume(*checkpoint, plan_.loader ? &*plan_.loader : nullptr, resume_options(plan_.options)); });
      first_step_ = run.steps();
      last_loss_ = last_loss_of(directory_.metrics(), first_step_);
      progress_.print(fmt::format("going on from {}", checkpoint->directory.string()));
    }
    if (is_first()) begin_files();
    const RunEnd end = train(run);
    finish(run, end);
  }

 private:
  bool is_first() const { return communicator_.rank() == 0; }

  static ProgressOutput output(const FinetuneOptions& o, bool is_first) {
    ProgressOutput output = ProgressOutput::standard_error();
    if (o.json || !is_first) output.style = ProgressStyle::kQuiet;
    return output;
  }

  /// Ranks that see other files would train a mixture.
  void require_one_checkpoint(const std::optional<Checkpoint>& checkpoint) const {
    const auto step = static_cast<int>(checkpoint ? checkpoint->info.step : -1);
    const int most = largest_of_ranks(step), least = -largest_of_ranks(-step);
    run_alike(place_, [&] {
      if (most != least)
        fail(ErrorKind::kFormat, fmt::format("{}: ranks find the checkpoints of steps {} to {}: --out has to be one "
                                             "directory for all of them",
                                             directory_.checkpoints().string(), least, most));
    });
  }

  void say_what_is_left_out() {
    const BatchLoader& loader = *plan_.loader;
    if (loader.cut_rows() == 0 && loader.left_out_rows() == 0) return;
    progress_.print(fmt::format("{}: {} rows cut to {} tokens, {} left out since none of their tokens counts",
                                plan_.options.data, loader.cut_rows(), plan_.options.max_length,
                                loader.left_out_rows()));
  }

  void begin_files() {
    write_text_file(directory_.out / "config.json", resolved_config(plan_.options));
    drop_metrics_after(directory_.metrics(), first_step_ - (first_step_ == 0 ? 1 : 0));
  }

  RunEnd train(TrainingRun& run) {
    const SignalHandlers handlers(run);
    const RunEnd end = run.train(*plan_.loader);
    progress_.close();
    return end;
  }

  void show(const TrainStep& step) {
    tokens_ += step.tokens;
    last_loss_ = step.loss;
    progress_.update({.step = step.step + 1,
                      .total = plan_.steps,
                      .loss = step.loss,
                      .learning_rate = step.learning_rate,
                      .tokens = tokens_,
                      .first = first_step_,
                      .gradient_norm = step.gradient_norm,
                      .memory_bytes = memory_->peak_bytes()});
  }

  void show(const Evaluation& e) {
    last_eval_loss_ = e.loss;
    progress_.print(fmt::format("step {}  evaluation loss {:.4f}{}", e.step, e.loss, e.best ? "  (best)" : ""));
  }

  void finish(TrainingRun& run, RunEnd end) {
    if (is_first() && fs::exists(directory_.metrics()))
      write_text_file(directory_.out / "loss.svg", loss_plot(directory_.metrics(), plan_.options));
    if (end == RunEnd::kDiverged) {
      if (!is_first()) throw RanksFailed{kFailed};
      const std::vector<fs::path> checkpoints = list_checkpoints(directory_.checkpoints());
      throw std::runtime_error(fmt::format(
          "finetune: step {}: the loss or its gradient is not finite (loss {}); {}; {}", run.steps(), last_loss_,
          checkpoints.empty() ? "there is no checkpoint"
                              : fmt::format("the newest checkpoint is {}", checkpoints.back().string()),
          run.steps() <= 1 ? "the model or the data gave it" : "a lower --learning-rate may help"));
    }
    if (end != RunEnd::kCancelled) run.write_on_first_rank([&] { save(run); });
    if (is_first()) {
      report(run, end);
    }
    // No rank leaves before the files are there; one may have learned of the signal from another.
    const int signal = largest_of_ranks(static_cast<int>(last_signal));
    if (end == RunEnd::kCancelled) throw Interrupted{signal};
  }

  int largest_of_ranks(int value) const {
    Tensor all = Tensor::from_host<std::int32_t>({1}, std::vector<std::int32_t>{value}, stream_);
    communicator_.all_reduce(all, ReduceOp::kMax, stream_);
    communicator_.synchronize(stream_);
    return all.to_vector<std::int32_t>(stream_)[0];
  }

  void save(const TrainingRun& run) const {
    run.save_model(directory_.result());
    for (const fs::path& model : {directory_.result(), directory_.best()}) {
      if (directory_.full && fs::exists(model)) copy_companions(plan_.options.model, model);
    }
  }

  void report(const TrainingRun& run, RunEnd end) const {
    const double seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
    const auto number = [](double value) { return std::isfinite(value) ? Json(value) : Json(); };
    if (plan_.options.json) {
      const Json line = {{"end", name_of(end)},
                         {"steps", run.steps()},
                         {"loss", number(last_loss_)},
                         {"eval_loss", number(last_eval_loss_)},
                         {"best_eval_loss", number(run.best_eval_loss())},
                         {"trainable_parameters", plan_.memory.trainable_parameters},
                         {"tokens", tokens_},
                         {"cut_rows", plan_.loader->cut_rows()},
                         {"left_out_rows", plan_.loader->left_out_rows()},
                         {"seconds", seconds},
                         {"memory_estimate_bytes", plan_.memory.total()},
                         {"memory_peak_bytes", memory_->peak_bytes()},
                         {"ranks", communicator_.size()},
                         {"device", to_string(stream_.device())}};
      std::cout << line.dump() << '\n';
      return;
    }
    std::cout << fmt::format("{} after step {} in {:.1f} s: loss {:.4f}", name_of(end), run.steps(), seconds,
                             last_loss_);
    if (std::isfinite(run.best_eval_loss()))
      std::cout << fmt::format(", lowest evaluation loss {:.4f}", run.best_eval_loss());
    std::cout << fmt::format("; memory {} at most, estimated {}\n",
                             size_text(static_cast<std::int64_t>(memory_->peak_bytes())),
                             size_text(plan_.memory.total()));
    if (end == RunEnd::kCancelled) {
      std::cout << fmt::format("saved in {}; --resume latest goes on\n", directory_.checkpoints().string());
    } else {
      std::cout << fmt::format("trained {} in {}\n", plan_.options.method == "full" ? "model" : "adapter",
                               directory_.result().string());
    }
  }

  Plan& plan_;
  const RankPlace& place_;
  Communicator& communicator_;
  StreamRef stream_;
  std::shared_ptr<TrackingAllocator> memory_;
  RunDirectory directory_;
  Progress progress_;
  Clock::time_point begin_ = Clock::now();
  std::int64_t first_step_ = 0;  // steps before this process
  std::int64_t tokens_ = 0;
  double last_loss_ = std::numeric_limits<double>::quiet_NaN();
  double last_eval_loss_ = std::numeric_limits<double>::quiet_NaN();
};

}  // namespace

void run_finetune(const FinetuneOptions& options) {
  if (options.dry_run)
    return print_plan(make_plan(options, parse_device(options.ranks.device), {0, std::max(1, options.ranks.ranks)}));
  const RankPlace place = join_ranks(options.ranks);
  Plan plan;
  run_alike(place, [&] {
    plan = make_plan(options, place.device, {place.communicator->rank(), place.communicator->size()});
  });
  const auto memory = std::make_shared<TrackingAllocator>(current_allocator(place.device));
  const ScopedAllocator scope(memory);
  const Stream stream(place.device);
  Finetuning(plan, place, stream, memory).run();
}

}  // namespace rowan::app
