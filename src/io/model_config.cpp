#include "rowan/io/model_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "core/check.h"
#include "io/json.h"
#include "rowan/io/atomic_file.h"

namespace rowan {

namespace {

using detail::describe;
using detail::fail;
using detail::JsonObject;
using detail::quote;
using detail::require;

constexpr std::int64_t kMaxConfigBytes = std::int64_t{1} << 20;

struct Family {
  std::string_view architecture;
  std::string_view model_type;
  bool qkv_bias;
  bool qk_norm;
};
constexpr std::array kFamilies = {
    Family{"LlamaForCausalLM", "llama", false, false}, Family{"MistralForCausalLM", "mistral", false, false},
    Family{"Qwen2ForCausalLM", "qwen2", true, false}, Family{"Qwen3ForCausalLM", "qwen3", false, true}};

const Family* find_family(std::string_view architecture) {
  const auto* found = std::ranges::find(kFamilies, architecture, &Family::architecture);
  return found == kFamilies.end() ? nullptr : found;
}

/// Sizes that every model has, and the largest that is believed: beyond it a config is taken for damaged.
struct SizeField {
  const char* name;
  std::int64_t ModelConfig::*member;
  std::int64_t max;
};
constexpr SizeField kSizes[] = {{"vocab_size", &ModelConfig::vocab_size, 1 << 24},
                                {"hidden_size", &ModelConfig::hidden_size, 1 << 20},
                                {"intermediate_size", &ModelConfig::intermediate_size, 1 << 22},
                                {"num_hidden_layers", &ModelConfig::num_hidden_layers, 1 << 12},
                                {"num_attention_heads", &ModelConfig::num_attention_heads, 1 << 14},
                                {"num_key_value_heads", &ModelConfig::num_key_value_heads, 1 << 14},
                                {"head_dim", &ModelConfig::head_dim, 1 << 12},
                                {"max_position_embeddings", &ModelConfig::max_position_embeddings, 1 << 26}};

/// Throws Unsupported unless the member is absent or `accepted`.
void require_value(const JsonObject& json, const char* name, const nlohmann::ordered_json& accepted) {
  const auto* value = json.find(name);
  if (value != nullptr && *value != accepted)
    json.refuse(name, fmt::format("{} is not supported, only {}", describe(*value), describe(accepted)));
}

const Family& read_family(const JsonObject& json) {
  const auto& names = json.at("architectures");
  if (!names.is_array() || names.size() != 1 || !names[0].is_string())
    json.fail("architectures", "expected a list of one name");
  const Family* family = find_family(names[0].get_ref<const std::string&>());
  if (family == nullptr) json.refuse("architectures", fmt::format("{} is not supported", describe(names[0])));
  if (json.has("model_type") && json.string("model_type") != family->model_type) {
    json.fail("model_type", fmt::format("expected {} beside {}, got {}", quote(family->model_type),
                                        family->architecture, describe(json.at("model_type"))));
  }
  return *family;
}

void read_sizes(const JsonObject& json, const Family& family, ModelConfig& config) {
  const auto is = [&](std::string_view type) { return family.model_type == type; };
  for (const SizeField& field : kSizes) {
    const std::string_view name = field.name;
    const bool derived = (name == "num_key_value_heads" && is("llama")) || (name == "head_dim" && !is("qwen3"));
    if (!derived || json.has(field.name)) config.*field.member = json.integer(field.name, 1, field.max);
  }
  if (config.num_key_value_heads == 0) config.num_key_value_heads = config.num_attention_heads;
  if (config.head_dim == 0) {
    if (config.hidden_size % config.num_attention_heads != 0) {
      json.fail("hidden_size", fmt::format("expected a multiple of num_attention_heads ({}), got {}",
                                           config.num_attention_heads, config.hidden_size));
    }
    config.head_dim = config.hidden_size / config.num_attention_heads;
  }
}

/// rope_theta at the top level (Transformers 4), the rest in rope_scaling (4) or all in rope_parameters (5).
RotaryConfig read_rope(const JsonObject& json) {
  constexpr double kMaxTheta = 1e15;
  RotaryConfig rope;
  const bool outer_theta = json.has("rope_theta");
  if (outer_theta) rope.theta = json.number("rope_theta", 1, kMaxTheta);
  require_value(json, "partial_rotary_factor", 1);
  const bool modern = json.has("rope_parameters"), legacy = json.has("rope_scaling");
  if (modern && legacy && json.at("rope_parameters") != json.at("rope_scaling")) {
    json.fail("rope_scaling", "it differs from rope_parameters; expected one of them");
  }
  if (!modern && !legacy) return rope;

  const JsonObject parameters = json.object(modern ? "rope_parameters" : "rope_scaling");
  if (parameters.has("rope_theta")) {
    const double inner = parameters.number("rope_theta", 1, kMaxTheta);
    if (outer_theta && inner != rope.theta)
      json.fail("rope_theta", fmt::format("{} differs from {} in the rotary parameters", rope.theta, inner));
    rope.theta = inner;
  }
  const char* type_name = parameters.has("rope_type") ? "rope_type" : "type";
  const std::string type = parameters.has(type_name) ? parameters.string(type_name) : "default";
  if (type != "default" && type != "llama3")
    parameters.refuse(type_name, fmt::format("{} is not supported, only default and llama3", quote(type)));
  require_value(parameters, "partial_rotary_factor", 1);
  for (const auto& [name, value] : parameters.members().items()) {
    static constexpr std::string_view kAlways[] = {"rope_theta", "rope_type", "type", "partial_rotary_factor"};
    static constexpr std::string_view kLlama3[] = {"factor", "low_freq_factor", "high_freq_factor",
                                                   "original_max_position_embeddings"};
    const bool known =
        std::ranges::count(kAlways, name) != 0 || (type == "llama3" && std::ranges::count(kLlama3, name) != 0);
    if (!known && !value.is_null())
      parameters.refuse(name, fmt::format("it is not supported with rotary type {}", type));
  }
  if (type == "default") return rope;

  rope.type = RotaryType::kLlama3;
  rope.factor = parameters.number("factor", 1, 1e6);
  rope.low_freq_factor = parameters.number("low_freq_factor", 1e-6, 1e6);
  rope.high_freq_factor = parameters.number("high_freq_factor", 1e-6, 1e6);
  rope.original_max_position = parameters.integer("original_max_position_embeddings", 1, 1 << 26);
  if (rope.high_freq_factor <= rope.low_freq_factor)
    parameters.fail("high_freq_factor", "expected more than low_freq_factor");
  return rope;
}

/// Mistral has a window where sliding_window is set; Qwen only with use_sliding_window; Llama never.
std::int64_t read_sliding_window(const JsonObject& json, const Family& family) {
  const bool used =
      family.model_type == "mistral" || (family.model_type != "llama" && json.boolean("use_sliding_window", false));
  const std::int64_t window =
      used && json.has("sliding_window") ? json.integer("sliding_window", 1, std::int64_t{1} << 40) : 0;
  if (!json.has("layer_types")) return window;
  const auto& types = json.at("layer_types");
  if (!types.is_array()) json.fail("layer_types", "expected a list");
  for (const auto& type : types) {
    if (type != "full_attention" && !(type == "sliding_attention" && window > 0)) {
      json.refuse("layer_types", fmt::format("{} is not supported here", describe(type)));
    }
  }
  return window;
}

DType read_dtype(const JsonObject& json) {
  const char* name = json.has("dtype") ? "dtype" : "torch_dtype";
  if (!json.has(name)) return DType::kFloat32;
  if (json.has("torch_dtype") && json.at("torch_dtype") != json.at(name))
    json.fail("torch_dtype", "it differs from dtype");
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (json.string(name) == to_string(dtype)) return dtype;
  }
  json.refuse(name, fmt::format("{} is not supported", describe(json.at(name))));
}

void read_token_ids(const JsonObject& json, ModelConfig& config) {
  const std::int64_t last = config.vocab_size - 1;
  if (json.has("bos_token_id")) config.bos_token_id = json.integer("bos_token_id", 0, last);
  if (json.has("pad_token_id")) config.pad_token_id = json.integer("pad_token_id", 0, last);
  if (!json.has("eos_token_id")) return;
  const auto& eos = json.at("eos_token_id");
  if (!eos.is_array()) {
    config.eos_token_ids.push_back(json.integer("eos_token_id", 0, last));
    return;
  }
  for (const auto& id : eos) {
    if (!id.is_number_unsigned() || id.get<std::uint64_t>() > static_cast<std::uint64_t>(last)) {
      json.fail("eos_token_id", fmt::format("expected integers from 0 to {}, got {}", last, describe(id)));
    }
    config.eos_token_ids.push_back(id.get<std::int64_t>());
  }
}

void refuse_unsupported(const JsonObject& json, const Family& family) {
  require_value(json, "hidden_act", "silu");
  require_value(json, "attention_dropout", 0);
  require_value(json, "mlp_bias", false);
  if (!family.qkv_bias) require_value(json, "attention_bias", false);  // elsewhere it would put a bias on o_proj too
  if (json.has("quantization_config")) json.refuse("quantization_config", "quantized weights are not supported");
}

}  // namespace

RotaryConfig ModelConfig::rotary() const {
  RotaryConfig config = rope;
  config.head_dim = head_dim;
  return config;
}

void check_model_config(const ModelConfig& config) {
  const Family* family = find_family(config.architecture);
  if (family == nullptr)
    fail(ErrorKind::kInvalidArgument, "model config: architecture {} is not supported", quote(config.architecture));
  for (const SizeField& field : kSizes) {
    const std::int64_t value = config.*field.member;
    require(value >= 1 && value <= field.max, "model config: {}: expected an integer from 1 to {}, got {}", field.name,
            field.max, value);
  }
  require(config.num_attention_heads % config.num_key_value_heads == 0,
          "model config: num_attention_heads: expected a multiple of num_key_value_heads ({}), got {}",
          config.num_key_value_heads, config.num_attention_heads);
  require(config.head_dim % 2 == 0, "model config: head_dim: expected an even number, got {}", config.head_dim);
  require(config.rms_norm_eps > 0 && config.rms_norm_eps <= 1,
          "model config: rms_norm_eps: expected a number above 0, at most 1, got {}", config.rms_norm_eps);
  require(config.initializer_range >= 0 && config.initializer_range <= 1,
          "model config: initializer_range: expected a number from 0 to 1, got {}", config.initializer_range);
  require(config.sliding_window >= 0, "model config: sliding_window: expected 0 or more, got {}",
          config.sliding_window);
  require(config.qkv_bias == family->qkv_bias, "model config: qkv_bias: expected {} for {}", family->qkv_bias,
          config.architecture);
  require(config.qk_norm == family->qk_norm, "model config: qk_norm: expected {} for {}", family->qk_norm,
          config.architecture);
}

ModelConfig read_model_config(const std::filesystem::path& directory) {
  const auto path = directory / "config.json";
  const auto text = detail::read_json_object<nlohmann::ordered_json>(path, kMaxConfigBytes);
  const JsonObject json(path, text);
  const Family& family = read_family(json);
  refuse_unsupported(json, family);

  ModelConfig config;
  config.architecture = family.architecture;
  config.qkv_bias = family.qkv_bias;
  config.qk_norm = family.qk_norm;
  read_sizes(json, family, config);
  config.rms_norm_eps = json.number("rms_norm_eps", 0, 1);
  if (json.has("initializer_range")) config.initializer_range = json.number("initializer_range", 0, 1);
  config.rope = read_rope(json);
  config.sliding_window = read_sliding_window(json, family);
  config.tie_word_embeddings = json.boolean("tie_word_embeddings", false);
  config.dtype = read_dtype(json);
  read_token_ids(json, config);
  try {
    check_model_config(config);
  } catch (const Error& error) {
    throw Error(ErrorKind::kFormat, fmt::format("{}: {}", path.string(), error.what()));
  }
  return config;
}

void write_model_config(const std::filesystem::path& directory, const ModelConfig& config) {
  check_model_config(config);
  const Family& family = *find_family(config.architecture);
  const auto id = [](const std::optional<std::int64_t>& value) {
    return value ? nlohmann::json(*value) : nlohmann::json();
  };
  nlohmann::json json;
  json["architectures"] = {config.architecture};
  json["model_type"] = family.model_type;
  for (const SizeField& field : kSizes) json[field.name] = config.*field.member;
  json["rms_norm_eps"] = config.rms_norm_eps;
  json["initializer_range"] = config.initializer_range;
  json["tie_word_embeddings"] = config.tie_word_embeddings;
  json["torch_dtype"] = to_string(config.dtype);
  json["hidden_act"] = "silu";
  json["attention_dropout"] = 0.0;
  json["use_cache"] = true;
  if (family.model_type == "llama" || family.model_type == "qwen3") json["attention_bias"] = false;
  if (family.model_type == "llama") json["mlp_bias"] = false;
  if (family.model_type == "mistral" || config.sliding_window > 0) {
    json["sliding_window"] = config.sliding_window > 0 ? nlohmann::json(config.sliding_window) : nlohmann::json();
  }
  if (family.model_type.starts_with("qwen")) json["use_sliding_window"] = config.sliding_window > 0;
  json["bos_token_id"] = id(config.bos_token_id);
  json["pad_token_id"] = id(config.pad_token_id);
  json["eos_token_id"] = config.eos_token_ids;
  if (config.eos_token_ids.size() < 2)
    json["eos_token_id"] = config.eos_token_ids.empty() ? nlohmann::json() : nlohmann::json(config.eos_token_ids[0]);
  json["rope_theta"] = config.rope.theta;
  json["rope_scaling"] = nullptr;
  if (config.rope.type == RotaryType::kLlama3) {
    json["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", config.rope.factor},
                            {"low_freq_factor", config.rope.low_freq_factor},
                            {"high_freq_factor", config.rope.high_freq_factor},
                            {"original_max_position_embeddings", config.rope.original_max_position}};
  }
  write_text_file(directory / "config.json", json.dump(2) + "\n");
}

}  // namespace rowan
