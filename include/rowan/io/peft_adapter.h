// LoRA adapters on disk as Hugging Face PEFT keeps them: adapter_config.json and adapter_model.safetensors.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "rowan/core/tensor.h"
#include "rowan/io/safetensors.h"

namespace rowan {

/// The members of adapter_config.json that this library acts on, under PEFT's names.
struct AdapterConfig {
  std::int64_t r = 8;
  double lora_alpha = 16;
  bool use_rslora = false;  ///< scale alpha / sqrt(r) instead of alpha / r
  double lora_dropout = 0;
  /// Suffixes ("q_proj", "self_attn.q_proj") or full module paths.
  std::vector<std::string> target_modules;
  /// Used instead of target_modules when not empty: "all-linear" (every linear layer but lm_head) or a regular
  /// expression that a whole module path must match.
  std::string target_pattern;
  /// Other ranks and alphas for modules whose path matches `(.*\.)?(key)$`, key a regular expression; the first that
  /// matches counts.
  std::vector<std::pair<std::string, std::int64_t>> rank_pattern;
  std::vector<std::pair<std::string, double>> alpha_pattern;
  std::string base_model_name_or_path;
};

/// A module that an adapter sits on.
struct AdapterTarget {
  std::string module;
  std::int64_t r = 0;
  double alpha = 0;
  double scale = 0;  ///< of B A: alpha / r, or alpha / sqrt(r)
};

/// A linear layer of a model.
struct LinearShape {
  std::string module;  ///< its path, for example "model.layers.0.self_attn.q_proj"
  std::int64_t in_features = 0;
  std::int64_t out_features = 0;
};

/// The factors of one module: lora_a [r, in_features], lora_b [out_features, r].
struct AdapterFactors {
  std::string module;
  Tensor lora_a;
  Tensor lora_b;
};

/// Throws InvalidArgument naming the first field that is out of range, and a pattern that is no regular expression.
/// Patterns are Python's; what C++ would read in another way (named groups, look-behind, inline flags, back references,
/// \A and \Z) is refused.
void check_adapter_config(const AdapterConfig& config);

/// Which of a model's linear layers the config names, in the order given, each with its rank and scale. Throws
/// InvalidArgument as check_adapter_config, and naming the first entry of target_modules (or the pattern) that no
/// module matches.
std::vector<AdapterTarget> resolve_targets(const AdapterConfig& config, std::span<const std::string> linear_modules);

/// Reads DIRECTORY/adapter_config.json. Throws Io when it cannot be read; Format naming the member that is missing
/// (peft_type, r, lora_alpha, target_modules), malformed or out of range; Unsupported naming a feature that is on and
/// not supported (use_dora, lora_bias, modules_to_save, bias, layers_to_transform, …, also one that this version has
/// never heard of).
AdapterConfig read_adapter_config(const std::filesystem::path& directory);

/// Makes the directory where needed and writes adapter_model.safetensors and adapter_config.json, each atomically, the
/// config last. Throws InvalidArgument when a module is given twice, or where the factors' shapes do not fit each other
/// and the config's rank for that module; otherwise as write_safetensors.
void write_adapter(const std::filesystem::path& directory, const AdapterConfig& config,
                   std::span<const AdapterFactors> factors, StreamRef stream);

/// An adapter directory opened for reading.
class AdapterFiles {
 public:
  /// Throws as read_adapter_config and SafetensorsFile; Format naming the first key that is not
  /// `base_model.model.` + module path + `.lora_A.weight` or `.lora_B.weight`.
  explicit AdapterFiles(const std::filesystem::path& directory);

  /// Names of a module's factors in the file.
  struct Keys {
    std::string lora_a, lora_b;
  };
  static Keys keys_of(const std::string& module);

  const AdapterConfig& config() const noexcept { return config_; }
  const SafetensorsFile& file() const noexcept { return file_; }
  /// Module paths that the file holds factors for, sorted.
  const std::vector<std::string>& modules() const noexcept { return modules_; }

  /// Holds the adapter against a model and returns what it sits on, in the order of `linears`. Throws Format naming the
  /// first key of the file that belongs to no linear layer of the model, that the config does not target, that is
  /// missing, or that has another shape than the model and the config ask for; Unsupported naming a key whose dtype is
  /// not a floating one that a Tensor can hold.
  std::vector<AdapterTarget> match(std::span<const LinearShape> linears) const;

  /// Overwrites the factors of one module, as SafetensorsFile::load_into.
  void load_into(const std::string& module, const Tensor& lora_a, const Tensor& lora_b, StreamRef stream) const;

 private:
  AdapterConfig config_;
  SafetensorsFile file_;
  std::vector<std::string> modules_;
};

}  // namespace rowan
