#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "benches.h"
#include "rowan/core/allocator.h"
#include "rowan/core/rng.h"
#include "rowan/nn/llama.h"
#include "rowan/ops/elementwise.h"
#include "rowan/optim/optimizer.h"
#include "rowan/train/trainer.h"

namespace rowan::bench {

namespace {

ModelConfig billion() {
  ModelConfig config;
  config.vocab_size = 32000;
  config.hidden_size = 2048;
  config.intermediate_size = 8192;
  config.num_hidden_layers = 16;
  config.num_attention_heads = 32;
  config.num_key_value_heads = 8;
  config.head_dim = 64;
  config.max_position_embeddings = 2048;
  return config;
}

ModelConfig million() {
  ModelConfig config = billion();
  config.vocab_size = 256;
  config.hidden_size = 128;
  config.intermediate_size = 512;
  config.num_hidden_layers = 4;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 32;
  return config;
}

HostBatch random_batch(std::int64_t sequences, std::int64_t length, std::int64_t vocab_size) {
  Rng rng(5);
  HostBatch batch;
  for (std::int64_t s = 0; s < sequences; ++s) {
    std::vector<std::int32_t> ids;
    for (std::int64_t i = 0; i < length; ++i)
      ids.push_back(static_cast<std::int32_t>(rng.below(static_cast<std::uint64_t>(vocab_size))));
    batch.append(ids, {ids.begin(), ids.end()});
  }
  return batch;
}

// Floating-point operations of the products that a step with a frozen base cannot do without, a token: forward and dx
// of every linear and the head, and causal attention of a sequence (forward once, backward two and a half times).
double operations_a_token(const ModelConfig& c, std::int64_t length) {
  const auto d = [](std::int64_t value) { return static_cast<double>(value); };
  const double attention_width = d(c.num_attention_heads * c.head_dim), kv = d(c.num_key_value_heads * c.head_dim);
  const double linears = d(c.hidden_size) * (2 * attention_width + 2 * kv + 3 * d(c.intermediate_size));
  const double head = d(c.hidden_size * c.vocab_size);
  const double attention = 3.5 * 2 * attention_width * d(length);
  return d(c.num_hidden_layers) * (4 * linears + attention) + 4 * head;
}

struct StepTime {
  double seconds = 0, loss = 0, peak_bytes = 0;
};

// Norms of 1, small random numbers elsewhere: drawing a billion of them on the host would take longer than the steps.
void randomize_base(Setup& setup, const LlamaModel& model) {
  for (const Parameter& parameter : model.parameters()) {
    Tensor value = parameter.value;
    if (value.rank() == 1) {
      fill(value, 1, setup.stream());
    } else {
      setup.randomize(value, 0.02);
    }
  }
}

StepTime time_steps(Setup& setup, const ModelConfig& config, const HostBatch& batch, Algorithm algorithm,
                    bool recompute) {
  const StreamRef stream = setup.stream();
  LlamaOptions options;
  options.dtype = setup.on_cuda() ? DType::kBFloat16 : DType::kFloat32;
  options.recompute = recompute;
  options.lora = [](const std::string& module) -> std::optional<LoraConfig> {
    if (module.find("lm_head") != std::string::npos) return std::nullopt;
    LoraConfig lora;
    lora.rank = 16;
    lora.alpha = 32;
    return lora;
  };
  const auto tracking = std::make_shared<TrackingAllocator>(current_allocator(stream.device()));
  const ScopedAllocator scope(tracking);
  LlamaModel model(config, options, stream);
  randomize_base(setup, model);
  model.init_adapter(2, stream);
  OptimizerOptions optimizer_options;
  optimizer_options.groups = default_groups(algorithm);
  const auto optimizer = make_optimizer(optimizer_options, model.parameters(), stream);
  SingleCommunicator single;
  Trainer trainer(model, *optimizer, single, {}, stream);
  for (int i = 0; i < 3; ++i) trainer.step(batch);
  std::vector<double> seconds;
  double loss = 0;
  for (int i = 0; i < 9; ++i) {
    const TrainStep step = trainer.step(batch);
    seconds.push_back(step.seconds);
    loss = step.loss;
  }
  std::nth_element(seconds.begin(), seconds.begin() + 4, seconds.end());
  return {seconds[4], loss, static_cast<double>(tracking->peak_bytes())};
}

}  // namespace

void bench_step(Setup& setup, Report& report) {
  const ModelConfig config = setup.on_cuda() ? billion() : million();
  const std::int64_t sequences = setup.on_cuda() ? 4 : 2, length = setup.on_cuda() ? 2048 : 256;
  const HostBatch batch = random_batch(sequences, length, config.vocab_size);
  const double operations = operations_a_token(config, length);
  const std::string table =
      fmt::format("Fine-tuning step, LoRA r 16 on every linear, {} x {} tokens", sequences, length);
  for (const auto& [algorithm, recompute] :
       {std::pair{Algorithm::kMuown, false}, {Algorithm::kAdamW, false}, {Algorithm::kMuown, true}}) {
    const StepTime t = time_steps(setup, config, batch, algorithm, recompute);
    const double tokens = static_cast<double>(batch.tokens()) / t.seconds;
    report.add(table, {{"optimizer", to_string(algorithm)},
                       {"recompute", recompute},
                       {"ms", t.seconds * 1e3},
                       {"tokens/s", tokens},
                       {"peak GiB", t.peak_bytes / (1 << 30)},
                       {"TFLOP/s of needed products", tokens * operations * 1e-12},
                       {"loss", t.loss}});
    if (setup.on_cuda() && algorithm == Algorithm::kMuown && !recompute) report.figure("step_tokens_per_s", tokens);
  }
  report.print(table);
}

}  // namespace rowan::bench
