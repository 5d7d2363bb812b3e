#include "rowan/train/trainer.h"

#include <cmath>
#include <memory>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/core/rng.h"
#include "rowan/ops/cross_entropy.h"
#include "support/compare.h"
#include "support/device.h"

namespace rowan {
namespace {

ModelConfig small_config() {
  ModelConfig config;
  config.vocab_size = 32;
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  config.max_position_embeddings = 64;
  return config;
}

/// A model, its optimizer and a trainer on one stream.
struct Training {
  Training(const LlamaOptions& options, Algorithm algorithm, double rate, StreamRef where)
      : stream(where), model(small_config(), options, where) {
    model.init_base(1, 0.1, stream);
    model.init_adapter(2, stream);
    OptimizerOptions settings;
    settings.groups = default_groups(algorithm);
    optimizer = make_optimizer(settings, model.parameters(), stream);
    trainer = std::make_unique<Trainer>(model, *optimizer, communicator,
                                        TrainerOptions{.learning_rate = rate, .schedule = {}}, stream);
  }

  std::vector<double> weights() const {
    std::vector<double> all;
    for (const Parameter& p : model.trainable_parameters()) {
      const auto more = test::values(p.value, stream);
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }

  StreamRef stream;
  LlamaModel model;
  SingleCommunicator communicator;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<Trainer> trainer;
};

LlamaOptions dense(DType dtype = DType::kFloat32) {
  LlamaOptions options;
  options.dtype = dtype;
  options.train_base = true;
  return options;
}

LlamaOptions lora(DType dtype = DType::kFloat32, double dropout = 0) {
  LlamaOptions options;
  options.dtype = dtype;
  options.lora = [dropout](const std::string&) -> std::optional<LoraConfig> {
    LoraConfig config;
    config.rank = 4;
    config.alpha = 8;
    config.dropout = dropout;
    return config;
  };
  return options;
}

/// Sequences of a rule that can be learned: each token follows from the one before.
void append_rule(HostBatch& batch, std::int32_t start, int length, int ignored = 0) {
  std::vector<std::int32_t> ids;
  std::vector<std::int64_t> labels;
  std::int32_t token = start;
  for (int i = 0; i < length; ++i) {
    ids.push_back(token);
    token = (5 * token + 3) % 32;
    labels.push_back(i < ignored ? kIgnoredLabel : token);
  }
  batch.append(ids, labels);
}

}  // namespace

TEST_CASE("micro-batches of unequal size give the gradients and the loss of one batch") {
  std::vector<HostBatch> parts(2);
  append_rule(parts[0], 1, 6, 4);  // 2 counted tokens
  append_rule(parts[1], 7, 9);     // 9
  HostBatch whole;
  append_rule(whole, 1, 6, 4);
  append_rule(whole, 7, 9);
  Training split(dense(), Algorithm::kAdamW, 1e-3, StreamRef()), joined(dense(), Algorithm::kAdamW, 1e-3, StreamRef());
  const TrainStep a = split.trainer->step(parts), b = joined.trainer->step(whole);
  CHECK(a.counted_tokens == 11);
  CHECK(std::abs(a.loss - b.loss) < 1e-6 * b.loss);
  CHECK(std::abs(a.gradient_norm - b.gradient_norm) < 1e-5 * b.gradient_norm);
  // One step each. AdamW's first step is the sign of a gradient: compare gradients, which the trainer leaves.
  const auto p = split.model.trainable_parameters(), q = joined.model.trainable_parameters();
  for (std::size_t i = 0; i < p.size(); ++i) {
    CAPTURE(p[i].name);
    CHECK(test::difference(test::values(p[i].grad, StreamRef()), test::values(q[i].grad, StreamRef()))
              .relative_frobenius < 1e-5);
  }
}

TEST_CASE("a step whose labels are all ignored changes nothing and is counted as skipped") {
  Training training(dense(), Algorithm::kMuown, 1e-2, StreamRef());
  const auto before = training.weights();
  HostBatch batch;
  append_rule(batch, 3, 5, 5);
  const TrainStep step = training.trainer->step(batch);
  CHECK(step.skipped);
  CHECK(step.loss == 0);
  CHECK(training.weights() == before);
  CHECK(training.optimizer->report(StreamRef()).skipped_steps == 1);
  CHECK(training.trainer->steps() == 1);
  CHECK(std::isnan(training.trainer->evaluate(std::span(&batch, 1))));
}

TEST_CASE("bad labels are refused before anything is changed") {
  Training training(dense(), Algorithm::kMuown, 1e-2, StreamRef());
  const auto before = training.weights();
  HostBatch batch;
  batch.append({1, 2}, {3, 99});
  CHECK_THROWS_AS(training.trainer->step(batch), Error);
  CHECK(training.weights() == before);
  CHECK(training.trainer->steps() == 0);
}

namespace {

double train_and_measure(const LlamaOptions& options, Algorithm algorithm, double rate, int steps, StreamRef stream,
                         std::vector<double>* weights = nullptr) {
  Training training(options, algorithm, rate, stream);
  HostBatch batch;
  for (std::int32_t s = 0; s < 8; ++s) append_rule(batch, 4 * s, 12);
  for (int i = 0; i < steps; ++i) training.trainer->step(batch);
  if (weights) *weights = training.weights();
  return training.trainer->evaluate(std::span(&batch, 1));
}

}  // namespace

TEST_CASE("every optimizer learns a rule, dense and with LoRA") {
  const StreamRef stream;
  const double start = std::log(32.0);
  CHECK(train_and_measure(dense(), Algorithm::kMuown, 0.02, 60, stream) < 0.1 * start);
  CHECK(train_and_measure(dense(), Algorithm::kMuon, 0.02, 60, stream) < 0.1 * start);
  CHECK(train_and_measure(dense(), Algorithm::kAdamW, 0.01, 60, stream) < 0.1 * start);
  CHECK(train_and_measure(lora(), Algorithm::kMuown, 0.05, 60, stream) < 0.6 * start);
  CHECK(train_and_measure(lora(), Algorithm::kAdamW, 0.02, 60, stream) < 0.6 * start);
}

TEST_CASE("bfloat16 adapters move, since their masters are float32") {
  const StreamRef stream;
  Training training(lora(DType::kBFloat16), Algorithm::kAdamW, 1e-5, stream);
  HostBatch batch;
  append_rule(batch, 1, 12);
  std::vector<std::vector<double>> before;
  for (const Parameter& p : training.model.trainable_parameters()) before.push_back(test::values(p.master, stream));
  for (int i = 0; i < 20; ++i) training.trainer->step(batch);
  std::size_t i = 0;
  for (const Parameter& p : training.model.trainable_parameters()) {
    CAPTURE(p.name);
    CHECK(p.has_own_master());
    CHECK(test::difference(test::values(p.master, stream), before[i++]).max_absolute > 1e-5);
  }
}

TEST_CASE("two runs of one seed give the same bits, with dropout") {
  std::vector<double> first, second;
  const LlamaOptions options = lora(DType::kFloat32, 0.3);
  CHECK(train_and_measure(options, Algorithm::kMuown, 0.02, 5, StreamRef(), &first) ==
        train_and_measure(options, Algorithm::kMuown, 0.02, 5, StreamRef(), &second));
  CHECK(first == second);
}

TEST_CASE("two runs of one seed give the same bits on CUDA, near those of the CPU", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    CAPTURE(to_string(dtype));
    std::vector<double> first, second;
    const LlamaOptions options = lora(dtype, 0.3);
    const double a = train_and_measure(options, Algorithm::kMuown, 0.02, 5, stream, &first);
    const double b = train_and_measure(options, Algorithm::kMuown, 0.02, 5, stream, &second);
    CHECK(a == b);
    CHECK(first == second);
    if (dtype != DType::kFloat32) continue;
    const double cpu = train_and_measure(options, Algorithm::kMuown, 0.02, 5, StreamRef());
    CHECK(std::abs(a - cpu) < 1e-3 * cpu);
  }
}

}  // namespace rowan
