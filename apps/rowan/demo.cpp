#include "demo.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "byte_text.h"
#include "demo_task.h"
#include "output_paths.h"
#include "progress.h"
#include "rowan/comm/communicator.h"
#include "rowan/core/build_info.h"
#include "rowan/core/error.h"
#include "rowan/io/atomic_file.h"
#include "rowan/nn/llama_files.h"
#include "rowan/optim/data_parallel.h"
#include "rowan/optim/optimizer.h"
#include "rowan/train/metrics.h"
#include "rowan/train/plot.h"
#include "rowan/train/token_batches.h"
#include "rowan/train/trainer.h"

namespace rowan::app {

namespace {

constexpr std::int64_t kSampleBytes = 160;

/// Peak learning rates of the two stages.
struct Rates {
  double pretrain;
  double tune;
};

Rates rates_for(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kMuown:
      return {0.01, 0.02};
    case Algorithm::kMuon:
      return {0.02, 0.02};
    default:
      return {4e-3, 1e-2};
  }
}

/// What the two stages share: where they run and what they report to.
struct Run {
  const DemoOptions& options;
  Communicator& communicator;
  StreamRef stream;
  std::optional<MetricsWriter> metrics;  // of the first rank
  std::vector<double> steps;             // of both stages, one after the other
  std::vector<double> losses;
};

/// Losses of one model on held-out text of both styles, in nats per byte.
struct Losses {
  double plain = 0;
  double pirate = 0;
};

/// Trains, and measures what came of it.
Losses train(Run& run, const char* stage, LlamaModel& model, const std::vector<HostBatch>& batches,
             double learning_rate, const DemoCorpora& plain, const DemoCorpora& pirate) {
  const OptimizerOptions options = demo_optimizer(parse_algorithm(run.options.optimizer));
  const auto optimizer = make_data_parallel_optimizer(options, model.parameters(), run.communicator, run.stream);
  const TrainerOptions training = demo_schedule(learning_rate, static_cast<std::int64_t>(batches.size()));
  const int rank = run.communicator.rank(), ranks = run.communicator.size();
  Trainer trainer(model, *optimizer, run.communicator, training, run.stream);
  ProgressOutput output = ProgressOutput::standard_error();
  if (run.options.json || rank != 0) output.style = ProgressStyle::kQuiet;
  Progress progress(stage, output);
  std::int64_t tokens = 0;
  for (const HostBatch& batch : batches) {
    const TrainStep step = trainer.step(sequences_of_rank(batch, rank, ranks));
    if (!std::isfinite(step.loss))
      throw std::runtime_error(fmt::format("demo: the loss of step {} of {} is not finite", step.step, stage));
    run.steps.push_back(static_cast<double>(run.steps.size()));
    run.losses.push_back(step.loss);
    if (run.metrics)
      run.metrics->write({{"stage", std::string(stage)},
                          {"step", step.step},
                          {"loss", step.loss},
                          {"learning_rate", step.learning_rate},
                          {"gradient_norm", step.gradient_norm},
                          {"tokens", step.tokens},
                          {"seconds", step.seconds}});
    tokens += step.tokens;
    progress.update({step.step + 1, training.schedule.total_steps, step.loss, step.learning_rate, tokens});
  }
  progress.close();
  return {trainer.evaluate(plain.held_out), trainer.evaluate(pirate.held_out)};
}

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

void write_config(const std::filesystem::path& path, const DemoOptions& options, const Rates& rates, const Run& run,
                  std::int64_t parameters) {
  const nlohmann::ordered_json config = {{"rowan", build_info().version},
                                         {"seed", options.seed},
                                         {"optimizer", options.optimizer},
                                         {"device", to_string(run.stream.device())},
                                         {"ranks", run.communicator.size()},
                                         {"parameters", parameters},
                                         {"sequence_length", kDemoSequenceLength},
                                         {"batch_size", kDemoBatchSize},
                                         {"pretrain_steps", options.pretrain_steps},
                                         {"pretrain_learning_rate", rates.pretrain},
                                         {"tune_steps", options.tune_steps},
                                         {"tune_learning_rate", rates.tune},
                                         {"lora_r", demo_adapter_config("").r},
                                         {"lora_alpha", demo_adapter_config("").lora_alpha}};
  write_text_file(path, config.dump(2) + "\n");
}

std::string loss_plot(const Run& run, const DemoOptions& options, const DemoCorpora& plain, const DemoCorpora& pirate) {
  PlotSpec plot;
  plot.title = fmt::format("rowan demo: pre-training, then LoRA fine-tuning ({})", options.optimizer);
  plot.x_label = "step";
  plot.y_label = "training loss, nats per byte";
  plot.series = {{"training loss", run.steps, run.losses}};
  plot.levels = {{plain.entropy, "entropy of style 1"}, {pirate.entropy, "entropy of style 2"}};
  plot.events = {{static_cast<double>(options.pretrain_steps), "LoRA on style 2"}};
  plot.log_y = true;
  return line_plot_svg(plot);
}

/// One line of text for the terminal: control bytes and bytes beyond ASCII as dots, line ends as " | ".
std::string printable(const std::string& text) {
  std::string shown;
  for (const char c : text) {
    if (c == '\n') {
      shown += " | ";
    } else {
      shown += c >= ' ' && c <= '~' ? c : '.';
    }
  }
  return shown;
}

std::int64_t count_parameters(const std::vector<Parameter>& parameters) {
  std::int64_t count = 0;
  for (const Parameter& p : parameters) count += p.value.elements();
  return count;
}

}  // namespace

void run_demo(const DemoOptions& options) {
  const Clock::time_point begin = Clock::now();
  const RankPlace place = join_ranks(options.ranks);
  const Device device = place.device;
  const bool is_first = place.is_first();
  const Stream stream(device);
  const std::filesystem::path out = options.out;
  const Rates defaults = rates_for(parse_algorithm(options.optimizer));
  const Rates rates{options.pretrain_learning_rate.value_or(defaults.pretrain),
                    options.tune_learning_rate.value_or(defaults.tune)};
  const TemplateGrammar plain_grammar = TemplateGrammar::plain(), pirate_grammar = TemplateGrammar::pirate();
  const DemoCorpora plain(plain_grammar, 2 * options.seed, options.pretrain_steps),
      pirate(pirate_grammar, 2 * options.seed + 1, options.tune_steps);
  const ModelConfig config = demo_model_config();
  const AdapterConfig adapter = demo_adapter_config((out / "base").string());

  Run run{options, *place.communicator, stream, {}, {}, {}};
  std::optional<RunLock> lock;
  run_alike(place, [&] {
    require_run_directory(out, {});
    if (is_first) lock.emplace(out);
  });
  if (is_first) {
    std::filesystem::remove(out / "metrics.jsonl");
    run.metrics.emplace(out / "metrics.jsonl");
    write_token_rows(out / "held-out-1.jsonl", plain.held_out_rows);
    write_token_rows(out / "held-out-2.jsonl", pirate.held_out_rows);
  }

  Losses base;
  std::string before;
  const std::string prompt = pirate.held_out_text.substr(0, pirate.held_out_text.find('\n') + 6);
  const auto sample = [&](LlamaModel& model) {
    return continue_text(model, prompt, kSampleBytes, 0.7, kDemoSequenceLength, options.seed, stream);
  };
  {
    LlamaOptions dense;
    dense.train_base = true;
    LlamaModel model(config, dense, stream);
    model.init_base(options.seed, config.initializer_range, stream);
    if (is_first) write_config(out / "config.json", options, rates, run, count_parameters(model.parameters()));
    base = train(run, "pretrain", model, plain.training, rates.pretrain, plain, pirate);
    if (is_first) {
      before = sample(model);
      save_base(out / "base", model, stream);
      write_text_file(out / "base" / "tokenizer.json", byte_tokenizer());
    }
  }
  place.communicator->barrier(stream);

  // The base comes back from its files, as any model would.
  const ModelConfig loaded = read_model_config(out / "base");
  LlamaOptions tuning;
  tuning.lora = lora_for(adapter, loaded);
  LlamaModel model(loaded, tuning, stream);
  load_base(model, ModelFiles(out / "base"), stream);
  model.init_adapter(options.seed + 1, stream);
  const Losses tuned = train(run, "tune", model, pirate.training, rates.tune, plain, pirate);
  if (!is_first) return;
  const std::string after = sample(model);
  save_adapter(out / "adapter", model, adapter, stream);
  write_text_file(out / "loss.svg", loss_plot(run, options, plain, pirate));
  const double seconds = seconds_since(begin);

  if (options.json) {
    const nlohmann::ordered_json line = {{"base_loss", base.pirate},         {"tuned_loss", tuned.pirate},
                                         {"entropy", pirate.entropy},        {"base_loss_style1", base.plain},
                                         {"tuned_loss_style1", tuned.plain}, {"entropy_style1", plain.entropy},
                                         {"optimizer", options.optimizer},   {"device", to_string(device)},
                                         {"ranks", run.communicator.size()}, {"seconds", seconds}};
    std::cout << line.dump() << '\n';
    return;
  }
  const std::int64_t trained = count_parameters(model.trainable_parameters());
  const double tokens = static_cast<double>((options.pretrain_steps + options.tune_steps) * kDemoTokensPerStep);
  std::cout << fmt::format(
      "\nheld-out loss, nats per byte        style 1 (plain)   style 2 (pirate)\n"
      "  entropy of the grammar            {:15.4f}   {:16.4f}\n"
      "  base model, pre-trained on 1      {:15.4f}   {:16.4f}\n"
      "  with LoRA, fine-tuned on 2        {:15.4f}   {:16.4f}\n\n"
      "prompt            {}\n"
      "base continues    {}\n"
      "tuned continues   {}\n\n"
      "base {} parameters, adapter {}; {:.0f} training tokens in {:.1f} s on {} with {}\n"
      "files: {}/base (Hugging Face model), {}/adapter (PEFT adapter), held-out-1.jsonl and held-out-2.jsonl (for "
      "rowan eval),\n"
      "       metrics.jsonl, loss.svg, config.json\n",
      plain.entropy, pirate.entropy, base.plain, base.pirate, tuned.plain, tuned.pirate, printable(prompt),
      printable(before), printable(after), count_parameters(model.parameters()) - trained, trained, tokens, seconds,
      to_string(device), options.optimizer, out.string(), out.string());
}

}  // namespace rowan::app
