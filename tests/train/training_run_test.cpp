#include "rowan/train/training_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <memory>
#include <thread>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/nn/llama_files.h"
#include "rowan/optim/data_parallel.h"
#include "rowan/train/token_batches.h"
#include "support/compare.h"
#include "support/device.h"
#include "support/files.h"
#include "support/ranks.h"

namespace rowan {

namespace fs = std::filesystem;
using test::read_file;
using test::ScratchDirectory;

namespace {

constexpr std::int32_t kVocabulary = 32;

ModelConfig small_config() {
  ModelConfig config;
  config.vocab_size = kVocabulary;
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 8;
  config.max_position_embeddings = 64;
  return config;
}

AdapterConfig small_adapter() {
  AdapterConfig adapter;
  adapter.r = 4;
  adapter.lora_alpha = 8;
  adapter.lora_dropout = 0.3;
  adapter.target_pattern = "all-linear";
  return adapter;
}

/// Rows of many lengths, of a rule that can be learned.
std::vector<TokenRow> rule_rows(int count) {
  std::vector<TokenRow> rows;
  for (std::int32_t r = 0; r < count; ++r) {
    TokenRow row;
    std::int32_t token = r % kVocabulary;
    for (std::int32_t i = 0; i < 4 + (7 * r) % 9; ++i, token = (5 * token + 3) % kVocabulary) {
      row.input_ids.push_back(token);
      row.labels.push_back(token);
    }
    rows.push_back(row);
  }
  return rows;
}

HostBatch batch_of(int rows) {
  HostBatch batch;
  for (const TokenRow& row : rule_rows(rows)) append_row(batch, row);
  return batch;
}

/// Keeps every record.
struct MemorySink final : MetricsSink {
  void write(const MetricRecord& record) override { records.push_back(record); }
  std::vector<double> of(const std::string& name) const {
    std::vector<double> found;
    for (const MetricRecord& record : records) {
      for (const auto& [key, value] : record) {
        if (key == name) found.push_back(std::get<double>(value));
      }
    }
    return found;
  }
  std::vector<MetricRecord> records;
};

struct Case {
  bool full = false;
  DType dtype = DType::kFloat32;
  Algorithm algorithm = Algorithm::kMuown;
  bool packing = true;
};

/// All that a process makes anew when it begins or goes on.
struct Process {
  Process(const Case& c, TrainingRunOptions options, StreamRef where)
      : stream(where),
        model(small_config(), model_options(c), where),
        loader(rule_rows(23), {.batch_size = c.packing ? 1 : 3,
                               .max_length = c.packing ? std::int64_t{24} : std::int64_t{0},
                               .packing = c.packing,
                               .shuffle = true,
                               .seed = 5}) {
    model.init_base(1, 0.1, stream);
    model.init_adapter(2, stream);
    OptimizerOptions settings;
    settings.groups = default_groups(c.algorithm);
    settings.max_gradient_norm = 1;
    optimizer = make_optimizer(settings, model.parameters(), stream);
    options.trainer.learning_rate = 0.02;
    options.trainer.schedule = {.type = Schedule::Type::kCosine, .total_steps = 40, .warmup_steps = 3};
    options.sinks = {&sink};
    if (!c.full) options.adapter = small_adapter();
    run = std::make_unique<TrainingRun>(model, *optimizer, communicator, std::move(options), stream);
  }

  static LlamaOptions model_options(const Case& c) {
    LlamaOptions options;
    options.dtype = c.dtype;
    options.train_base = c.full;
    options.seed = 9;
    if (!c.full) options.lora = lora_for(small_adapter(), small_config());
    return options;
  }

  std::vector<double> everything() const {
    std::vector<double> all;
    for (const Parameter& p : model.parameters()) {
      for (const Tensor& t : {p.value, p.master}) {
        if (!t.defined()) continue;
        const auto more = test::values(t, stream);
        all.insert(all.end(), more.begin(), more.end());
      }
    }
    return all;
  }

  StreamRef stream;
  LlamaModel model;
  SingleCommunicator communicator;
  BatchLoader loader;
  std::unique_ptr<Optimizer> optimizer;
  MemorySink sink;
  std::unique_ptr<TrainingRun> run;
};

TrainingRunOptions saving(const fs::path& directory, std::int64_t max_steps, std::int64_t save_steps) {
  TrainingRunOptions options;
  options.max_steps = max_steps;
  options.grad_accum = 2;
  options.checkpoint_directory = directory;
  options.save_steps = save_steps;
  options.eval_batches = {batch_of(5)};
  options.eval_steps = 2;
  options.identity = {{"base_model", "abc"}, {"data", "123"}, {"lora_r", "4"}};
  return options;
}

/// Every file of two checkpoints, bit for bit. The manifest holds their hashes and all counters.
void check_same(const fs::path& a, const fs::path& b) {
  CHECK(read_file(a / "manifest.json") == read_file(b / "manifest.json"));
  CHECK_NOTHROW(open_checkpoint(a));
  CHECK_NOTHROW(open_checkpoint(b));
}

void check_resume_from_every_step(const Case& c, StreamRef stream) {
  constexpr std::int64_t kSteps = 11;  // more than an epoch
  const ScratchDirectory scratch;
  Process straight(c, saving(scratch / "straight", kSteps, 1), stream);
  CHECK(straight.run->train(straight.loader) == RunEnd::kDone);
  CHECK(straight.loader.state().epoch >= 1);
  const std::vector<double> losses = straight.sink.of("loss");
  REQUIRE(losses.size() == kSteps);
  for (const std::int64_t from : {1, 4, 7, 10}) {
    CAPTURE(from);
    const fs::path root = scratch / std::to_string(from);
    Process resumed(c, saving(root, kSteps, 0), stream);
    const fs::path checkpoint = scratch / "straight" / ("checkpoint-" + std::to_string(from));
    resumed.run->resume(open_checkpoint(checkpoint), &resumed.loader);
    CHECK(resumed.run->steps() == from);
    CHECK(resumed.run->train(resumed.loader) == RunEnd::kDone);
    CHECK(resumed.sink.of("loss") == std::vector<double>(losses.begin() + from, losses.end()));
    CHECK(resumed.everything() == straight.everything());
    check_same(root / "checkpoint-11", scratch / "straight" / "checkpoint-11");
  }
}

template <class F>
std::string error_text(ErrorKind kind, const F& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.kind() == kind ? error.what() : std::string("another kind: ") + error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("ranks wait for one that writes for longer than their deadline, and learn when it fails", "[dist]") {
  CommunicatorOptions options;
  options.timeout = std::chrono::milliseconds(300);
  const auto write = [&](bool fails) {
    return test::outcomes_on_threads(2, options, [fails](Communicator& communicator) {
      LlamaModel model(small_config(), Process::model_options({}), StreamRef());
      const auto optimizer = make_data_parallel_optimizer({.groups = default_groups(Algorithm::kAdamW)},
                                                          model.parameters(), communicator, StreamRef());
      const TrainingRun run(model, *optimizer, communicator, {}, StreamRef());
      run.write_on_first_rank([fails] {
        std::this_thread::sleep_for(std::chrono::milliseconds(900));
        if (fails) throw Error(ErrorKind::kIo, "the disk is full");
      });
    });
  };
  CHECK(write(false) == std::vector<std::string>{"", ""});
  const std::vector<std::string> failed = write(true);
  CHECK(failed[0].find("the disk is full") != std::string::npos);
  CHECK(failed[1].find("expected rank 0 to save") != std::string::npos);
}

TEST_CASE("a resumed run goes on bit for bit from any step, LoRA with dropout, packing and accumulation",
          "[training_run]") {
  check_resume_from_every_step({}, StreamRef());
  check_resume_from_every_step({.dtype = DType::kBFloat16}, StreamRef());
  check_resume_from_every_step({.algorithm = Algorithm::kAdamW, .packing = false}, StreamRef());
}

TEST_CASE("a resumed run goes on bit for bit from any step, all weights trained", "[training_run]") {
  check_resume_from_every_step({.full = true}, StreamRef());
  check_resume_from_every_step({.full = true, .dtype = DType::kBFloat16, .packing = false}, StreamRef());
}

TEST_CASE("a resumed run goes on bit for bit from any step on CUDA", "[training_run][gpu]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_resume_from_every_step({}, stream);
  check_resume_from_every_step({.dtype = DType::kBFloat16}, stream);
  check_resume_from_every_step({.full = true, .dtype = DType::kBFloat16}, stream);
}

TEST_CASE("the last step of an epoch takes the batches that are left", "[training_run]") {
  const ScratchDirectory scratch;
  TrainingRunOptions options;
  options.max_steps = 3;
  options.grad_accum = 5;
  Process process({.packing = false}, options, StreamRef());
  REQUIRE(process.loader.batches_per_epoch() == 8);
  process.run->train(process.loader);
  std::vector<std::int64_t> tokens;
  for (const MetricRecord& record : process.sink.records) tokens.push_back(std::get<std::int64_t>(record[5].second));
  CHECK(tokens[0] + tokens[1] == process.loader.tokens());
  CHECK(process.loader.state().epoch == 1);
  CHECK(process.sink.of("epoch")[1] == 1.0);
}

TEST_CASE("a changed model, data, configuration or world is refused by name, unless it is allowed", "[training_run]") {
  const ScratchDirectory scratch;
  Process first({}, saving(scratch / "first", 2, 0), StreamRef());
  first.run->train(first.loader);
  const Checkpoint checkpoint = open_newest_checkpoint(scratch / "first");
  const auto refused = [&](const char* name, ErrorKind kind) {
    TrainingRunOptions options = saving(scratch / "second", 4, 0);
    options.identity[name] = "other";
    Process second({}, options, StreamRef());
    const auto before = second.everything();
    const std::string error = error_text(kind, [&] { second.run->resume(checkpoint, &second.loader); });
    CHECK(contains(error, std::string(name) + " has changed"));
    CHECK(contains(error, "now other"));
    CHECK(second.everything() == before);
    second.run->resume(checkpoint, &second.loader, {.allowed = [&](const std::string& n) { return n == name; }});
    CHECK(second.run->train(second.loader) == RunEnd::kDone);
  };
  refused("base_model", ErrorKind::kFormat);
  refused("data", ErrorKind::kFormat);
  refused("lora_r", ErrorKind::kInvalidArgument);

  Checkpoint larger = checkpoint;
  larger.info.world_size = 4;
  Process second({}, saving(scratch / "second", 4, 0), StreamRef());
  const auto resume = [&] { second.run->resume(larger, &second.loader); };
  CHECK(contains(error_text(ErrorKind::kInvalidArgument, resume), "world_size has changed"));
  second.run->resume(larger, &second.loader, {.allowed = {}, .allow_world_size = true});
  CHECK(second.run->steps() == 2);
}

TEST_CASE("batches of another form are allowed to begin the epoch anew, and refused otherwise", "[training_run]") {
  const ScratchDirectory scratch;
  Process first({}, saving(scratch / "first", 7, 0), StreamRef());
  first.run->train(first.loader);
  REQUIRE(first.loader.state().epoch == 1);
  const Checkpoint checkpoint = open_newest_checkpoint(scratch / "first");
  TrainingRunOptions options = saving(scratch / "second", 9, 0);
  Process unchanged({.packing = false}, options, StreamRef());
  CHECK_THROWS_AS(unchanged.run->resume(checkpoint, &unchanged.loader), Error);
  options.identity["batch_size"] = "3";
  Process second({.packing = false}, options, StreamRef());
  second.run->resume(checkpoint, &second.loader, {.allowed = [](const std::string&) { return true; }});
  CHECK(second.loader.state().epoch == 1);
  CHECK(second.loader.state().position == 0);
}

TEST_CASE("a checkpoint of another kind of training is refused", "[training_run]") {
  const ScratchDirectory scratch;
  Process first({}, saving(scratch / "first", 2, 0), StreamRef());
  first.run->train(first.loader);
  const Checkpoint checkpoint = open_newest_checkpoint(scratch / "first");
  Process full({.full = true}, saving(scratch / "second", 4, 0), StreamRef());
  CHECK_THROWS_AS(full.run->resume(checkpoint, &full.loader), Error);
  Process adamw({.algorithm = Algorithm::kAdamW}, saving(scratch / "second", 4, 0), StreamRef());
  const auto resume = [&] { adamw.run->resume(checkpoint, &adamw.loader); };
  CHECK(contains(error_text(ErrorKind::kFormat, resume), "load_state"));
}

TEST_CASE("a run is cancelled from another thread and saves where it stands", "[training_run]") {
  const ScratchDirectory scratch;
  TrainingRunOptions options = saving(scratch / "run", 1000000, 0);
  options.eval_steps = 0;
  options.eval_batches.clear();
  std::atomic<int> steps{0};
  options.on_step = [&](const TrainStep&) { ++steps; };
  Process process({}, options, StreamRef());
  std::thread other([&] {
    while (steps.load() < 3) std::this_thread::yield();
    process.run->cancel();
  });
  CHECK(process.run->train(process.loader) == RunEnd::kCancelled);
  other.join();
  CHECK(process.run->steps() >= 3);
  CHECK(open_newest_checkpoint(scratch / "run").info.step == process.run->steps());
}

TEST_CASE("evaluations end a run early, and the best model is kept", "[training_run]") {
  const ScratchDirectory scratch;
  TrainingRunOptions options = saving(scratch / "run", 60, 2);
  options.early_stopping_patience = 2;
  options.save_total_limit = 1;
  options.best_directory = scratch / "best";
  // Held-out rows that follow no rule: their loss rises while the rule is learned.
  HostBatch noise;
  noise.append({1, 1, 2, 9, 30, 4, 4, 17}, {1, 2, 9, 30, 4, 4, 17, 23});
  options.eval_batches = {noise};
  std::vector<Evaluation> seen;
  options.on_evaluation = [&](const Evaluation& e) { seen.push_back(e); };
  Process process({}, options, StreamRef());
  CHECK(process.run->train(process.loader) == RunEnd::kStoppedEarly);
  REQUIRE(seen.size() >= 3);
  CHECK_FALSE(seen[seen.size() - 1].best);
  CHECK_FALSE(seen[seen.size() - 2].best);
  const Evaluation& best = seen[seen.size() - 3];
  CHECK(best.best);
  CHECK(best.loss == process.run->best_eval_loss());
  CHECK(process.sink.of("eval_loss").size() == seen.size());
  // The newest checkpoint and the best one are left, and the best adapter is that of the best one.
  const auto checkpoints = list_checkpoints(scratch / "run");
  REQUIRE(checkpoints.size() == 2);
  CHECK(open_checkpoint(checkpoints[0]).info.step == best.step);
  CHECK(open_checkpoint(checkpoints[0]).info.eval_loss == best.loss);
  CHECK(read_file(scratch / "best" / "adapter_model.safetensors") ==
        read_file(checkpoints[0] / "adapter_model.safetensors"));
}

TEST_CASE("a loss that is not finite ends the run, and nothing is saved of it", "[training_run]") {
  const ScratchDirectory scratch;
  Process process({}, saving(scratch / "run", 10, 1), StreamRef());
  const HostBatch batch = batch_of(3);
  process.run->step(std::span(&batch, 1));
  const auto before = process.everything();
  const auto& all = process.model.parameters();
  const Parameter& norm =
      *std::find_if(all.begin(), all.end(), [](const Parameter& p) { return p.name == "model.norm.weight"; });
  const Tensor value = norm.value.clone(StreamRef());
  norm.value.slice(0, 0, 1).copy_from(
      Tensor::from_host(Shape{1}, std::vector<float>{std::numeric_limits<float>::quiet_NaN()}, StreamRef()),
      StreamRef());
  CHECK(std::isnan(process.run->step(std::span(&batch, 1)).loss));
  CHECK(process.run->end() == RunEnd::kDiverged);
  norm.value.copy_from(value, StreamRef());
  CHECK(process.everything() == before);
  CHECK(open_newest_checkpoint(scratch / "run").info.step == 1);
}

TEST_CASE("a save that fails is an error after which the run can go on", "[training_run]") {
  const ScratchDirectory scratch;
  test::write_file(scratch / "file", "not a directory");
  Process process({}, saving(scratch / "file" / "run", 10, 2), StreamRef());
  const HostBatch batch = batch_of(3);
  process.run->step(std::span(&batch, 1));
  CHECK_THROWS_AS(process.run->step(std::span(&batch, 1)), Error);
  CHECK(process.run->steps() == 2);
  process.run->step(std::span(&batch, 1));
  CHECK(process.run->steps() == 3);
}

TEST_CASE("options that would have no effect are refused", "[training_run]") {
  const ScratchDirectory scratch;
  const auto refused = [&](const auto& change) {
    TrainingRunOptions options = saving(scratch / "run", 3, 1);
    change(options);
    CHECK_THROWS_AS(Process({}, options, StreamRef()), Error);
  };
  refused([](TrainingRunOptions& o) { o.eval_steps = 0; });
  refused([](TrainingRunOptions& o) { o.eval_batches.clear(); });
  refused([](TrainingRunOptions& o) { o.checkpoint_directory.clear(); });
  refused([](TrainingRunOptions& o) { o.grad_accum = 0; });
  refused([](TrainingRunOptions& o) { o.max_steps = -1; });
  refused([](TrainingRunOptions& o) {
    o.eval_batches.clear();
    o.eval_steps = 0;
    o.early_stopping_patience = 1;
  });
}

}  // namespace rowan
