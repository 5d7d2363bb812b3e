#include "rowan/train/memory_estimate.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "catch.h"
#include "rowan/core/allocator.h"
#include "rowan/nn/llama_files.h"
#include "rowan/train/trainer.h"
#include "support/device.h"

namespace rowan {
namespace {

ModelConfig config_of(const char* architecture) {
  ModelConfig config;
  config.architecture = architecture;
  config.vocab_size = 600;
  config.hidden_size = 96;
  config.intermediate_size = 200;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 6;
  config.num_key_value_heads = 2;
  config.head_dim = 16;
  config.max_position_embeddings = 256;
  config.qkv_bias = config.architecture == "Qwen2ForCausalLM";
  config.qk_norm = config.architecture == "Qwen3ForCausalLM";
  config.tie_word_embeddings = config.qk_norm;
  return config;
}

LlamaOptions options_of(const ModelConfig& config, bool full, DType dtype, bool recompute, double dropout) {
  LlamaOptions options;
  options.dtype = dtype;
  options.train_base = full;
  options.recompute = recompute;
  if (full) return options;
  AdapterConfig adapter;
  adapter.target_pattern = "all-linear";
  adapter.lora_dropout = dropout;
  options.lora = lora_for(adapter, config);
  return options;
}

HostBatch batch_of(std::int64_t tokens) {
  HostBatch batch;
  for (std::int64_t left = tokens; left > 0; left -= 128) {
    const std::vector<std::int32_t> ids(static_cast<std::size_t>(std::min<std::int64_t>(left, 128)), 3);
    batch.append(ids, std::vector<std::int64_t>(ids.size(), 3));
  }
  return batch;
}

void check_estimate(const ModelConfig& config, const LlamaOptions& options, Algorithm algorithm, std::int64_t tokens,
                    StreamRef stream) {
  CAPTURE(config.architecture, options.train_base, to_string(options.dtype), options.recompute, tokens);
  CAPTURE(to_string(algorithm));
  OptimizerOptions settings;
  settings.groups = default_groups(algorithm);
  const MemoryEstimate estimate = estimate_memory(config, options, settings, tokens, stream.device());
  const auto tracker = std::make_shared<TrackingAllocator>(current_allocator(stream.device()));
  std::int64_t parameters = 0, trainable = 0;
  {
    const ScopedAllocator scope(tracker);
    LlamaModel model(config, options, stream);
    model.init_base(1, 0.05, stream);
    model.init_adapter(2, stream);
    tracker->reset_peak();  // of training: drawing initial values holds a weight more
    const auto optimizer = make_optimizer(settings, model.parameters(), stream);
    SingleCommunicator communicator;
    Trainer trainer(model, *optimizer, communicator, {}, stream);
    trainer.step(batch_of(tokens));
    for (const Parameter& p : model.parameters()) parameters += p.value.elements();
    for (const Parameter& p : model.trainable_parameters()) trainable += p.value.elements();
  }
  CHECK(estimate.parameters == parameters);
  CHECK(estimate.trainable_parameters == trainable);
  const auto used = static_cast<double>(tracker->peak_bytes());
  CAPTURE(used, estimate.weights, estimate.gradients, estimate.optimizer, estimate.activations, estimate.update);
  CHECK(std::abs(static_cast<double>(estimate.total()) / used - 1) < 0.1);
}

void check_estimates(StreamRef stream) {
  for (const char* architecture : {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}) {
    const ModelConfig config = config_of(architecture);
    for (const bool full : {false, true}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        for (const bool recompute : {false, true}) {
          for (const std::int64_t tokens : {32, 200}) {
            const LlamaOptions options = options_of(config, full, dtype, recompute, recompute ? 0.1 : 0);
            check_estimate(config, options, tokens == 32 ? Algorithm::kAdamW : Algorithm::kMuown, tokens, stream);
          }
        }
      }
    }
  }
}

}  // namespace

TEST_CASE("the memory estimate is within 10 % of what a run then holds", "[memory]") { check_estimates(StreamRef()); }

TEST_CASE("the memory estimate is within 10 % of what a run then holds on CUDA", "[memory][gpu]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_estimates(stream);
}

}  // namespace rowan
