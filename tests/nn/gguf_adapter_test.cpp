#include "rowan/nn/gguf_adapter.h"

#include <cmath>
#include <limits>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/nn/llama_files.h"
#include "support/compare.h"
#include "support/gguf_reader.h"
#include "support/matrix.h"
#include "support/model_directory.h"

namespace rowan {
namespace {

using test::data_path;
using test::ScratchDirectory;

test::Matrix matrix_of(const test::GgufFile::TensorEntry& entry) {
  test::Matrix m(static_cast<std::int64_t>(entry.extents.at(1)), static_cast<std::int64_t>(entry.extents.at(0)));
  m.v = entry.values;
  return m;
}

/// What llama.cpp adds to a weight: (adapter.lora.alpha / r) B A, r from B's shape.
test::Matrix llama_cpp_delta(const test::GgufFile& file, const std::string& module) {
  const test::Matrix a = matrix_of(file.tensors.at(module + ".weight.lora_a")),
                     b = matrix_of(file.tensors.at(module + ".weight.lora_b"));
  return test::scaled(test::times(b, a), file.reals.at("adapter.lora.alpha") / static_cast<double>(b.cols));
}

/// s B A, its rows as convert_hf_to_gguf.py permutes a weight of `heads` heads (0: not at all): reshaped to
/// [heads, 2, head_dim / 2, in], the middle axes swapped.
test::Matrix expected_delta(const AdapterFiles& adapter, const AdapterTarget& target, std::int64_t heads) {
  const auto keys = AdapterFiles::keys_of(target.module);
  const auto load = [&](const std::string& key) {
    return test::host(adapter.file().load(key, DType::kFloat64, StreamRef()), StreamRef());
  };
  const test::Matrix delta = test::scaled(test::times(load(keys.lora_b), load(keys.lora_a)), target.scale);
  if (heads == 0) return delta;
  test::Matrix permuted(delta.rows, delta.cols);
  std::int64_t row = 0;
  const std::int64_t half = delta.rows / heads / 2;
  for (std::int64_t h = 0; h < heads; ++h) {
    for (std::int64_t i = 0; i < half; ++i) {
      for (std::int64_t part = 0; part < 2; ++part, ++row) {
        for (std::int64_t j = 0; j < delta.cols; ++j) permuted.at(row, j) = delta.at((h * 2 + part) * half + i, j);
      }
    }
  }
  return permuted;
}

std::string gguf_name(std::string module) {
  const auto replace = [&](const std::string& from, const std::string& to) {
    if (const auto at = module.find(from); at != module.npos) module.replace(at, from.size(), to);
  };
  replace("model.layers.", "blk.");
  replace("self_attn.o_proj", "attn_output");
  replace("self_attn.", "attn_");
  replace("mlp.", "ffn_");
  replace("_proj", "");
  return module;
}

/// Every module's update in the file is the adapter's.
void check_updates(const std::filesystem::path& file, const std::string& family, const AdapterFiles& adapter,
                   double tolerance) {
  const ModelConfig config = read_model_config(data_path("models") / family);
  const bool permuted = family == "llama" || family == "mistral";
  const test::GgufFile gguf(file);
  const auto targets = adapter.match(linear_shapes(config));
  CHECK(gguf.tensors.size() == 2 * targets.size());
  for (const AdapterTarget& target : targets) {
    CAPTURE(family, target.module);
    std::int64_t heads = 0;
    if (permuted && target.module.ends_with("q_proj")) heads = config.num_attention_heads;
    if (permuted && target.module.ends_with("k_proj")) heads = config.num_key_value_heads;
    const test::Matrix expected = expected_delta(adapter, target, heads),
                       got = llama_cpp_delta(gguf, gguf_name(target.module));
    REQUIRE(got.rows == expected.rows);
    const test::Difference d = test::difference(got.v, expected.v);
    CHECK(d.max_absolute <= tolerance * d.max_reference);
  }
}

/// The llama adapter with other members in its configuration.
void write_variant(const ScratchDirectory& scratch, const std::vector<std::pair<std::string, std::string>>& replaced,
                   std::vector<NamedTensor> factors = {}) {
  std::string json = test::read_file(data_path("models/llama/adapter/adapter_config.json"));
  for (const auto& [from, to] : replaced) {
    const auto at = json.find(from);
    REQUIRE(at != json.npos);
    json.replace(at, from.size(), to);
  }
  if (factors.empty())
    factors = test::load_all(data_path("models/llama/adapter/adapter_model.safetensors"), DType::kFloat32);
  test::write_adapter_files(scratch / "adapter", json, factors);
}

}  // namespace

TEST_CASE("an adapter of every family in GGUF gives llama.cpp the same update", "[gguf]") {
  const std::string family = GENERATE("llama", "mistral", "qwen2", "qwen3");
  const DType dtype = GENERATE(DType::kFloat32, DType::kFloat16);
  const ScratchDirectory scratch;
  const AdapterFiles adapter(data_path("models") / family / "adapter");
  write_gguf_adapter(scratch / "x.gguf", read_model_config(data_path("models") / family), adapter, dtype);
  check_updates(scratch / "x.gguf", family, adapter, dtype == DType::kFloat32 ? 1e-12 : 2e-3);
  const test::GgufFile gguf(scratch / "x.gguf");
  CHECK(gguf.texts.at("general.architecture") == (family == "mistral" ? "llama" : family));
  CHECK(gguf.texts.at("general.type") == "adapter");
  CHECK(gguf.texts.at("adapter.type") == "lora");
  CHECK(gguf.reals.at("adapter.lora.alpha") == 16);
  for (const auto& [name, entry] : gguf.tensors) CHECK(entry.type == (dtype == DType::kFloat32 ? 0u : 1u));
}

TEST_CASE("scales that llama.cpp does not know are folded: rsLoRA, patterns, zero and negative alpha", "[gguf]") {
  const ScratchDirectory scratch;
  const auto check = [&](const std::vector<std::pair<std::string, std::string>>& replaced, float alpha) {
    write_variant(scratch, replaced);
    const AdapterFiles adapter(scratch / "adapter");
    write_gguf_adapter(scratch / "x.gguf", read_model_config(data_path("models/llama")), adapter, DType::kFloat32);
    check_updates(scratch / "x.gguf", "llama", adapter, 3e-7);
    CHECK(test::GgufFile(scratch / "x.gguf").reals.at("adapter.lora.alpha") == alpha);
  };
  check({{"\"use_rslora\": false", "\"use_rslora\": true"}}, static_cast<float>(16 * std::sqrt(8.0)));
  check({{"\"alpha_pattern\": {}", R"("alpha_pattern": {"k_proj": 5, "up_proj": 0})"}}, 16);
  check({{"\"alpha_pattern\": {}", R"("alpha_pattern": {"q_proj": 0})"}, {"\"lora_alpha\": 16", "\"lora_alpha\": -3"}},
        -3);
  check({{"\"lora_alpha\": 16", "\"lora_alpha\": 0"}}, 1);
}

TEST_CASE("modules of different ranks under rsLoRA keep their scales in GGUF", "[gguf]") {
  const ScratchDirectory scratch;
  auto factors = test::load_all(data_path("models/llama/adapter/adapter_model.safetensors"), DType::kFloat32);
  for (NamedTensor& t : factors) {
    if (t.name.find("v_proj") == t.name.npos) continue;
    t.tensor = t.tensor.slice(t.name.find("lora_A") != t.name.npos ? 0 : 1, 0, 3);
  }
  write_variant(
      scratch,
      {{"\"use_rslora\": false", "\"use_rslora\": true"}, {"\"rank_pattern\": {}", R"("rank_pattern": {"v_proj": 3})"}},
      factors);
  const AdapterFiles adapter(scratch / "adapter");
  write_gguf_adapter(scratch / "x.gguf", read_model_config(data_path("models/llama")), adapter, DType::kFloat32);
  check_updates(scratch / "x.gguf", "llama", adapter, 3e-7);
}

TEST_CASE("factors that are not finite in the dtype of the GGUF file are refused by key", "[gguf]") {
  const ScratchDirectory scratch;
  auto factors = test::load_all(data_path("models/llama/adapter/adapter_model.safetensors"), DType::kFloat32);
  const auto why = [&](DType dtype) -> std::string {
    write_variant(scratch, {}, factors);
    try {
      write_gguf_adapter(scratch / "x.gguf", read_model_config(data_path("models/llama")),
                         AdapterFiles(scratch / "adapter"), dtype);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  };
  factors[5].tensor.data<float>()[1] = 1e6f;
  CHECK(why(DType::kFloat32).empty());
  CHECK(why(DType::kFloat16).find(factors[5].name) != std::string::npos);
  factors[5].tensor.data<float>()[1] = std::numeric_limits<float>::quiet_NaN();
  CHECK(why(DType::kFloat32).find(factors[5].name) != std::string::npos);
  CHECK(why(DType::kBFloat16).find("float32 or float16") != std::string::npos);
}

}  // namespace rowan
