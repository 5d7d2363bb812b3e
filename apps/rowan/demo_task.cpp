#include "demo_task.h"

#include <algorithm>

#include "byte_text.h"
#include "rowan/train/token_batches.h"

namespace rowan::app {

namespace {

constexpr std::int64_t kHeldOutBytes = 48 * 1024;
constexpr std::int64_t kHeldOutContext = 32;

}  // namespace

ModelConfig demo_model_config() {
  ModelConfig config;
  config.vocab_size = kByteVocabulary;
  config.hidden_size = 128;
  config.intermediate_size = 448;
  config.num_hidden_layers = 4;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 32;
  config.max_position_embeddings = 256;
  config.initializer_range = 0.05;
  return config;
}

AdapterConfig demo_adapter_config(const std::string& base) {
  AdapterConfig config;
  config.r = 8;
  config.lora_alpha = 16;
  config.target_pattern = "all-linear";
  config.base_model_name_or_path = base;
  return config;
}

OptimizerOptions demo_optimizer(Algorithm algorithm) {
  OptimizerOptions options;
  options.groups = default_groups(algorithm);
  options.max_gradient_norm = 1.0;
  for (ParameterGroup& group : options.groups) {
    if (std::ranges::count(group.roles, Parameter::Role::kMatrix) > 0)
      group.newton_schulz.path = NewtonSchulzPath::kGramFp32;
  }
  return options;
}

TrainerOptions demo_schedule(double learning_rate, std::int64_t steps) {
  TrainerOptions options;
  options.learning_rate = learning_rate;
  options.schedule = {.type = Schedule::Type::kLinear, .total_steps = steps};
  options.schedule.warmup_steps = std::min<std::int64_t>(5, steps / 2);
  return options;
}

DemoCorpora::DemoCorpora(const TemplateGrammar& grammar, std::uint64_t seed, std::int64_t steps)
    : training(training_batches(grammar.sample(seed * 4, static_cast<std::size_t>(steps * kDemoTokensPerStep + 1)),
                                kDemoSequenceLength, kDemoBatchSize)),
      held_out_text(grammar.sample(seed * 4 + 1, kHeldOutBytes)),
      held_out_rows(app::held_out_rows(held_out_text, kDemoSequenceLength, kHeldOutContext)),
      held_out(batches_of(held_out_rows, kDemoTokensPerStep)),
      entropy(grammar.entropy_per_byte()) {}

}  // namespace rowan::app
