#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "../rowan/demo_task.h"
#include "benches.h"
#include "rowan/io/atomic_file.h"
#include "rowan/nn/llama_files.h"
#include "rowan/train/plot.h"
#include "rowan/train/trainer.h"

namespace rowan::bench {

namespace {

using app::DemoCorpora;

constexpr std::uint64_t kSeeds = 5;
constexpr std::int64_t kPathSteps = 1000;

// Who steps what, at which rates.
struct Routing {
  std::string name;
  OptimizerOptions options;
  std::vector<double> rates;
};

OptimizerOptions with_groups(Algorithm algorithm, const std::function<void(ParameterGroup&)>& change) {
  OptimizerOptions options = app::demo_optimizer(algorithm);
  for (ParameterGroup& group : options.groups) change(group);
  return options;
}

OptimizerOptions slow_magnitudes() {
  return with_groups(Algorithm::kMuown, [](ParameterGroup& group) { group.magnitude_lr = 0.1; });
}

// Muown on B, AdamW on A at the rate that AdamW likes.
OptimizerOptions muown_on_b(double a_rate_scale) {
  OptimizerOptions options = app::demo_optimizer(Algorithm::kMuown);
  ParameterGroup a;
  a.roles = {Parameter::Role::kLoraA};
  a.algorithm = Algorithm::kAdamW;
  a.learning_rate_scale = a_rate_scale;
  options.groups.insert(options.groups.begin(), a);
  return options;
}

// One task: a model to train, texts, and the loss on held-out text.
struct Task {
  std::string name;
  std::int64_t steps = 0;
  std::function<LlamaModel(std::uint64_t seed)> make_model;
  std::function<DemoCorpora(std::uint64_t seed, std::int64_t steps)> make_corpora;
};

struct Outcome {
  double held_out = 0;         // nats a byte
  std::vector<double> losses;  // of training
};

Outcome learn(Setup& setup, const Task& task, const OptimizerOptions& options, double rate, std::uint64_t seed,
              std::int64_t steps) {
  LlamaModel model = task.make_model(seed);
  const DemoCorpora corpora = task.make_corpora(seed, steps);
  const auto optimizer = make_optimizer(options, model.parameters(), setup.stream());
  SingleCommunicator single;
  Trainer trainer(model, *optimizer, single, app::demo_schedule(rate, steps), setup.stream());
  Outcome outcome;
  for (const HostBatch& batch : corpora.training) outcome.losses.push_back(trainer.step(batch).loss);
  outcome.held_out = evaluate(model, corpora.held_out, setup.stream());
  return outcome;
}

LlamaModel fresh_base(Setup& setup, std::uint64_t seed) {
  LlamaOptions dense;
  dense.train_base = true;
  const ModelConfig config = app::demo_model_config();
  LlamaModel model(config, dense, setup.stream());
  model.init_base(seed, config.initializer_range, setup.stream());
  return model;
}

Task pretraining(Setup& setup) {
  return {"dense pre-training", 150, [&setup](std::uint64_t seed) { return fresh_base(setup, seed); },
          [](std::uint64_t seed, std::int64_t steps) {
            return DemoCorpora(app::TemplateGrammar::plain(), 2 * seed, steps);
          }};
}

// One base for all, pre-trained by the demo's own recipe, as weights by name.
std::vector<NamedTensor> pretrained(Setup& setup) {
  LlamaModel model = fresh_base(setup, 1);
  const DemoCorpora corpora = pretraining(setup).make_corpora(1, 150);
  const auto optimizer = make_optimizer(app::demo_optimizer(Algorithm::kMuown), model.parameters(), setup.stream());
  SingleCommunicator single;
  Trainer trainer(model, *optimizer, single, app::demo_schedule(0.01, 150), setup.stream());
  for (const HostBatch& batch : corpora.training) trainer.step(batch);
  std::vector<NamedTensor> weights;
  for (const Parameter& parameter : model.parameters())
    weights.push_back({parameter.name, parameter.value.clone(setup.stream())});
  return weights;
}

Task fine_tuning(Setup& setup) {
  const auto weights = std::make_shared<const std::vector<NamedTensor>>(pretrained(setup));
  return {"LoRA fine-tuning", 100,
          [&setup, weights](std::uint64_t seed) {
            const ModelConfig config = app::demo_model_config();
            LlamaOptions tuning;
            tuning.lora = lora_for(app::demo_adapter_config(""), config);
            LlamaModel model(config, tuning, setup.stream());
            model.init_adapter(seed + 1, setup.stream());
            for (const NamedTensor& weight : *weights)
              for (const Parameter& parameter : model.parameters())
                if (parameter.name == weight.name) parameter.value.copy_from(weight.tensor, setup.stream());
            return model;
          },
          [](std::uint64_t seed, std::int64_t steps) {
            return DemoCorpora(app::TemplateGrammar::pirate(), 2 * seed + 1, steps);
          }};
}

std::vector<double> around(double middle) { return {middle / 4, middle / 2, middle, middle * 2, middle * 4}; }

double mean(const std::vector<double>& values) {
  double sum = 0;
  for (double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

double deviation(const std::vector<double>& values) {
  const double middle = mean(values);
  double sum = 0;
  for (double value : values) sum += (value - middle) * (value - middle);
  return std::sqrt(sum / static_cast<double>(values.size() - 1));
}

// Every routing at its rates with one seed, the best two rates with all seeds.
void study_rates(Setup& setup, Report& report, const Task& task, const std::vector<Routing>& routings) {
  PlotSpec plot;
  plot.title = "rowan: " + task.name + " of the demo, held-out loss by learning rate";
  plot.x_label = "log10 of the peak learning rate";
  plot.y_label = "held-out loss, nats per byte";
  plot.log_y = true;
  plot.levels = {{task.make_corpora(1, 1).entropy, "entropy"}};
  const std::string table = task.name + ": best rates, held-out nats per byte over seeds";
  for (const Routing& routing : routings) {
    PlotSeries series{routing.name, {}, {}};
    std::vector<std::pair<double, double>> found;  // loss, rate
    for (double rate : routing.rates) {
      const double loss = learn(setup, task, routing.options, rate, 1, task.steps).held_out;
      report.add(task.name + ": every rate, one seed", {{"routing", routing.name}, {"rate", rate}, {"held-out", loss}});
      series.x.push_back(std::log10(rate));
      series.y.push_back(loss);
      found.emplace_back(std::isfinite(loss) ? loss : 1e30, rate);
    }
    plot.series.push_back(series);
    std::sort(found.begin(), found.end());
    for (std::size_t i = 0; i < 2; ++i) {
      std::vector<double> losses;
      for (std::uint64_t seed = 1; seed <= kSeeds; ++seed)
        losses.push_back(learn(setup, task, routing.options, found[i].second, seed, task.steps).held_out);
      report.add(table, {{"routing", routing.name},
                         {"rate", found[i].second},
                         {"mean", mean(losses)},
                         {"deviation", deviation(losses)},
                         {"worst", *std::max_element(losses.begin(), losses.end())}});
    }
  }
  report.print(task.name + ": every rate, one seed");
  report.print(table);
  if (!setup.options().results.empty()) {
    make_directories(setup.options().results);
    write_text_file(
        std::filesystem::path(setup.options().results) / (task.steps == 150 ? "rates-dense.svg" : "rates-lora.svg"),
        line_plot_svg(plot));
  }
}

// The loss curves of the standard path and the fast one over seeds.
void study_paths(Setup& setup, Report& report) {
  const Task task = pretraining(setup);
  PlotSpec plot;
  plot.title = "rowan: demo's base model, 1000 steps, mean of 20 steps";
  plot.x_label = "step";
  plot.y_label = "training loss, nats per byte";
  plot.log_y = true;
  const std::string table = "Newton-Schulz paths: held-out nats per byte after 1000 steps";
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    Report::Row row = {{"seed", seed}};
    for (NewtonSchulzPath path : {NewtonSchulzPath::kStandard, NewtonSchulzPath::kAuto}) {
      OptimizerOptions options =
          with_groups(Algorithm::kMuown, [&](ParameterGroup& group) { group.newton_schulz.path = path; });
      const Outcome outcome = learn(setup, task, options, 0.01, seed, kPathSteps);
      const std::string name = path == NewtonSchulzPath::kAuto ? "gram and skinny" : "standard";
      PlotSeries series{fmt::format("{}, seed {}", name, seed), {}, {}};
      for (std::size_t i = 0; i + 20 <= outcome.losses.size(); i += 20) {
        series.x.push_back(static_cast<double>(i) + 10);
        series.y.push_back(mean({outcome.losses.begin() + static_cast<std::ptrdiff_t>(i),
                                 outcome.losses.begin() + static_cast<std::ptrdiff_t>(i + 20)}));
      }
      plot.series.push_back(series);
      row[name] = outcome.held_out;
    }
    report.add(table, row);
  }
  report.print(table);
  if (!setup.options().results.empty())
    write_text_file(std::filesystem::path(setup.options().results) / "newton-schulz-paths.svg", line_plot_svg(plot));
}

}  // namespace

void bench_study(Setup& setup, Report& report) {
  study_rates(setup, report, pretraining(setup),
              {{"Muown", app::demo_optimizer(Algorithm::kMuown), around(0.01)},
               {"Muown, magnitude_lr 0.1", slow_magnitudes(), around(0.01)},
               {"Muon", app::demo_optimizer(Algorithm::kMuon), around(0.02)},
               {"AdamW", app::demo_optimizer(Algorithm::kAdamW), around(4e-3)}});
  study_rates(setup, report, fine_tuning(setup),
              {{"Muown", app::demo_optimizer(Algorithm::kMuown), around(0.02)},
               {"Muown, magnitude_lr 0.1", slow_magnitudes(), around(0.02)},
               {"Muown on B, AdamW on A", muown_on_b(0.25), around(0.02)},
               {"Muon", app::demo_optimizer(Algorithm::kMuon), around(0.02)},
               {"AdamW", app::demo_optimizer(Algorithm::kAdamW), around(1e-2)}});
  study_paths(setup, report);
}

}  // namespace rowan::bench
