#include "rowan/io/model_config.h"

#include <nlohmann/json.hpp>

#include "catch.h"
#include "rowan/core/error.h"
#include "support/files.h"

namespace rowan {

using test::data_path;
using test::ScratchDirectory;

namespace {

nlohmann::json llama() { return nlohmann::json::parse(test::read_file(data_path("models/llama/config.json"))); }

struct Outcome {
  std::optional<ErrorKind> kind;  // of the error; none when it was read
  std::string message;
  bool names(const std::string& text) const { return message.find(text) != message.npos; }
};

Outcome read_text(const std::string& text) {
  ScratchDirectory scratch;
  test::write_file(scratch / "config.json", text);
  try {
    read_model_config(scratch.path());
    return {};
  } catch (const Error& error) {
    return {error.kind(), error.what()};
  }
}

ModelConfig read_json(const nlohmann::json& json) {
  ScratchDirectory scratch;
  test::write_file(scratch / "config.json", json.dump());
  return read_model_config(scratch.path());
}

}  // namespace

TEST_CASE("config.json of Llama, Mistral, Qwen2 and Qwen3 models is read", "[io]") {
  const ModelConfig llama = read_model_config(data_path("models/llama"));
  CHECK(llama.architecture == "LlamaForCausalLM");
  CHECK(llama.vocab_size == 320);
  CHECK(llama.hidden_size == 64);
  CHECK(llama.intermediate_size == 176);
  CHECK(llama.num_hidden_layers == 2);
  CHECK(llama.num_attention_heads == 4);
  CHECK(llama.num_key_value_heads == 2);
  CHECK(llama.head_dim == 16);
  CHECK(llama.max_position_embeddings == 128);
  CHECK(llama.rms_norm_eps == 1e-6);
  CHECK(llama.rope.theta == 10000);
  CHECK(llama.rope.type == RotaryType::kDefault);
  CHECK(llama.rotary().head_dim == 16);
  CHECK(llama.bos_token_id == 1);
  CHECK(llama.eos_token_ids == std::vector<std::int64_t>{2});
  CHECK_FALSE(llama.pad_token_id);
  CHECK_FALSE(llama.tie_word_embeddings);
  CHECK_FALSE(llama.qkv_bias);
  CHECK(llama.dtype == DType::kFloat32);

  const ModelConfig mistral = read_model_config(data_path("models/mistral"));
  CHECK(mistral.num_key_value_heads == 3);
  CHECK(mistral.sliding_window == 0);

  const ModelConfig qwen2 = read_model_config(data_path("models/qwen2"));
  CHECK(qwen2.head_dim == 16);  // derived
  CHECK(qwen2.qkv_bias);
  CHECK(qwen2.tie_word_embeddings);
  CHECK(qwen2.eos_token_ids.empty());

  const ModelConfig qwen3 = read_model_config(data_path("models/qwen3"));
  CHECK(qwen3.head_dim == 32);
  CHECK(qwen3.qk_norm);
}

TEST_CASE("a config integer that is negative, huge, zero, fractional, missing or of another type is refused by name",
          "[io]") {
  const std::string field = GENERATE("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                     "num_attention_heads", "max_position_embeddings");
  for (const nlohmann::json& value :
       {nlohmann::json(-1), nlohmann::json(1'000'000'000), nlohmann::json(0), nlohmann::json(2.5), nlohmann::json(2.0),
        nlohmann::json("2"), nlohmann::json(true), nlohmann::json(~0ull), nlohmann::json()}) {
    auto json = llama();
    json[field] = value;
    CAPTURE(field, value.dump());
    const Outcome outcome = read_text(json.dump());
    CHECK(outcome.kind == ErrorKind::kFormat);
    CHECK(outcome.names(field));
    CHECK(outcome.names("config.json"));
  }
  auto json = llama();
  json.erase(field);
  CHECK(read_text(json.dump()).names(field + ": it is missing"));
  json[field] = "NaN goes here";
  std::string text = json.dump();
  text.replace(text.find("\"NaN goes here\""), 15, "NaN");
  const Outcome outcome = read_text(text);
  CHECK(outcome.kind == ErrorKind::kFormat);
  CHECK(outcome.names(field));
}

TEST_CASE("config numbers, ids and sizes that do not fit are refused by name", "[io]") {
  const auto change = [](const char* name, const nlohmann::json& value) {
    auto json = llama();
    json[name] = value;
    return read_text(json.dump());
  };
  CHECK(change("rms_norm_eps", 0).names("rms_norm_eps"));
  CHECK(change("rms_norm_eps", -1e-6).names("rms_norm_eps"));
  CHECK(change("rms_norm_eps", nullptr).names("rms_norm_eps"));
  CHECK(change("num_key_value_heads", 3).names("num_key_value_heads"));
  CHECK(change("num_key_value_heads", 0).names("num_key_value_heads"));
  CHECK(change("head_dim", 15).names("head_dim"));
  CHECK(change("bos_token_id", 320).names("bos_token_id"));
  CHECK(change("pad_token_id", -1).names("pad_token_id"));
  CHECK(change("eos_token_id", {2, 320}).names("eos_token_id"));
  CHECK(change("tie_word_embeddings", 1).names("tie_word_embeddings"));
  CHECK(change("rope_theta", 5.0).names("rope_theta"));  // differs from rope_parameters
  CHECK(change("model_type", "mistral").names("model_type"));
  auto json = llama();
  json["head_dim"] = nullptr;
  json["num_attention_heads"] = 6;
  CHECK(read_text(json.dump()).names("hidden_size"));
}

TEST_CASE("what the models here do not compute is refused by name", "[io]") {
  const auto refused = [](const char* name, const nlohmann::json& value) {
    auto json = llama();
    json[name] = value;
    const Outcome outcome = read_text(json.dump());
    return outcome.kind == ErrorKind::kUnsupported && outcome.names(name);
  };
  CHECK(refused("architectures", {"GemmaForCausalLM"}));
  CHECK(read_text(nlohmann::json{{"architectures", {"GemmaForCausalLM"}}}.dump()).names("GemmaForCausalLM"));
  CHECK(refused("mlp_bias", true));
  CHECK(refused("attention_bias", true));
  CHECK(refused("attention_dropout", 0.1));
  CHECK(refused("hidden_act", "gelu"));
  CHECK(refused("quantization_config", {{"bits", 4}}));
  CHECK(refused("rope_parameters", {{"rope_type", "yarn"}, {"rope_theta", 1e4}, {"factor", 4}}));
  CHECK(refused("rope_parameters", {{"full_attention", {{"rope_type", "default"}}}}));
  CHECK(refused("partial_rotary_factor", 0.5));
  CHECK(refused("layer_types", {"full_attention", "linear_attention"}));
  CHECK(refused("dtype", "float8_e4m3fn"));
}

TEST_CASE("rotary parameters of Transformers 4 and 5 read alike", "[io]") {
  auto json = llama();
  json["rope_parameters"] = {{"rope_type", "llama3"},   {"rope_theta", 500000.0},
                             {"factor", 32.0},          {"low_freq_factor", 1.0},
                             {"high_freq_factor", 4.0}, {"original_max_position_embeddings", 8192}};
  const RotaryConfig modern = read_json(json).rope;
  CHECK(modern.type == RotaryType::kLlama3);
  CHECK(modern.theta == 500000);
  CHECK(modern.factor == 32);
  CHECK(modern.original_max_position == 8192);

  auto scaling = json["rope_parameters"];
  scaling.erase("rope_theta");
  json.erase("rope_parameters");
  json["rope_scaling"] = scaling;
  json["rope_theta"] = 500000;
  const RotaryConfig legacy = read_json(json).rope;
  CHECK(legacy.type == RotaryType::kLlama3);
  CHECK(legacy.theta == 500000);
  CHECK(legacy.high_freq_factor == 4);

  json["rope_scaling"]["high_freq_factor"] = 0.5;
  CHECK(read_text(json.dump()).names("rope_scaling.high_freq_factor"));
  json["rope_scaling"].erase("high_freq_factor");
  CHECK(read_text(json.dump()).names("rope_scaling.high_freq_factor: it is missing"));
  json.erase("rope_scaling");
  json.erase("rope_theta");
  CHECK(read_json(json).rope.theta == 10000);
}

TEST_CASE("a sliding window is reported where the architecture uses it", "[io]") {
  auto json = llama();
  json["sliding_window"] = 32;
  CHECK(read_json(json).sliding_window == 0);
  json["architectures"] = {"MistralForCausalLM"};
  json["model_type"] = "mistral";
  CHECK(read_json(json).sliding_window == 32);
  json["architectures"] = {"Qwen2ForCausalLM"};
  json["model_type"] = "qwen2";
  CHECK(read_json(json).sliding_window == 0);
  json["use_sliding_window"] = true;
  CHECK(read_json(json).sliding_window == 32);
}

TEST_CASE("old Llama configs derive what they leave out, and may list several end tokens", "[io]") {
  auto json = llama();
  for (const char* name : {"head_dim", "num_key_value_heads", "attention_bias", "mlp_bias", "rope_parameters", "dtype",
                           "tie_word_embeddings"}) {
    json.erase(name);
  }
  json["torch_dtype"] = "bfloat16";
  json["eos_token_id"] = {2, 5, 7};
  const ModelConfig config = read_json(json);
  CHECK(config.num_key_value_heads == 4);
  CHECK(config.head_dim == 16);
  CHECK(config.dtype == DType::kBFloat16);
  CHECK(config.eos_token_ids == std::vector<std::int64_t>{2, 5, 7});
}

TEST_CASE("a written config.json reads back equal", "[io]") {
  const std::string family = GENERATE("llama", "mistral", "qwen2", "qwen3");
  ModelConfig config = read_model_config(data_path("models/" + family));
  config.rope.type = RotaryType::kLlama3;
  config.rope.factor = 8.5;
  config.dtype = DType::kBFloat16;
  config.eos_token_ids = {1, 2};
  config.sliding_window = family == "llama" ? 0 : 64;
  ScratchDirectory scratch;
  write_model_config(scratch.path(), config);
  const ModelConfig back = read_model_config(scratch.path());
  CHECK(back.architecture == config.architecture);
  CHECK(back.vocab_size == config.vocab_size);
  CHECK(back.num_key_value_heads == config.num_key_value_heads);
  CHECK(back.head_dim == config.head_dim);
  CHECK(back.rms_norm_eps == config.rms_norm_eps);
  CHECK(back.rope.type == config.rope.type);
  CHECK(back.rope.factor == config.rope.factor);
  CHECK(back.dtype == config.dtype);
  CHECK(back.eos_token_ids == config.eos_token_ids);
  CHECK(back.bos_token_id == config.bos_token_id);
  CHECK(back.sliding_window == config.sliding_window);
  CHECK(back.tie_word_embeddings == config.tie_word_embeddings);
  CHECK(back.qkv_bias == config.qkv_bias);
  CHECK(back.qk_norm == config.qk_norm);
  config.hidden_size = -1;
  REQUIRE_THROWS_AS(write_model_config(scratch.path(), config), Error);
}

TEST_CASE("hostile JSON in config.json is an error, not a crash", "[io]") {
  const auto kind = [](const std::string& text) { return read_text(text).kind; };
  CHECK(kind("") == ErrorKind::kFormat);
  CHECK(kind("[]") == ErrorKind::kFormat);
  CHECK(kind(std::string(1000, '[')) == ErrorKind::kFormat);
  CHECK(kind(R"({"a":1,"a":2})") == ErrorKind::kFormat);
  CHECK(kind(R"({"a":1e999})") == ErrorKind::kFormat);
  CHECK(kind(std::string(2 << 20, ' ')) == ErrorKind::kFormat);
  CHECK(kind("{}" + std::string(1, '\0')) == ErrorKind::kFormat);
  ScratchDirectory empty;
  try {
    read_model_config(empty.path());
    FAIL("expected an error");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kIo);
  }
}

}  // namespace rowan
