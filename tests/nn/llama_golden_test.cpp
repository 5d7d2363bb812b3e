// Models of every family against Transformers and PEFT (tests/data/models/README.md).
#include <algorithm>
#include <cstdlib>
#include <filesystem>

#include "catch.h"
#include "rowan/nn/llama_files.h"
#include "rowan/ops/cross_entropy.h"
#include "support/compare.h"
#include "support/device.h"
#include "support/files.h"
#include "support/goldens.h"

namespace rowan {
namespace {

/// Every model directory with expected.safetensors, here and below ROWAN_GOLDENS/models.
std::vector<std::filesystem::path> model_directories() {
  std::vector<std::filesystem::path> roots{test::data_path("models")}, found;
  if (const char* more = std::getenv("ROWAN_GOLDENS")) roots.push_back(std::filesystem::path(more) / "models");
  for (const auto& root : roots) {
    if (!std::filesystem::exists(root)) continue;
    for (const auto& entry : std::filesystem::directory_iterator(root)) {
      if (std::filesystem::exists(entry.path() / "expected.safetensors")) found.push_back(entry.path());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

/// Rows of input_ids, each label moved to the token before it: Transformers shifts inside.
HostBatch batch_of(const test::Golden& expected) {
  const Tensor ids = expected.tensor("input_ids"), labels = expected.tensor("labels");
  HostBatch batch;
  for (std::int64_t row = 0; row < ids.size(0); ++row) {
    std::vector<std::int32_t> sequence;
    for (const std::int64_t id : ids.select(0, row).to_vector<std::int64_t>(StreamRef()))
      sequence.push_back(static_cast<std::int32_t>(id));
    std::vector<std::int64_t> targets = labels.select(0, row).to_vector<std::int64_t>(StreamRef());
    targets.erase(targets.begin());
    targets.push_back(kIgnoredLabel);
    batch.append(sequence, targets);
  }
  return batch;
}

/// The model with its adapter.
LlamaModel read_model(const std::filesystem::path& directory, LlamaOptions options, StreamRef stream) {
  const ModelConfig config = read_model_config(directory);
  const AdapterFiles adapter(directory / "adapter");
  options.lora = lora_for(adapter.config(), config);
  LlamaModel model(config, options, stream);
  load_base(model, ModelFiles(directory), stream);
  load_adapter(model, adapter, stream);
  return model;
}

void check_loss_in_16_bits(DType dtype, StreamRef stream) {
  for (const auto& directory : model_directories()) {
    CAPTURE(directory.string());
    const test::Golden expected(directory / "expected.safetensors");
    LlamaOptions options;
    options.dtype = dtype;
    LlamaModel model = read_model(directory, options, stream);
    const HostBatch host = batch_of(expected);
    Tensor loss_sum = Tensor::empty({1}, DType::kFloat64, stream);
    model.evaluate(host.to(model.config().vocab_size, stream), loss_sum, stream);
    const double loss = loss_sum.to_vector<double>(stream)[0] / static_cast<double>(host.counted_tokens());
    CHECK(std::abs(loss - expected.values("loss")[0]) < 2e-3);
  }
}

void check_model(const std::filesystem::path& directory, bool recompute, StreamRef stream) {
  CAPTURE(directory.string());
  const test::Golden expected(directory / "expected.safetensors");
  LlamaOptions options;
  options.recompute = recompute;
  LlamaModel model = read_model(directory, options, stream);
  const ModelConfig& config = model.config();

  const HostBatch host = batch_of(expected);
  const TokenBatch batch = host.to(config.vocab_size, stream);
  const double counted = static_cast<double>(host.counted_tokens());
  const test::Difference logits =
      test::difference(test::values(model.logits(batch, stream), stream), expected.values("logits"));
  CHECK(logits.relative_frobenius < 1e-4);

  Tensor loss_sum = Tensor::empty({1}, DType::kFloat64, stream);
  model.evaluate(batch, loss_sum, stream);
  const double loss = expected.values("loss")[0];
  CHECK(std::abs(loss_sum.to_vector<double>(stream)[0] / counted - loss) < 1e-5);

  model.zero_grad(stream);
  model.forward_backward(batch, 1 / counted, loss_sum, stream);
  CHECK(std::abs(loss_sum.to_vector<double>(stream)[0] / counted - loss) < 1e-5);
  int compared = 0;
  for (const Parameter& p : model.trainable_parameters()) {
    CAPTURE(p.name);
    std::string key = p.name;
    key.insert(key.size() - std::string("weight").size(), "default.");
    const test::Difference grad =
        test::difference(test::values(p.grad, stream), expected.values("grad.base_model.model." + key));
    CHECK(grad.relative_frobenius < 1e-4);
    ++compared;
  }
  CHECK(compared == 14 * config.num_hidden_layers);

  if (!std::filesystem::exists(directory / "merged.safetensors")) return;
  const test::Golden merged(directory / "merged.safetensors");
  model.merge_adapter(stream);
  for (const Parameter& p : model.parameters()) {
    if (p.role == Parameter::Role::kLoraA || p.role == Parameter::Role::kLoraB) continue;
    CAPTURE(p.name);
    const test::Difference d = test::difference(test::values(p.value, stream), merged.values(p.name));
    CHECK(d.max_absolute <= 0x1p-21 * (d.max_reference + 1));
  }
}

}  // namespace

TEST_CASE("golden models give the logits, loss and adapter gradients of Transformers and PEFT") {
  const auto directories = model_directories();
  CHECK(directories.size() >= 4);
  for (const auto& directory : directories) check_model(directory, false, StreamRef());
}

TEST_CASE("golden models give the same gradients when blocks are recomputed") {
  for (const auto& directory : model_directories()) check_model(directory, true, StreamRef());
}

TEST_CASE("golden models give nearly the float32 loss in bfloat16 and float16") {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) check_loss_in_16_bits(dtype, StreamRef());
}

TEST_CASE("golden models give nearly the float32 loss in bfloat16 and float16 on CUDA", "[gpu]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) check_loss_in_16_bits(dtype, stream);
}

TEST_CASE("golden models give the logits, loss and adapter gradients of Transformers and PEFT on CUDA", "[gpu]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const auto& directory : model_directories()) check_model(directory, false, stream);
}

}  // namespace rowan
