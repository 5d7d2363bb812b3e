// Training over several ranks against training on one.
#include <cmath>
#include <memory>

#include "catch.h"
#include "comm/rank_checks.h"
#include "rowan/comm/thread_communicator.h"
#include "rowan/core/error.h"
#include "rowan/ops/cross_entropy.h"
#include "rowan/optim/data_parallel.h"
#include "rowan/train/token_batches.h"
#include "rowan/train/trainer.h"
#include "support/compare.h"
#include "support/device.h"

namespace rowan::test {

namespace {

const StreamRef kCpu;

ModelConfig small_config() {
  ModelConfig config;
  config.vocab_size = 32;
  config.hidden_size = 24;
  config.intermediate_size = 40;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 2;
  config.num_key_value_heads = 1;
  config.head_dim = 8;
  config.max_position_embeddings = 64;
  return config;
}

LlamaOptions model_options(bool lora, DType dtype) {
  LlamaOptions options;
  options.dtype = dtype;
  options.train_base = !lora;
  if (!lora) return options;
  options.lora = [](const std::string&) {
    LoraConfig config;
    config.rank = 3;
    config.alpha = 6;
    return std::optional(config);
  };
  return options;
}

OptimizerOptions optimizer_options(Algorithm algorithm) {
  OptimizerOptions options;
  options.groups = default_groups(algorithm, 0.01);
  options.max_gradient_norm = 1;
  for (ParameterGroup& group : options.groups) group.newton_schulz.path = NewtonSchulzPath::kGramFp32;
  return options;
}

/// Seven sequences, some labels of which do not count.
HostBatch batch_of_step(std::int32_t step) {
  HostBatch batch;
  for (std::int32_t s = 0; s < 7; ++s) {
    std::vector<std::int32_t> ids;
    std::vector<std::int64_t> labels;
    std::int32_t token = (4 * s + step) % 32;
    for (std::int32_t i = 0; i < 6 + s; ++i) {
      ids.push_back(token);
      token = (5 * token + 3) % 32;
      labels.push_back(i < s ? kIgnoredLabel : token);
    }
    batch.append(ids, labels);
  }
  return batch;
}

struct Training {
  Training(bool lora, DType dtype, Algorithm algorithm, Communicator& communicator, StreamRef where)
      : comm(communicator), stream(where), model(small_config(), model_options(lora, dtype), where) {
    model.init_base(1, 0.1, stream);
    model.init_adapter(2, stream);
    optimizer = make_data_parallel_optimizer(optimizer_options(algorithm), model.parameters(), comm, stream);
    trainer = std::make_unique<Trainer>(model, *optimizer, comm, TrainerOptions{.learning_rate = 0.01, .schedule = {}},
                                        stream);
  }

  TrainStep step(std::int32_t index) {
    return trainer->step(sequences_of_rank(batch_of_step(index), comm.rank(), comm.size()));
  }
  std::vector<double> weights() const {
    std::vector<double> all;
    for (const Parameter& p : model.trainable_parameters()) {
      for (const Tensor& t : {p.value, p.master}) {
        const auto more = values(t, stream);
        all.insert(all.end(), more.begin(), more.end());
      }
    }
    return all;
  }

  Communicator& comm;
  StreamRef stream;
  LlamaModel model;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<Trainer> trainer;
};

/// The same bits on all ranks.
bool equal_on_all_ranks(const std::vector<double>& numbers, Communicator& communicator, StreamRef stream) {
  Tensor first = Tensor::from_host({static_cast<std::int64_t>(numbers.size())}, numbers, stream);
  communicator.broadcast(first, 0, stream);
  communicator.synchronize(stream);
  return first.to_vector<double>(stream) == numbers;
}

}  // namespace

void check_data_parallel(Communicator& communicator, StreamRef stream, Faults& faults) {
  SingleCommunicator single;
  for (const bool lora : {false, true}) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (const Algorithm algorithm : {Algorithm::kMuown, Algorithm::kAdamW}) {
        Training alone(lora, dtype, algorithm, single, stream), together(lora, dtype, algorithm, communicator, stream);
        const std::string what = std::string(lora ? "LoRA, " : "dense, ") + to_string(dtype) + ", " +
                                 to_string(algorithm) + ", rank " + std::to_string(communicator.rank()) + " of " +
                                 std::to_string(communicator.size()) + ": ";
        const double bound = dtype == DType::kFloat32 ? 1e-4 : 2e-2;
        for (std::int32_t i = 0; i < 4; ++i) {
          const TrainStep a = alone.step(i), b = together.step(i);
          faults.expect(a.counted_tokens == b.counted_tokens && a.tokens == b.tokens, what + "tokens");
          faults.expect(std::abs(a.loss - b.loss) < bound * a.loss,
                        what + "loss " + std::to_string(b.loss) + " instead of " + std::to_string(a.loss));
          faults.expect(i > 0 || std::abs(a.gradient_norm - b.gradient_norm) < bound * a.gradient_norm, what + "norm");
          faults.expect(equal_on_all_ranks(together.weights(), communicator, stream), what + "replicas differ");
        }
        const HostBatch held_out = batch_of_step(9);
        const std::vector<HostBatch> batches{held_out, batch_of_step(10), batch_of_step(11)};
        const double alone_loss = alone.trainer->evaluate(batches), loss = together.trainer->evaluate(batches);
        faults.expect(std::abs(alone_loss - loss) < bound * alone_loss, what + "evaluation");
      }
    }
  }
}

TEST_CASE("training over ranks gives the losses of one rank, and equal replicas", "[dist]") {
  for (const int size : {2, 3, 4}) {
    CAPTURE(size);
    check_on_threads(size, check_data_parallel);
  }
}

TEST_CASE("more ranks than sequences train too", "[dist]") {
  check_on_threads(9, [](Communicator& communicator, StreamRef stream, Faults& faults) {
    SingleCommunicator single;
    Training alone(true, DType::kFloat32, Algorithm::kMuown, single, stream),
        together(true, DType::kFloat32, Algorithm::kMuown, communicator, stream);
    for (std::int32_t i = 0; i < 2; ++i) {
      const double expected = alone.step(i).loss;
      faults.expect(std::abs(together.step(i).loss - expected) < 1e-4 * expected, "another loss");
    }
  });
}

TEST_CASE("a step without a counted token on any rank is skipped on all of them", "[dist]") {
  check_on_threads(2, [](Communicator& communicator, StreamRef stream, Faults& faults) {
    Training training(false, DType::kFloat32, Algorithm::kMuown, communicator, stream);
    HostBatch batch;
    batch.append({1, 2, 3}, {kIgnoredLabel, kIgnoredLabel, kIgnoredLabel});
    const auto before = training.weights();
    faults.expect(training.trainer->step(batch).skipped, "not skipped");
    faults.expect(training.weights() == before, "weights moved");
    // One rank alone has something to learn from.
    if (communicator.rank() == 1) batch = batch_of_step(0);
    faults.expect(!training.trainer->step(batch).skipped, "skipped");
  });
}

TEST_CASE("an optimizer's state goes on with another number of ranks", "[dist]") {
  // Two steps with 3 ranks, the state to 2 ranks and to 1, and a third step there.
  struct Saved {
    std::vector<NamedTensor> state;
    std::vector<std::vector<double>> values;
  };
  for (const bool lora : {false, true}) {
    const DType dtype = lora ? DType::kBFloat16 : DType::kFloat32;
    std::vector<Saved> saved(3);
    std::vector<double> expected;
    check_on_threads(3, [&](Communicator& communicator, StreamRef stream, Faults& faults) {
      Training training(lora, dtype, Algorithm::kMuown, communicator, stream);
      for (std::int32_t i = 0; i < 2; ++i) training.step(i);
      Saved& own = saved[static_cast<std::size_t>(communicator.rank())];
      for (const NamedTensor& t : training.optimizer->state()) own.state.push_back({t.name, t.tensor.clone(stream)});
      for (const Parameter& p : training.model.trainable_parameters()) own.values.push_back(values(p.value, stream));
      SingleCommunicator single;
      const Training alone(lora, dtype, Algorithm::kMuown, single, stream);
      const auto form = alone.optimizer->state();
      faults.expect(form.size() == own.state.size(), "another number of tensors");
      for (const NamedTensor& t : own.state) {
        const bool found = std::any_of(form.begin(), form.end(), [&](const NamedTensor& f) {
          return f.name == t.name && f.tensor.shape() == t.tensor.shape() && f.tensor.dtype() == t.tensor.dtype();
        });
        faults.expect(found, "the state of one rank has no " + t.name);
      }
      training.step(2);
      if (communicator.rank() == 0) expected = training.weights();
    });
    for (std::size_t i = 0; i < saved[0].state.size(); ++i)
      CHECK(values(saved[0].state[i].tensor, kCpu) == values(saved[2].state[i].tensor, kCpu));
    for (const int size : {1, 2}) {
      check_on_threads(size, [&](Communicator& communicator, StreamRef stream, Faults& faults) {
        Training training(lora, dtype, Algorithm::kMuown, communicator, stream);
        const auto parameters = training.model.trainable_parameters();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          const Tensor value = Tensor::from_host(parameters[i].value.shape(), saved[0].values[i], stream);
          parameters[i].value.copy_from(convert(value, parameters[i].value.dtype(), stream, stream), stream);
        }
        training.optimizer->load_state(saved[0].state, stream);
        training.step(2);
        faults.expect(difference(training.weights(), expected).relative_frobenius < (lora ? 1e-3 : 1e-5),
                      "another third step with " + std::to_string(size) + " ranks");
      });
    }
  }
}

TEST_CASE("a trainer of several ranks refuses an optimizer that does not sum gradients", "[dist]") {
  const auto outcomes = outcomes_on_threads(2, {}, [](Communicator& communicator) {
    LlamaModel model(small_config(), model_options(false, DType::kFloat32), kCpu);
    const auto optimizer = make_optimizer(optimizer_options(Algorithm::kAdamW), model.parameters(), kCpu);
    Trainer(model, *optimizer, communicator, {}, kCpu);
  });
  for (const std::string& outcome : outcomes) CHECK(outcome.find("make_data_parallel_optimizer") != std::string::npos);
}

}  // namespace rowan::test
