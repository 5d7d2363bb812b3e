#include "rowan/nn/llama_files.h"

#include <map>

#include "catch.h"
#include "rowan/core/error.h"
#include "support/compare.h"
#include "support/model_directory.h"

namespace rowan {
namespace {

using test::data_path;
using test::ScratchDirectory;

std::string why_refused(const std::filesystem::path& model) {
  try {
    check_base(ModelFiles(model), read_model_config(model));
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

}  // namespace

TEST_CASE("the base weights of a configuration are the parameters of its model", "[io]") {
  const std::string family = GENERATE("llama", "mistral", "qwen2", "qwen3");
  const ModelConfig config = read_model_config(data_path("models") / family);
  const LlamaModel model(config, {}, StreamRef());
  std::map<std::string, std::string> expected, got;
  for (const Parameter& p : model.parameters()) expected[p.name] = to_string(p.value.shape());
  for (const BaseWeight& weight : base_weights(config)) got[weight.name] = to_string(weight.shape);
  CHECK(got == expected);
  CHECK(got.size() == base_weights(config).size());
}

TEST_CASE("models load from one file or from shards, and from every floating dtype", "[io]") {
  const std::string family = GENERATE("llama", "mistral", "qwen2", "qwen3");
  const DType stored = GENERATE(DType::kFloat32, DType::kBFloat16, DType::kFloat16);
  const int shards = GENERATE(1, 3);
  CAPTURE(family, to_string(stored), shards);
  const ScratchDirectory scratch;
  const auto tensors = test::load_all(data_path("models") / family / "model.safetensors", stored);
  test::write_model(scratch.path(), family, tensors, shards);
  LlamaModel model(read_model_config(scratch.path()), {}, StreamRef());
  load_base(model, ModelFiles(scratch.path()), StreamRef());
  std::map<std::string, Tensor> expected;
  for (const NamedTensor& t : tensors) expected[t.name] = t.tensor;
  for (const Parameter& p : model.parameters()) {
    CAPTURE(p.name);
    CHECK(test::values(p.value, StreamRef()) == test::values(expected.at(p.name), StreamRef()));
  }
}

TEST_CASE("weights that do not fit their configuration, or are of a dtype not computed with, are refused by name",
          "[io]") {
  const ScratchDirectory scratch;
  const auto with = [&](const auto& edit) {
    auto tensors = test::load_all(data_path("models/llama/model.safetensors"), DType::kFloat32);
    edit(tensors);
    test::write_model(scratch.path(), "llama", tensors);
    return why_refused(scratch.path());
  };
  const auto contains = [](const std::string& text, const std::string& part) { return text.find(part) != text.npos; };
  CHECK(with([](auto&) {}).empty());
  CHECK(
      contains(with([](auto& t) { t.erase(t.begin() + 5); }), "holds no tensor \"model.layers.0.mlp.up_proj.weight\""));
  CHECK(contains(with([](auto& t) {
                   t[1].tensor = Tensor::zeros({64, 321}, DType::kFloat32, StreamRef());
                 }),
                 "model.embed_tokens.weight of shape [320, 64], got [64, 321]"));
  CHECK(contains(with([](auto& t) {
                   t.push_back({"model.layers.2.mlp.up_proj.weight", t[0].tensor});
                 }),
                 "\"model.layers.2.mlp.up_proj.weight\" belongs to no weight"));
  CHECK(contains(with([](auto& t) { t[5].tensor = Tensor::zeros(t[5].tensor.shape(), DType::kInt32, StreamRef()); }),
                 "model.layers.0.mlp.up_proj.weight: weights of dtype I32 are not supported"));
}

}  // namespace rowan
