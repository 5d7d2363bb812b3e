// Trains LoRA factors on batches made in memory, without a file: a small model learns to continue the sequence
// x, 5 x + 3 (mod 32), … on top of random frozen weights.
#include <cstdio>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "rowan/optim/optimizer.h"
#include "rowan/train/training_run.h"

namespace {

rowan::ModelConfig model_config() {
  rowan::ModelConfig config;
  config.vocab_size = 32;
  config.hidden_size = 64;
  config.intermediate_size = 128;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 16;
  config.max_position_embeddings = 64;
  return config;
}

rowan::HostBatch make_batch() {
  rowan::HostBatch batch;
  for (std::int32_t first = 0; first < 32; first += 4) {
    std::vector<std::int32_t> ids{first};
    for (int i = 0; i < 16; ++i) ids.push_back((5 * ids.back() + 3) % 32);
    const std::vector<std::int64_t> next(ids.begin() + 1, ids.end());  // the label of a token is the one that follows
    ids.pop_back();
    batch.append(ids, next);
  }
  return batch;
}

void train() {
  const rowan::Stream stream(rowan::parse_device("auto"));
  rowan::LlamaOptions adapted;
  adapted.lora = [](const std::string&) {
    rowan::LoraConfig lora;
    lora.rank = 8;
    lora.alpha = 16;
    return std::optional(lora);
  };
  rowan::LlamaModel model(model_config(), adapted, stream);
  model.init_base(1, 0.1, stream);
  model.init_adapter(2, stream);
  const auto optimizer =
      rowan::make_optimizer({rowan::default_groups(rowan::Algorithm::kMuown), 1.0}, model.parameters(), stream);
  rowan::SingleCommunicator communicator;

  rowan::TrainingRunOptions options;
  options.trainer.learning_rate = 0.02;
  options.max_steps = 60;
  options.on_step = [](const rowan::TrainStep& step) {
    if (step.step % 10 == 0) std::printf("step %2d  loss %.4f\n", static_cast<int>(step.step), step.loss);
  };
  rowan::TrainingRun run(model, *optimizer, communicator, std::move(options), stream);
  const rowan::HostBatch batch = make_batch();
  while (!run.end()) run.step(std::span(&batch, 1));  // run.cancel() from any thread would end it
  std::printf("loss after %d steps: %.4f\n", static_cast<int>(run.steps()),
              rowan::evaluate(model, std::span(&batch, 1), stream));
}

}  // namespace

int main() try {
  train();
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "own_batches: %s\n", error.what());
  return 1;
}
