#include "rowan/io/peft_adapter.h"

#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>

#include "catch.h"
#include "rowan/core/error.h"
#include "support/compare.h"
#include "support/files.h"

namespace rowan {

using test::data_path;
using test::ScratchDirectory;

namespace {

struct Failure {
  std::optional<ErrorKind> kind;
  std::string message;
  bool names(const std::string& text) const { return message.find(text) != message.npos; }
};

template <class F>
Failure failure_of(const F& call) {
  try {
    call();
    return {};
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  }
}

nlohmann::ordered_json minimal() {
  return {{"peft_type", "LORA"}, {"r", 8}, {"lora_alpha", 16}, {"target_modules", {"q_proj", "v_proj"}}};
}

AdapterConfig read_json(const nlohmann::ordered_json& json) {
  ScratchDirectory scratch;
  test::write_file(scratch / "adapter_config.json", json.dump());
  return read_adapter_config(scratch.path());
}

Failure change(const std::string& name, const nlohmann::ordered_json& value) {
  auto json = minimal();
  json[name] = value;
  return failure_of([&] { read_json(json); });
}

std::vector<std::string> model_linears(int layers = 2) {
  std::vector<std::string> names;
  for (int i = 0; i < layers; ++i) {
    for (const char* name : {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                             "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}) {
      names.push_back("model.layers." + std::to_string(i) + "." + name);
    }
  }
  return names;
}

/// The linear layers of tests/data/models/llama.
std::vector<LinearShape> llama_linears() {
  std::vector<LinearShape> linears;
  for (const std::string& name : model_linears()) {
    LinearShape linear{name, 64, 64};
    if (name.ends_with("k_proj") || name.ends_with("v_proj")) linear.out_features = 32;
    if (name.ends_with("gate_proj") || name.ends_with("up_proj")) linear.out_features = 176;
    if (name.ends_with("down_proj")) linear.in_features = 176;
    linears.push_back(linear);
  }
  return linears;
}

std::vector<std::string> modules_of(const std::vector<AdapterTarget>& targets) {
  std::vector<std::string> modules;
  for (const AdapterTarget& target : targets) modules.push_back(target.module);
  return modules;
}

std::vector<std::string> resolve(const AdapterConfig& config) {
  return modules_of(resolve_targets(config, model_linears()));
}

AdapterConfig with_pattern(const std::string& pattern) {
  AdapterConfig config;
  config.target_pattern = pattern;
  return config;
}

/// A copy of the llama adapter whose tensors have gone through `edit` under their keys.
template <class F>
void copy_adapter(const ScratchDirectory& scratch, const F& edit) {
  const SafetensorsFile file(data_path("models/llama/adapter/adapter_model.safetensors"));
  std::vector<NamedTensor> tensors;
  for (const TensorInfo& tensor : file.tensors()) tensors.push_back({tensor.name, file.load(tensor.name, StreamRef())});
  edit(tensors);
  write_safetensors(scratch / "adapter_model.safetensors", tensors, file.metadata(), StreamRef());
  std::filesystem::copy_file(data_path("models/llama/adapter/adapter_config.json"), scratch / "adapter_config.json",
                             std::filesystem::copy_options::overwrite_existing);
}

Failure match_failure(const ScratchDirectory& scratch) {
  return failure_of([&] { AdapterFiles(scratch.path()).match(llama_linears()); });
}

}  // namespace

TEST_CASE("adapter configs written by PEFT are read", "[io]") {
  const std::string family = GENERATE("llama", "mistral", "qwen2", "qwen3");
  const AdapterConfig config = read_adapter_config(data_path("models/" + family + "/adapter"));
  CHECK(config.r == 8);
  CHECK(config.lora_alpha == 16);
  CHECK_FALSE(config.use_rslora);
  CHECK(config.target_modules.size() == (family == "mistral" ? 7u : 14u));
  CHECK(resolve_targets(config, model_linears(family == "mistral" ? 1 : 2)).size() == config.target_modules.size());
}

TEST_CASE("an adapter config without peft_type, r, lora_alpha or target_modules is an error naming the key", "[io]") {
  const std::string name = GENERATE("peft_type", "r", "lora_alpha", "target_modules");
  auto json = minimal();
  json.erase(name);
  const Failure failure = failure_of([&] { read_json(json); });
  CHECK(failure.kind == ErrorKind::kFormat);
  CHECK(failure.names(name + ": it is missing"));
  CHECK(failure.names("adapter_config.json"));
  CHECK(change(name, nullptr).names(name));
}

TEST_CASE("adapter config values out of range are refused by name", "[io]") {
  for (const nlohmann::ordered_json& r :
       {nlohmann::ordered_json(0), nlohmann::ordered_json(-1), nlohmann::ordered_json(2.5), nlohmann::ordered_json("8"),
        nlohmann::ordered_json(1'000'000'000)}) {
    CHECK(change("r", r).names(" r: "));
    CHECK(change("rank_pattern", {{"q_proj", r}}).names("rank_pattern.q_proj"));
  }
  CHECK(change("lora_alpha", "16").names("lora_alpha"));
  CHECK(change("alpha_pattern", {{"q_proj", nullptr}}).names("alpha_pattern.q_proj"));
  CHECK(change("lora_dropout", 1.5).names("lora_dropout"));
  CHECK(change("lora_dropout", -0.1).names("lora_dropout"));
  CHECK(change("use_rslora", 1).names("use_rslora"));
  CHECK(change("target_modules", nlohmann::ordered_json::array()).names("target_modules"));
  CHECK(change("target_modules", {"q_proj", 3}).names("target_modules"));
  CHECK(change("target_modules", {""}).names("target_modules"));
  CHECK(change("peft_type", "IA3").names("peft_type"));
}

TEST_CASE("adapter features that are not supported are refused by name", "[io]") {
  const auto refused = [](const char* name, const nlohmann::ordered_json& value) {
    const Failure failure = change(name, value);
    return failure.kind == ErrorKind::kUnsupported && failure.names(name);
  };
  CHECK(refused("use_dora", true));
  CHECK(refused("lora_bias", true));
  CHECK(refused("modules_to_save", {"lm_head"}));
  CHECK(refused("bias", "all"));
  CHECK(refused("fan_in_fan_out", true));
  CHECK(refused("layers_to_transform", {0}));
  CHECK(refused("exclude_modules", {"q_proj"}));
  CHECK(refused("init_lora_weights", "pissa"));
  CHECK(refused("task_type", "SEQ_CLS"));
  CHECK(refused("a_feature_of_tomorrow", 1));
  CHECK_FALSE(change("a_feature_of_tomorrow", nullptr).kind);
  CHECK_FALSE(change("loftq_config", nlohmann::ordered_json::object()).kind);
  CHECK_FALSE(change("qalora_group_size", 16).kind);
}

TEST_CASE("target_modules are suffixes or full paths", "[io]") {
  AdapterConfig config;
  config.target_modules = {"q_proj"};
  CHECK(resolve(config) ==
        std::vector<std::string>{"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"});
  config.target_modules = {"model.layers.1.mlp.up_proj", "self_attn.k_proj"};
  CHECK(resolve(config) == std::vector<std::string>{"model.layers.0.self_attn.k_proj",
                                                    "model.layers.1.self_attn.k_proj", "model.layers.1.mlp.up_proj"});
  config.target_modules = {"q_proj", "proj"};  // a suffix begins at a dot
  CHECK(failure_of([&] { resolve(config); }).names("\"proj\""));
  config.target_modules = {"q_prj"};
  CHECK(failure_of([&] { resolve(config); }).kind == ErrorKind::kInvalidArgument);
}

TEST_CASE("target_modules as a pattern must match the whole path, and all-linear leaves lm_head out", "[io]") {
  CHECK(resolve(with_pattern(R"(.*\.[qv]_proj)")).size() == 4);
  CHECK(resolve(with_pattern(R"(model\.layers\.1\..*)")).size() == 7);
  CHECK(
      resolve(
          with_pattern(
              R"((?:.*?(?:self_attn|mlp).*?(?:q_proj|up_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.mlp\.(?:down_proj)))"))
          .size() == 6);
  CHECK(failure_of([] { resolve(with_pattern("q_proj")); }).names("q_proj"));
  auto modules = model_linears();
  modules.push_back("lm_head");
  CHECK(resolve_targets(with_pattern("all-linear"), modules).size() == 14);
  CHECK(resolve_targets(with_pattern("ALL-LINEAR"), modules).size() == 14);
}

TEST_CASE("patterns that C++ would read in another way than Python are refused", "[io]") {
  const std::string pattern = GENERATE("(", "a)|(b", "(?P<x>a)", "(?i)q_proj", R"(q_proj\Z)", R"((a)\1)", "(?<=a)b",
                                       "[[:alpha:]]", "a{100000}{100000}");
  CAPTURE(pattern);
  CHECK(failure_of([&] { resolve(with_pattern(pattern)); }).names("target_modules"));
  AdapterConfig config = with_pattern("all-linear");
  config.rank_pattern = {{pattern, 4}};
  CHECK(failure_of([&] { resolve(config); }).names("rank_pattern"));
}

TEST_CASE("a pattern made to backtrack without end is answered at once", "[io]") {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<std::string> module = {std::string(60, 'a') + "!"};
  CHECK(failure_of([&] { resolve_targets(with_pattern("(a*)*b"), module); }).kind == ErrorKind::kInvalidArgument);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(5));
}

TEST_CASE("rank_pattern and alpha_pattern set rank and scale, the first match counting", "[io]") {
  auto json = minimal();
  json["rank_pattern"] = {{R"(layers\.1\.self_attn\.q_proj)", 4}, {"q_proj", 2}, {"v_pro", 99}};
  json["alpha_pattern"] = {{"^model.layers.0.*", 3.5}};
  const AdapterConfig config = read_json(json);
  const auto targets = resolve_targets(config, model_linears());
  REQUIRE(targets.size() == 4);
  CHECK(targets[0].module == "model.layers.0.self_attn.q_proj");
  CHECK(targets[0].r == 2);
  CHECK(targets[0].scale == 1.75);
  CHECK(targets[1].r == 8);  // v_proj: the key v_pro must match up to the end
  CHECK(targets[1].alpha == 3.5);
  CHECK(targets[2].r == 4);
  CHECK(targets[2].scale == 4);
}

TEST_CASE("rank-stabilised LoRA scales by the square root of the rank", "[io]") {
  auto json = minimal();
  json["r"] = 16;
  json["use_rslora"] = true;
  CHECK(resolve_targets(read_json(json), model_linears())[0].scale == 4);
}

TEST_CASE("a PEFT adapter matches its model and loads", "[io]") {
  const AdapterFiles adapter(data_path("models/llama/adapter"));
  CHECK(adapter.modules().size() == 14);
  const auto targets = adapter.match(llama_linears());
  CHECK(modules_of(targets) == model_linears());
  CHECK(targets[0].scale == 2);
  const std::string module = "model.layers.1.mlp.down_proj";
  const Tensor a = Tensor::empty({8, 176}, DType::kFloat32, StreamRef());
  const Tensor b = Tensor::empty({64, 8}, DType::kFloat32, StreamRef());
  adapter.load_into(module, a, b, StreamRef());
  const Tensor expected = adapter.file().load("base_model.model." + module + ".lora_B.weight", StreamRef());
  CHECK(test::values(b, StreamRef()) == test::values(expected, StreamRef()));
}

TEST_CASE("an adapter whose keys do not belong to the model names the first of them", "[io]") {
  ScratchDirectory scratch;
  copy_adapter(scratch, [](auto& tensors) {  // one "model." too few
    for (NamedTensor& t : tensors) t.name.erase(0, 6 + 5);
  });
  CHECK(match_failure(scratch).names("unexpected key \"model.model.layers.0.mlp.down_proj.lora_A.weight\""));
  copy_adapter(scratch, [](auto& tensors) {
    for (NamedTensor& t : tensors) t.name.erase(sizeof("base_model.model.") - 1, 6);
  });
  const Failure failure = match_failure(scratch);
  CHECK(failure.kind == ErrorKind::kFormat);
  CHECK(failure.names("\"base_model.model.layers.0.mlp.down_proj.lora_A.weight\" matches no linear layer"));
}

TEST_CASE("an adapter with a missing, left-over or wrongly shaped key is an error naming it", "[io]") {
  ScratchDirectory scratch;
  copy_adapter(scratch, [](auto& tensors) { tensors.erase(tensors.begin() + 3); });
  CHECK(match_failure(scratch).names("gate_proj.lora_B.weight\" is missing"));

  copy_adapter(scratch, [](auto& tensors) {
    tensors[0].tensor = Tensor::zeros({8, 175}, DType::kFloat32, StreamRef());
  });
  CHECK(match_failure(scratch).names("down_proj.lora_A.weight\": expected shape [8, 176], got [8, 175]"));

  copy_adapter(scratch, [](auto& tensors) {
    tensors.push_back({"base_model.model.lm_head.weight", Tensor::zeros({1}, DType::kFloat32, StreamRef())});
  });
  CHECK(match_failure(scratch).names("base_model.model.lm_head.weight"));

  copy_adapter(scratch, [](auto& tensors) {
    tensors[1].tensor = Tensor::zeros(tensors[1].tensor.shape(), DType::kInt32, StreamRef());
  });
  CHECK(match_failure(scratch).names("down_proj.lora_B.weight\": factors of dtype I32 are not supported"));

  copy_adapter(scratch, [](auto&) {});
  auto json = nlohmann::ordered_json::parse(test::read_file(scratch / "adapter_config.json"));
  json["target_modules"] = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"};
  test::write_file(scratch / "adapter_config.json", json.dump());
  CHECK(match_failure(scratch).names("down_proj.lora_A.weight\" is left over"));
}

TEST_CASE("a written adapter has PEFT's keys and config, and reads back", "[io]") {
  AdapterConfig config;
  config.r = 4;
  config.lora_alpha = 8;
  config.lora_dropout = 0.05;
  config.target_modules = {"q_proj", "v_proj"};
  config.rank_pattern = {{"v_proj", 2}};
  config.alpha_pattern = {{"v_proj", 0.5}};
  config.base_model_name_or_path = "someone/model";
  std::vector<AdapterFactors> factors;
  for (const AdapterTarget& target : resolve_targets(config, model_linears())) {
    const std::int64_t out = target.module.ends_with("v_proj") ? 32 : 64;
    factors.push_back({target.module, test::random_normal({target.r, 64}, DType::kFloat32, factors.size(), StreamRef()),
                       test::random_normal({out, target.r}, DType::kFloat32, 100 + factors.size(), StreamRef())});
  }
  ScratchDirectory scratch;
  write_adapter(scratch / "adapter", config, factors, StreamRef());

  const auto json = nlohmann::json::parse(test::read_file(scratch / "adapter/adapter_config.json"));
  for (const char* name : {"peft_type", "task_type", "r", "lora_alpha", "use_rslora", "use_dora", "lora_dropout",
                           "bias", "target_modules", "fan_in_fan_out", "init_lora_weights", "rank_pattern",
                           "alpha_pattern", "modules_to_save", "inference_mode", "base_model_name_or_path"}) {
    CAPTURE(name);
    CHECK(json.contains(name));
  }
  CHECK(json["lora_alpha"].is_number_integer());
  CHECK(SafetensorsFile(scratch / "adapter/adapter_model.safetensors").metadata().at("format") == "pt");

  const AdapterFiles adapter(scratch / "adapter");
  CHECK(adapter.config().rank_pattern == config.rank_pattern);
  CHECK(adapter.config().alpha_pattern == config.alpha_pattern);
  CHECK(adapter.config().lora_dropout == config.lora_dropout);
  CHECK(adapter.config().base_model_name_or_path == config.base_model_name_or_path);
  const auto targets = adapter.match(llama_linears());
  REQUIRE(targets.size() == factors.size());
  for (const AdapterFactors& f : factors) {
    const Tensor a = Tensor::empty(f.lora_a.shape(), DType::kFloat32, StreamRef());
    const Tensor b = Tensor::empty(f.lora_b.shape(), DType::kFloat32, StreamRef());
    adapter.load_into(f.module, a, b, StreamRef());
    CHECK(test::values(a, StreamRef()) == test::values(f.lora_a, StreamRef()));
    CHECK(test::values(b, StreamRef()) == test::values(f.lora_b, StreamRef()));
  }

  factors[0].lora_a = Tensor::zeros({5, 64}, DType::kFloat32, StreamRef());
  CHECK(failure_of([&] { write_adapter(scratch / "adapter", config, factors, StreamRef()); }).names("q_proj"));
}

}  // namespace rowan
