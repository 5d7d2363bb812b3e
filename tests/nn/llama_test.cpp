#include "rowan/nn/llama.h"

#include <cmath>
#include <memory>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/core/rng.h"
#include "rowan/nn/llama_files.h"
#include "rowan/ops/cross_entropy.h"
#include "support/compare.h"
#include "support/device.h"
#include "support/files.h"

namespace rowan {
namespace {

ModelConfig tiny_config(const std::string& architecture = "LlamaForCausalLM") {
  ModelConfig config;
  config.architecture = architecture;
  config.vocab_size = 11;
  config.hidden_size = 8;
  config.intermediate_size = 12;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 2;
  config.num_key_value_heads = 1;
  config.head_dim = 4;
  config.max_position_embeddings = 16;
  config.qkv_bias = architecture == "Qwen2ForCausalLM";
  config.qk_norm = architecture == "Qwen3ForCausalLM";
  config.tie_word_embeddings = config.qkv_bias;
  return config;
}

LlamaOptions options_with(DType dtype, bool train_base, double dropout = 0) {
  LlamaOptions options;
  options.dtype = dtype;
  options.train_base = train_base;
  options.seed = 5;
  options.lora = [dropout](const std::string& module) -> std::optional<LoraConfig> {
    if (module.ends_with("k_proj")) return std::nullopt;  // one layer of a group without an adapter
    LoraConfig lora;
    lora.rank = module.ends_with("v_proj") ? 3 : 2;
    lora.alpha = 3;
    lora.dropout = dropout;
    return lora;
  };
  return options;
}

/// Every parameter at random, B too, so that no gradient is zero by construction.
void randomise(LlamaModel& model, StreamRef stream) {
  model.init_base(1, 0.5, stream);
  std::uint64_t seed = 100;
  for (const Parameter& p : model.parameters()) {
    if (p.role == Parameter::Role::kNorm || p.role == Parameter::Role::kBias || p.role == Parameter::Role::kLoraA ||
        p.role == Parameter::Role::kLoraB) {
      p.value.copy_from(test::random_normal(p.value.shape(), p.value.dtype(), ++seed, StreamRef(), 0.5), stream);
    }
  }
}

HostBatch random_batch(std::uint64_t seed) {
  Rng rng(seed);
  HostBatch batch;
  for (const int length : {5, 1, 7}) {
    std::vector<std::int32_t> ids;
    std::vector<std::int64_t> labels;
    for (int i = 0; i < length; ++i) {
      ids.push_back(static_cast<std::int32_t>(rng.below(11)));
      labels.push_back(i == 2 ? kIgnoredLabel : static_cast<std::int64_t>(rng.below(11)));
    }
    batch.append(ids, labels);
  }
  return batch;
}

double loss_of(LlamaModel& model, const TokenBatch& batch, std::uint64_t dropout_step, bool training) {
  Tensor sum = Tensor::empty({1}, DType::kFloat64, StreamRef());
  if (training) {
    model.forward_backward(batch, 0.0, sum, StreamRef(), dropout_step);  // adds zero gradients
  } else {
    model.evaluate(batch, sum, StreamRef());
  }
  return sum.to_vector<double>(StreamRef())[0];
}

/// Every gradient against central differences at a few elements of each parameter.
void check_gradients(const std::string& architecture, double dropout, bool recompute) {
  CAPTURE(architecture, dropout, recompute);
  const StreamRef stream;
  LlamaOptions options = options_with(DType::kFloat64, true, dropout);
  options.recompute = recompute;
  LlamaModel model(tiny_config(architecture), options, stream);
  randomise(model, stream);
  const TokenBatch batch = random_batch(3).to(11, stream);
  const bool training = dropout > 0;
  Tensor sum = Tensor::empty({1}, DType::kFloat64, stream);
  model.zero_grad(stream);
  model.forward_backward(batch, 1.0, sum, stream, 7);

  Rng rng(9);
  double largest = 0;
  for (const Parameter& p : model.trainable_parameters()) {
    const std::vector<double> grad = test::values(p.grad, stream);
    for (const double g : grad) largest = std::max(largest, std::abs(g));
    for (int probe = 0; probe < 4; ++probe) {
      const auto element = static_cast<std::int64_t>(rng.below(grad.size()));
      CAPTURE(p.name, element);
      const std::int64_t columns = p.value.size(-1);
      const Tensor row = p.value.rank() == 1 ? p.value : p.value.select(0, element / columns);
      double& value = row.data<double>()[element % columns];
      const double kept = value, step = 1e-5;
      value = kept + step;
      const double above = loss_of(model, batch, 7, training);
      value = kept - step;
      const double below = loss_of(model, batch, 7, training);
      value = kept;
      const double difference = (above - below) / (2 * step);
      // Truncation is of order step^2 times a third derivative; rounding of order 1e-16 loss / step.
      CHECK(std::abs(difference - grad[static_cast<std::size_t>(element)]) < 2e-7 * (1 + std::abs(difference)));
    }
  }
  CHECK(largest > 0.1);  // a model whose gradients vanish would pass the rest
}

}  // namespace

TEST_CASE("gradients of a whole Llama agree with central differences") {
  check_gradients("LlamaForCausalLM", 0, false);
}
TEST_CASE("gradients of a whole Qwen2 with biases and tied embeddings agree with central differences") {
  check_gradients("Qwen2ForCausalLM", 0, false);
}
TEST_CASE("gradients of a whole Qwen3 with normalised heads agree with central differences") {
  check_gradients("Qwen3ForCausalLM", 0, true);
}
TEST_CASE("gradients with dropout agree with central differences of the same masks, recomputed or kept") {
  check_gradients("LlamaForCausalLM", 0.4, false);
  check_gradients("LlamaForCausalLM", 0.4, true);
}

TEST_CASE("tokens see their own past alone") {
  const StreamRef stream;
  LlamaModel model(tiny_config(), options_with(DType::kFloat64, false), stream);
  randomise(model, stream);
  HostBatch together, changed;
  together.append({1, 2, 3, 4});
  together.append({5, 6, 7});
  changed.append({1, 2, 9, 9});
  changed.append({5, 6, 7});
  const auto a = test::values(model.logits(together.to(11, stream), stream), stream);
  const auto b = test::values(model.logits(changed.to(11, stream), stream), stream);
  HostBatch alone;
  alone.append({5, 6, 7});
  const auto c = test::values(model.logits(alone.to(11, stream), stream), stream);
  for (std::size_t i = 0; i < 2 * 11; ++i) CHECK(a[i] == b[i]);                            // before the change
  CHECK(a[2 * 11] != b[2 * 11]);                                                           // at the change
  for (std::size_t i = 0; i < 3 * 11; ++i) CHECK(std::abs(a[4 * 11 + i] - c[i]) < 1e-12);  // the other sequence
}

TEST_CASE("last_logits are the logits of each sequence's last token") {
  const StreamRef stream;
  LlamaModel model(tiny_config(), options_with(DType::kFloat64, false), stream);
  randomise(model, stream);
  HostBatch batch;
  batch.append({1, 2, 3, 4});
  batch.append({5, 6, 7});
  const auto all = test::values(model.logits(batch.to(11, stream), stream), stream);
  const auto last = test::values(model.last_logits(batch, stream), stream);
  REQUIRE(last.size() == 22);
  for (std::size_t i = 0; i < 11; ++i) {
    CHECK(std::abs(last[i] - all[3 * 11 + i]) < 1e-12);
    CHECK(std::abs(last[11 + i] - all[6 * 11 + i]) < 1e-12);
  }
}

TEST_CASE("dropout masks are those of their step, and evaluation drops nothing") {
  const StreamRef stream;
  LlamaModel model(tiny_config(), options_with(DType::kFloat64, false, 0.5), stream);
  randomise(model, stream);
  const TokenBatch batch = random_batch(3).to(11, stream);
  CHECK(loss_of(model, batch, 1, true) == loss_of(model, batch, 1, true));
  CHECK(loss_of(model, batch, 1, true) != loss_of(model, batch, 2, true));
  const double evaluated = loss_of(model, batch, 0, false);
  model.set_adapter_enabled(false);
  CHECK(loss_of(model, batch, 1, true) == loss_of(model, batch, 2, true));
  CHECK(loss_of(model, batch, 0, false) != evaluated);
}

TEST_CASE("merging the adapter keeps the logits and zeroes B") {
  const StreamRef stream;
  LlamaModel model(tiny_config(), options_with(DType::kFloat64, false), stream);
  randomise(model, stream);
  const TokenBatch batch = random_batch(3).to(11, stream);
  const auto before = test::values(model.logits(batch, stream), stream);
  model.merge_adapter(stream);
  model.set_adapter_enabled(false);
  const test::Difference d = test::difference(test::values(model.logits(batch, stream), stream), before);
  CHECK(d.relative_frobenius < 1e-13);
}

TEST_CASE("base and adapter go to Hugging Face and PEFT directories and back, bit for bit") {
  const StreamRef stream;
  const test::ScratchDirectory scratch;
  AdapterConfig adapter;
  adapter.r = 3;
  adapter.target_modules = {"q_proj", "down_proj"};
  const ModelConfig config = tiny_config("Qwen2ForCausalLM");
  LlamaOptions options;
  options.lora = lora_for(adapter, config);
  LlamaModel model(config, options, stream);
  randomise(model, stream);
  save_base(scratch / "base", model, stream);
  save_adapter(scratch / "adapter", model, adapter, stream);

  const ModelConfig read = read_model_config(scratch / "base");
  const AdapterFiles files(scratch / "adapter");
  LlamaOptions again;
  again.lora = lora_for(files.config(), read);
  LlamaModel copy(read, again, stream);
  load_base(copy, ModelFiles(scratch / "base"), stream);
  load_adapter(copy, files, stream);
  REQUIRE(copy.parameters().size() == model.parameters().size());
  for (std::size_t i = 0; i < model.parameters().size(); ++i) {
    CAPTURE(model.parameters()[i].name);
    CHECK(copy.parameters()[i].name == model.parameters()[i].name);
    CHECK(test::values(copy.parameters()[i].value, stream) == test::values(model.parameters()[i].value, stream));
  }
}

TEST_CASE("a base of another size is refused before anything is read into the model") {
  const StreamRef stream;
  const test::ScratchDirectory scratch;
  LlamaModel model(tiny_config(), {}, stream);
  model.init_base(1, 0.1, stream);
  save_base(scratch / "base", model, stream);
  ModelConfig wider = tiny_config();
  wider.intermediate_size = 16;
  LlamaModel other(wider, {}, stream);
  other.init_base(2, 0.1, stream);
  const auto before = test::values(other.parameters()[0].value, stream);
  CHECK_THROWS_AS(load_base(other, ModelFiles(scratch / "base"), stream), Error);
  CHECK(test::values(other.parameters()[0].value, stream) == before);
  LlamaModel tied(tiny_config("Qwen2ForCausalLM"), {}, stream);
  CHECK_THROWS_AS(load_base(tied, ModelFiles(scratch / "base"), stream), Error);  // biases are missing
}

TEST_CASE("token ids, labels and lengths outside the model are refused by value") {
  const StreamRef stream;
  LlamaModel model(tiny_config(), {}, stream);
  HostBatch batch;
  batch.append({1, 11});
  CHECK_THROWS_AS(batch.to(11, stream), Error);
  HostBatch labelled;
  labelled.append({1, 2}, {3, -1});
  CHECK_THROWS_AS(labelled.to(11, stream), Error);
  CHECK_THROWS_AS(labelled.append({1, 2}), Error);
  CHECK_THROWS_AS(labelled.append({1, 2}, {1}), Error);
  HostBatch longer;
  longer.append(std::vector<std::int32_t>(17, 1));
  CHECK_THROWS_AS(model.logits(longer.to(11, stream), stream), Error);
}

TEST_CASE("sequences that do not cover a batch's tokens, or are longer than it says, are refused by value") {
  HostBatch batch;
  batch.append({1, 2, 3});
  batch.append({4});
  CHECK(batch.to(11, StreamRef()).sequences.starts.size(0) == 3);
  const auto refused = [&](const std::vector<std::int32_t>& starts, std::int64_t max_length) {
    HostBatch bad = batch;
    bad.starts = starts;
    bad.max_length = max_length;
    CHECK_THROWS_AS(bad.to(11, StreamRef()), Error);
  };
  refused({}, 3);
  refused({0, 3}, 3);
  refused({1, 4}, 3);
  refused({0, 5}, 5);
  refused({0, 3, 2, 4}, 3);
  refused({0, 3, 4}, 2);
}

TEST_CASE("sequences longer than the sliding window are refused, shorter ones are not") {
  const StreamRef stream;
  ModelConfig config = tiny_config("MistralForCausalLM");
  config.sliding_window = 4;
  LlamaModel model(config, {}, stream);
  model.init_base(1, 0.1, stream);
  HostBatch fits, longer;
  fits.append({1, 2, 3, 4});
  longer.append({1, 2, 3, 4, 5});
  CHECK(model.logits(fits.to(11, stream), stream).size(0) == 4);
  CHECK_THROWS_AS(model.logits(longer.to(11, stream), stream), Error);
}

TEST_CASE("separate layers on one x with spare columns keep an S each") {
  const StreamRef stream;
  const auto make = [&](const std::string& name, std::uint64_t seed) {
    LinearPart part;
    part.name = name;
    part.out_features = 6;
    part.lora = LoraConfig{};
    part.lora->rank = 3;
    part.lora->alpha = 6;
    LoraLinear layer(8, {part}, DType::kFloat64, false, stream);
    for (const Parameter& p : layer.parameters()) {
      p.value.copy_from(test::random_normal(p.value.shape(), DType::kFloat64, ++seed, stream), stream);
    }
    return layer;
  };
  const Tensor values_of_x = test::random_normal({5, 8}, DType::kFloat64, 1, stream);
  const Tensor dy = test::random_normal({5, 6}, DType::kFloat64, 2, stream);
  const auto fresh_x = [&] {
    const Tensor x = Tensor::empty_with_slack({5, 8}, 64, DType::kFloat64, stream);
    x.copy_from(values_of_x, stream);
    return x;
  };
  const auto grads = [&](const LoraLinear& layer) {
    std::vector<double> all;
    for (const Parameter& p : layer.parameters()) {
      if (!p.trainable) continue;
      const auto more = test::values(p.grad, stream);
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  };
  std::vector<std::vector<double>> expected;
  for (const std::uint64_t seed : {10u, 20u, 30u}) {  // each alone on an x of its own
    const LoraLinear layer = make("alone", seed);
    LoraLinearContext context;
    Tensor y = Tensor::empty({5, 6}, DType::kFloat64, stream);
    layer.forward(fresh_x(), y, context, stream);
    layer.backward(dy, context, nullptr, stream);
    expected.push_back(grads(layer));
  }
  const Tensor shared = fresh_x();
  std::vector<LoraLinear> layers{make("q", 10), make("k", 20), make("v", 30)};
  std::vector<LoraLinearContext> contexts(3);
  for (std::size_t i = 0; i < 3; ++i) {
    Tensor y = Tensor::empty({5, 6}, DType::kFloat64, stream);
    layers[i].forward(shared, y, contexts[i], stream);
  }
  for (const std::size_t i : {1u, 0u, 2u}) {
    layers[i].backward(dy, contexts[i], nullptr, stream);
    CHECK(test::difference(grads(layers[i]), expected[i]).relative_frobenius < 1e-14);
  }
}

TEST_CASE("a frozen model makes no gradient of a base weight, and slack full of NaN harms nothing") {
  const auto poison = std::make_shared<PoisonAllocator>(current_allocator(Device::cpu()));
  const ScopedAllocator scope(poison);
  const StreamRef stream;
  LlamaModel model(tiny_config(), options_with(DType::kFloat32, false), stream);
  randomise(model, stream);
  for (const Parameter& p : model.parameters()) {
    CHECK(p.trainable == (p.role == Parameter::Role::kLoraA || p.role == Parameter::Role::kLoraB));
    CHECK(p.grad.defined() == p.trainable);
  }
  Tensor sum = Tensor::empty({1}, DType::kFloat64, stream);
  model.zero_grad(stream);
  model.forward_backward(random_batch(4).to(11, stream), 1.0, sum, stream);
  CHECK(std::isfinite(sum.to_vector<double>(stream)[0]));
  for (const Parameter& p : model.trainable_parameters()) {
    for (const double g : test::values(p.grad, stream)) REQUIRE(std::isfinite(g));
  }
  CHECK(poison->violations() == 0);
}

TEST_CASE("16-bit models follow the float64 model within their rounding") {
  const StreamRef stream;
  LlamaModel exact(tiny_config(), options_with(DType::kFloat64, false), stream);
  randomise(exact, stream);
  const TokenBatch batch = random_batch(3).to(11, stream);
  const auto expected = test::values(exact.logits(batch, stream), stream);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    CAPTURE(to_string(dtype));
    LlamaModel model(tiny_config(), options_with(dtype, false), stream);
    randomise(model, stream);
    const test::Difference d = test::difference(test::values(model.logits(batch, stream), stream), expected);
    // About 30 roundings on the way from embedding to logits, each at most u relative, grown by the residual sums.
    CHECK(d.relative_frobenius < 30 * unit_roundoff(dtype));
    CHECK(d.relative_frobenius > 0);
  }
}

TEST_CASE("a model on CUDA gives the loss and gradients of the CPU", "[gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const std::string architecture : {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}) {
    for (const double dropout : {0.0, 0.3}) {
      CAPTURE(architecture, dropout);
      const auto run = [&](StreamRef where) {
        LlamaModel model(tiny_config(architecture), options_with(DType::kFloat32, true, dropout), where);
        randomise(model, where);
        Tensor sum = Tensor::empty({1}, DType::kFloat64, where);
        model.zero_grad(where);
        model.forward_backward(random_batch(3).to(11, where), 1.0, sum, where, 2);
        std::vector<double> all = sum.to_vector<double>(where);
        for (const Parameter& p : model.trainable_parameters()) {
          const auto grad = test::values(p.grad, where);
          all.insert(all.end(), grad.begin(), grad.end());
        }
        return all;
      };
      const test::Difference d = test::difference(run(stream), run(StreamRef()));
      CHECK(d.relative_frobenius < 1e-5);  // float32 on both sides, sums of other orders
      CHECK(run(stream) == run(stream));
    }
  }
}

}  // namespace rowan
