#include "rowan/io/peft_adapter.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <regex>
#include <set>
#include <string_view>
#include <unordered_map>

#include "core/check.h"
#include "io/input_file.h"
#include "io/json.h"
#include "io/module_pattern.h"
#include "rowan/io/atomic_file.h"

namespace rowan {

namespace {

using detail::describe;
using detail::fail_format;
using detail::JsonObject;
using detail::quote;
using detail::require;
using nlohmann::ordered_json;

constexpr const char* kConfigFile = "adapter_config.json";
constexpr const char* kWeightsFile = "adapter_model.safetensors";
constexpr std::int64_t kMaxConfigBytes = std::int64_t{1} << 20;
constexpr std::int64_t kMaxRank = 1 << 16;
constexpr double kMaxAlpha = 1e9;
constexpr std::size_t kMaxPatterns = 1024;

constexpr std::string_view kKeyPrefix = "base_model.model.";
constexpr std::string_view kKeySuffixA = ".lora_A.weight";
constexpr std::string_view kKeySuffixB = ".lora_B.weight";

std::string key_of(const std::string& module, std::string_view suffix) {
  return fmt::format("{}{}{}", kKeyPrefix, module, suffix);
}

bool is_all_linear(const std::string& pattern) {
  return std::ranges::equal(pattern, std::string_view("all-linear"),
                            [](unsigned char a, char b) { return std::tolower(a) == b; });
}

/// `module` is the path `target`, or ends in it behind a dot.
bool names_module(std::string_view target, std::string_view module) {
  if (!module.ends_with(target)) return false;
  return module.size() == target.size() || module[module.size() - target.size() - 1] == '.';
}

// ---- ranks and alphas
// -------------------------------------------------------------------------------------------------------

template <class Value>
using CompiledPatterns = std::vector<std::pair<std::regex, Value>>;

template <class Value>
CompiledPatterns<Value> compile(const char* name, const std::vector<std::pair<std::string, Value>>& patterns) {
  require(patterns.size() <= kMaxPatterns, "adapter config: {}: expected at most {} entries, got {}", name,
          kMaxPatterns, patterns.size());
  CompiledPatterns<Value> compiled;
  for (const auto& [key, value] : patterns) {
    const std::string what = fmt::format("adapter config: {}", name);
    detail::compile_module_pattern(what, key);  // alone first: a key like "a)|(b" must not close our group
    compiled.emplace_back(detail::compile_module_pattern(what, fmt::format(R"((?:.*\.)?(?:{}))", key)), value);
  }
  return compiled;
}

template <class Value>
Value first_match(const CompiledPatterns<Value>& patterns, const std::string& module, Value otherwise) {
  const auto found =
      std::ranges::find_if(patterns, [&](const auto& entry) { return std::regex_match(module, entry.first); });
  return found == patterns.end() ? otherwise : found->second;
}

/// Answers for one module after another with patterns compiled once.
class RankResolver {
 public:
  explicit RankResolver(const AdapterConfig& config)
      : config_(config),
        ranks_(compile("rank_pattern", config.rank_pattern)),
        alphas_(compile("alpha_pattern", config.alpha_pattern)) {}

  AdapterTarget operator()(const std::string& module) const {
    AdapterTarget target;
    target.module = module;
    target.r = first_match(ranks_, module, config_.r);
    target.alpha = first_match(alphas_, module, config_.lora_alpha);
    const auto rank = static_cast<double>(target.r);
    target.scale = target.alpha / (config_.use_rslora ? std::sqrt(rank) : rank);
    return target;
  }

 private:
  const AdapterConfig& config_;
  CompiledPatterns<std::int64_t> ranks_;
  CompiledPatterns<double> alphas_;
};

// ---- adapter_config.json
// ----------------------------------------------------------------------------------------------------

/// The value that PEFT gives to a feature which is not used.
bool is_off(const ordered_json& value) {
  return value.is_null() || value == false || value == "" || (value.is_structured() && value.empty());
}

/// Throws Unsupported unless every member is read below, has no effect on what an adapter computes, or is off.
void refuse_unsupported(const JsonObject& json) {
  static constexpr std::string_view kRead[] = {"peft_type",    "r",
                                               "lora_alpha",   "use_rslora",
                                               "lora_dropout", "target_modules",
                                               "rank_pattern", "alpha_pattern",
                                               "task_type",    "base_model_name_or_path",
                                               "bias",         "init_lora_weights"};
  static constexpr std::string_view kNoEffect[] = {"auto_mapping",  "eva_config",    "inference_mode",
                                                   "megatron_core", "peft_version",  "qalora_group_size",
                                                   "revision",      "runtime_config"};
  for (const auto& [name, value] : json.members().items()) {
    if (std::ranges::count(kRead, name) + std::ranges::count(kNoEffect, name) == 0 && !is_off(value)) {
      json.refuse(name, fmt::format("{} is not supported", describe(value)));
    }
  }
  const auto require_value = [&](const char* name, std::initializer_list<ordered_json> accepted) {
    const auto* value = json.find(name);
    if (value != nullptr && std::ranges::find(accepted, *value) == accepted.end())
      json.refuse(name, fmt::format("{} is not supported", describe(*value)));
  };
  require_value("bias", {"none"});
  require_value("task_type", {"CAUSAL_LM"});
  // The others (pissa, olora, corda, loftq) change the base weights that the adapter was trained on.
  require_value("init_lora_weights", {true, false, "gaussian", "eva", "orthogonal"});
}

void read_targets(const JsonObject& json, AdapterConfig& config) {
  const auto& targets = json.at("target_modules");
  if (targets.is_string()) {
    config.target_pattern = targets.get<std::string>();
    return;
  }
  if (!targets.is_array())
    json.fail("target_modules", fmt::format("expected a list or a string, got {}", describe(targets)));
  for (const auto& target : targets) {
    if (!target.is_string()) json.fail("target_modules", fmt::format("expected strings, got {}", describe(target)));
    config.target_modules.push_back(target.get<std::string>());
  }
}

std::string config_text(const AdapterConfig& config) {
  const auto number = [](double value) {  // PEFT writes whole alphas as integers
    return value == std::floor(value) ? ordered_json(static_cast<std::int64_t>(value)) : ordered_json(value);
  };
  ordered_json json = ordered_json::object();
  json["alpha_pattern"] = ordered_json::object();
  for (const auto& [key, alpha] : config.alpha_pattern) json["alpha_pattern"][key] = number(alpha);
  json["base_model_name_or_path"] =
      config.base_model_name_or_path.empty() ? ordered_json() : ordered_json(config.base_model_name_or_path);
  json["bias"] = "none";
  json["fan_in_fan_out"] = false;
  json["inference_mode"] = true;
  json["init_lora_weights"] = true;
  json["lora_alpha"] = number(config.lora_alpha);
  json["lora_dropout"] = config.lora_dropout;
  json["modules_to_save"] = nullptr;
  json["peft_type"] = "LORA";
  json["r"] = config.r;
  json["rank_pattern"] = ordered_json::object();
  for (const auto& [key, r] : config.rank_pattern) json["rank_pattern"][key] = r;
  json["target_modules"] =
      config.target_pattern.empty() ? ordered_json(config.target_modules) : ordered_json(config.target_pattern);
  json["task_type"] = "CAUSAL_LM";
  json["use_dora"] = false;
  json["use_rslora"] = config.use_rslora;
  return json.dump(2) + "\n";
}

}  // namespace

void check_adapter_config(const AdapterConfig& config) {
  const auto check_rank = [](const std::string& name, std::int64_t r) {
    require(r >= 1 && r <= kMaxRank, "adapter config: {}: expected an integer from 1 to {}, got {}", name, kMaxRank, r);
  };
  const auto check_alpha = [](const std::string& name, double alpha) {
    require(std::abs(alpha) <= kMaxAlpha, "adapter config: {}: expected a number from -1e9 to 1e9, got {}", name,
            alpha);
  };
  check_rank("r", config.r);
  check_alpha("lora_alpha", config.lora_alpha);
  require(config.lora_dropout >= 0 && config.lora_dropout <= 1,
          "adapter config: lora_dropout: expected a number from 0 to 1, got {}", config.lora_dropout);
  require(config.target_pattern.empty() != config.target_modules.empty(),
          "adapter config: target_modules: expected either a list of modules or a pattern");
  for (const std::string& target : config.target_modules)
    require(!target.empty(), "adapter config: target_modules: expected no empty names");
  for (const auto& [key, r] : config.rank_pattern) check_rank("rank_pattern." + key, r);
  for (const auto& [key, alpha] : config.alpha_pattern) check_alpha("alpha_pattern." + key, alpha);
  if (!config.target_pattern.empty())
    detail::compile_module_pattern("adapter config: target_modules", config.target_pattern);
  const RankResolver compiles(config);
}

std::vector<AdapterTarget> resolve_targets(const AdapterConfig& config, std::span<const std::string> linear_modules) {
  check_adapter_config(config);
  const RankResolver resolve(config);
  std::vector<AdapterTarget> targets;
  const auto collect = [&](const auto& is_target) {
    for (const std::string& module : linear_modules) {
      if (is_target(module)) targets.push_back(resolve(module));
    }
  };
  if (is_all_linear(config.target_pattern)) {
    collect([](const std::string& module) { return !names_module("lm_head", module); });
  } else if (!config.target_pattern.empty()) {
    const std::regex pattern = detail::compile_module_pattern("adapter config: target_modules", config.target_pattern);
    collect([&](const std::string& module) { return std::regex_match(module, pattern); });
  } else {
    std::vector<bool> matched(config.target_modules.size());
    collect([&](const std::string& module) {
      bool any = false;
      for (std::size_t i = 0; i < matched.size(); ++i) {
        if (!names_module(config.target_modules[i], module)) continue;
        matched[i] = any = true;
      }
      return any;
    });
    for (std::size_t i = 0; i < matched.size(); ++i) {
      require(matched[i], "adapter config: target_modules: no linear layer of the model matches {}",
              quote(config.target_modules[i]));
    }
  }
  require(!targets.empty(), "adapter config: target_modules: no linear layer of the model matches {}",
          quote(config.target_pattern));
  return targets;
}

AdapterConfig read_adapter_config(const std::filesystem::path& directory) {
  const auto path = directory / kConfigFile;
  const auto text = detail::read_json_object<ordered_json>(path, kMaxConfigBytes);
  const JsonObject json(path, text);
  if (json.string("peft_type") != "LORA")
    json.refuse("peft_type", fmt::format("{} is not supported", describe(json.at("peft_type"))));
  refuse_unsupported(json);

  AdapterConfig config;
  config.r = json.integer("r", 1, kMaxRank);
  config.lora_alpha = json.number("lora_alpha", -kMaxAlpha, kMaxAlpha);
  config.use_rslora = json.boolean("use_rslora", false);
  if (json.has("lora_dropout")) config.lora_dropout = json.number("lora_dropout", 0, 1);
  if (json.has("base_model_name_or_path")) config.base_model_name_or_path = json.string("base_model_name_or_path");
  read_targets(json, config);
  const auto read_patterns = [&](const char* name, auto& patterns, const auto& read) {
    if (!json.has(name)) return;
    const JsonObject object = json.object(name);
    if (object.members().size() > kMaxPatterns)
      json.fail(name, fmt::format("expected at most {} entries", kMaxPatterns));
    for (const auto& [key, value] : object.members().items()) patterns.emplace_back(key, read(object, key));
  };
  read_patterns("rank_pattern", config.rank_pattern,
                [](const JsonObject& o, const std::string& key) { return o.integer(key, 1, kMaxRank); });
  read_patterns("alpha_pattern", config.alpha_pattern,
                [](const JsonObject& o, const std::string& key) { return o.number(key, -kMaxAlpha, kMaxAlpha); });
  try {
    check_adapter_config(config);
  } catch (const Error& error) {
    fail_format(path, error.what());
  }
  return config;
}

void write_adapter(const std::filesystem::path& directory, const AdapterConfig& config,
                   std::span<const AdapterFactors> factors, StreamRef stream) {
  check_adapter_config(config);
  const RankResolver resolve(config);
  std::vector<NamedTensor> tensors;
  for (const AdapterFactors& f : factors) {
    const std::int64_t r = resolve(f.module).r;
    const auto check = [&](const char* name, const Tensor& tensor, int rank_dim) {
      require(tensor.defined() && tensor.rank() == 2 && tensor.size(rank_dim) == r,
              "write_adapter: expected {} of {} with rank {}, got shape {}", name, f.module, r, tensor.shape());
    };
    check("lora_A", f.lora_a, 0);
    check("lora_B", f.lora_b, 1);
    tensors.push_back({key_of(f.module, kKeySuffixA), f.lora_a});
    tensors.push_back({key_of(f.module, kKeySuffixB), f.lora_b});
  }
  make_directories(directory);
  write_safetensors(directory / kWeightsFile, tensors, {{"format", "pt"}}, stream);
  write_text_file(directory / kConfigFile, config_text(config));
}

AdapterFiles::AdapterFiles(const std::filesystem::path& directory)
    : config_(read_adapter_config(directory)), file_(directory / kWeightsFile) {
  std::set<std::string> modules;
  for (const TensorInfo& tensor : file_.tensors()) {
    const std::string_view key = tensor.name;
    const bool fits = key.size() > kKeyPrefix.size() + kKeySuffixA.size() && key.starts_with(kKeyPrefix) &&
                      (key.ends_with(kKeySuffixA) || key.ends_with(kKeySuffixB));
    if (!fits) {
      fail_format(file_.path(), fmt::format("unexpected key {}: expected {}MODULE{} or {}", quote(key), kKeyPrefix,
                                            kKeySuffixA, kKeySuffixB));
    }
    modules.emplace(key.substr(kKeyPrefix.size(), key.size() - kKeyPrefix.size() - kKeySuffixA.size()));
  }
  modules_.assign(modules.begin(), modules.end());
}

std::vector<AdapterTarget> AdapterFiles::match(std::span<const LinearShape> linears) const {
  std::vector<std::string> names;
  std::unordered_map<std::string_view, const LinearShape*> shapes;
  for (const LinearShape& linear : linears) {
    names.push_back(linear.module);
    shapes.emplace(linear.module, &linear);
  }
  const auto key_in_file = [&](const std::string& module) {
    const std::string a = key_of(module, kKeySuffixA);
    return quote(file_.find(a) != nullptr ? a : key_of(module, kKeySuffixB));
  };
  for (const std::string& module : modules_) {
    if (!shapes.contains(module))
      fail_format(file_.path(), fmt::format("key {} matches no linear layer of the model", key_in_file(module)));
  }

  std::vector<AdapterTarget> targets;
  try {
    targets = resolve_targets(config_, names);
  } catch (const Error& error) {
    fail_format(file_.path().parent_path() / kConfigFile, error.what());
  }
  std::set<std::string_view> targeted;
  for (const AdapterTarget& target : targets) {
    targeted.insert(target.module);
    const auto check = [&](std::string_view suffix, std::int64_t rows, std::int64_t columns) {
      const std::string key = key_of(target.module, suffix);
      const TensorInfo* info = file_.find(key);
      if (info == nullptr) fail_format(file_.path(), fmt::format("key {} is missing", quote(key)));
      if (info->shape != std::vector{rows, columns}) {
        fail_format(file_.path(), fmt::format("key {}: expected shape [{}, {}], got [{}]", quote(key), rows, columns,
                                              fmt::join(info->shape, ", ")));
      }
      const auto dtype = info->tensor_dtype();
      if (!dtype || !is_floating(*dtype)) {
        detail::fail(ErrorKind::kUnsupported, "{}: key {}: factors of dtype {} are not supported",
                     file_.path().string(), quote(key), info->dtype);
      }
    };
    const LinearShape& linear = *shapes.at(target.module);
    check(kKeySuffixA, target.r, linear.in_features);
    check(kKeySuffixB, linear.out_features, target.r);
  }
  for (const std::string& module : modules_) {
    if (!targeted.contains(module)) {
      fail_format(file_.path(), fmt::format("key {} is left over: target_modules of {} does not name its module",
                                            key_in_file(module), kConfigFile));
    }
  }
  return targets;
}

AdapterFiles::Keys AdapterFiles::keys_of(const std::string& module) {
  return {key_of(module, kKeySuffixA), key_of(module, kKeySuffixB)};
}

void AdapterFiles::load_into(const std::string& module, const Tensor& lora_a, const Tensor& lora_b,
                             StreamRef stream) const {
  file_.load_into(key_of(module, kKeySuffixA), lora_a, stream);
  file_.load_into(key_of(module, kKeySuffixB), lora_b, stream);
}

}  // namespace rowan
