#include "rowan/nn/llama_files.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/check.h"
#include "io/json.h"

namespace rowan {

namespace {

bool is_factor(const Parameter& p) { return p.role == Parameter::Role::kLoraA || p.role == Parameter::Role::kLoraB; }

/// Tensors that checkpoints hold and no model of the family reads.
bool is_unused(const std::string& name, const ModelConfig& config) {
  return name.ends_with(".rotary_emb.inv_freq") || (config.tie_word_embeddings && name == "lm_head.weight");
}

/// The factors of each module, in the model's order.
std::vector<AdapterFactors> factors_of(const LlamaModel& model, Tensor Parameter::*tensor) {
  std::vector<AdapterFactors> factors;
  for (const Parameter& p : model.parameters()) {
    if (p.role == Parameter::Role::kLoraA) {
      factors.push_back(
          {p.name.substr(0, p.name.size() - std::string_view(".lora_A.weight").size()), p.*tensor, Tensor()});
    } else if (p.role == Parameter::Role::kLoraB) {
      factors.back().lora_b = p.*tensor;
    }
  }
  return factors;
}

}  // namespace

std::vector<BaseWeight> base_weights(const ModelConfig& config) {
  const Shape table{config.vocab_size, config.hidden_size}, hidden{config.hidden_size}, head{config.head_dim};
  std::vector<BaseWeight> weights{{"model.embed_tokens.weight", table}};
  for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const std::string block = "model.layers." + std::to_string(i);
    weights.push_back({block + ".input_layernorm.weight", hidden});
    weights.push_back({block + ".post_attention_layernorm.weight", hidden});
    if (!config.qk_norm) continue;
    weights.push_back({block + ".self_attn.q_norm.weight", head});
    weights.push_back({block + ".self_attn.k_norm.weight", head});
  }
  for (const LinearShape& linear : linear_shapes(config)) {
    weights.push_back({linear.module + ".weight", {linear.out_features, linear.in_features}});
    const bool qkv =
        linear.module.ends_with("q_proj") || linear.module.ends_with("k_proj") || linear.module.ends_with("v_proj");
    if (config.qkv_bias && qkv) weights.push_back({linear.module + ".bias", {linear.out_features}});
  }
  weights.push_back({"model.norm.weight", hidden});
  if (!config.tie_word_embeddings) weights.push_back({"lm_head.weight", table});
  return weights;
}

void check_base(const ModelFiles& files, const ModelConfig& config) {
  const std::string directory = files.directory().string();
  std::set<std::string> wanted;
  for (const BaseWeight& weight : base_weights(config)) {
    const TensorInfo& info = files.at(weight.name);
    if (!std::ranges::equal(weight.shape.extents(), info.shape)) {
      detail::fail(ErrorKind::kFormat, "{}: expected {} of shape {}, got [{}]", directory, weight.name, weight.shape,
                   fmt::join(info.shape, ", "));
    }
    const auto dtype = info.tensor_dtype();
    if (!dtype || !is_floating(*dtype)) {
      detail::fail(ErrorKind::kUnsupported, "{}: tensor {}: weights of dtype {} are not supported", directory,
                   weight.name, info.dtype);
    }
    wanted.insert(weight.name);
  }
  for (const std::string& name : files.names()) {
    if (!wanted.contains(name) && !is_unused(name, config)) {
      detail::fail(ErrorKind::kFormat, "{}: tensor {} belongs to no weight of a {}", directory, detail::quote(name),
                   config.architecture);
    }
  }
}

void load_base(LlamaModel& model, const ModelFiles& files, StreamRef stream) {
  check_base(files, model.config());
  for (const Parameter& p : model.parameters()) {
    if (is_factor(p)) continue;
    files.load_into(p.name, p.value, stream);
    if (p.has_own_master()) files.load_into(p.name, p.master, stream);
  }
}

void save_base(const std::filesystem::path& directory, const LlamaModel& model, StreamRef stream) {
  std::vector<NamedTensor> tensors;
  for (const Parameter& p : model.parameters()) {
    if (!is_factor(p)) tensors.push_back({p.name, p.value});
  }
  ModelConfig config = model.config();
  config.dtype = model.options().dtype;
  save_model_directory(directory, config, tensors, stream);
}

std::function<std::optional<LoraConfig>(const std::string&)> lora_for(const AdapterConfig& config,
                                                                      const ModelConfig& model) {
  std::vector<std::string> modules;
  for (const LinearShape& linear : linear_shapes(model)) modules.push_back(linear.module);
  std::map<std::string, LoraConfig> chosen;
  for (const AdapterTarget& target : resolve_targets(config, modules)) {
    LoraConfig lora;
    lora.rank = target.r;
    lora.alpha = target.alpha;
    lora.use_rslora = config.use_rslora;
    lora.dropout = config.lora_dropout;
    chosen[target.module] = lora;
  }
  return [chosen = std::move(chosen)](const std::string& module) -> std::optional<LoraConfig> {
    const auto found = chosen.find(module);
    if (found == chosen.end()) return std::nullopt;
    return found->second;
  };
}

void load_adapter(LlamaModel& model, const AdapterFiles& files, StreamRef stream) {
  const std::vector<AdapterFactors> factors = factors_of(model, &Parameter::value),
                                    masters = factors_of(model, &Parameter::master);
  const std::vector<AdapterTarget> targets = files.match(linear_shapes(model.config()));
  detail::require(targets.size() == factors.size(), "load_adapter: expected a model with {} adapted layers, got {}",
                  targets.size(), factors.size());
  for (std::size_t i = 0; i < targets.size(); ++i) {
    detail::require(targets[i].module == factors[i].module && targets[i].r == factors[i].lora_a.size(0),
                    "load_adapter: expected an adapter of rank {} on {}, got one of rank {} on {}", targets[i].r,
                    targets[i].module, factors[i].lora_a.size(0), factors[i].module);
  }
  for (std::size_t i = 0; i < factors.size(); ++i) {
    files.load_into(factors[i].module, factors[i].lora_a, factors[i].lora_b, stream);
    if (!masters[i].lora_a.shares_storage(factors[i].lora_a))
      files.load_into(masters[i].module, masters[i].lora_a, masters[i].lora_b, stream);
  }
}

void save_adapter(const std::filesystem::path& directory, const LlamaModel& model, const AdapterConfig& config,
                  StreamRef stream) {
  write_adapter(directory, config, factors_of(model, &Parameter::master), stream);
}

std::vector<LinearShape> linear_shapes(const ModelConfig& config) {
  const std::int64_t hidden = config.hidden_size, q = config.num_attention_heads * config.head_dim;
  const std::int64_t kv = config.num_key_value_heads * config.head_dim, width = config.intermediate_size;
  std::vector<LinearShape> shapes;
  for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) {
    const std::string block = "model.layers." + std::to_string(i);
    shapes.push_back({block + ".self_attn.q_proj", hidden, q});
    shapes.push_back({block + ".self_attn.k_proj", hidden, kv});
    shapes.push_back({block + ".self_attn.v_proj", hidden, kv});
    shapes.push_back({block + ".self_attn.o_proj", q, hidden});
    shapes.push_back({block + ".mlp.gate_proj", hidden, width});
    shapes.push_back({block + ".mlp.up_proj", hidden, width});
    shapes.push_back({block + ".mlp.down_proj", width, hidden});
  }
  return shapes;
}

}  // namespace rowan
