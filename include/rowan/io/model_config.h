// What a model of the Llama family is made of, and the config.json that says so.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "rowan/core/dtype.h"
#include "rowan/ops/rotary.h"

namespace rowan {

/// The members of a Transformers config.json that shape a decoder of the Llama family, under their names there where
/// they have one.
struct ModelConfig {
  std::string architecture = "LlamaForCausalLM";  ///< or MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
  std::int64_t vocab_size = 0;
  std::int64_t hidden_size = 0;
  std::int64_t intermediate_size = 0;
  std::int64_t num_hidden_layers = 0;
  std::int64_t num_attention_heads = 0;
  std::int64_t num_key_value_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t max_position_embeddings = 0;
  std::int64_t sliding_window =
      0;  ///< 0: none; otherwise a longer sequence must be refused, since windows are not computed
  double rms_norm_eps = 1e-6;
  double initializer_range = 0.02;
  RotaryConfig rope;      ///< its head_dim is not used: see rotary()
  bool qkv_bias = false;  ///< biases of q, k and v (Qwen2)
  bool qk_norm = false;   ///< an RMSNorm a head on q and k (Qwen3)
  bool tie_word_embeddings = false;
  DType dtype = DType::kFloat32;  ///< that the weights were saved in
  std::optional<std::int64_t> bos_token_id;
  std::optional<std::int64_t> pad_token_id;
  std::vector<std::int64_t> eos_token_ids;

  /// `rope` with this model's head_dim.
  RotaryConfig rotary() const;
};

/// Throws InvalidArgument naming the first field that is out of range or does not fit the others, and an unknown
/// architecture.
void check_model_config(const ModelConfig& config);

/// Reads DIRECTORY/config.json. Rotary parameters may stand in rope_theta, rope_scaling or rope_parameters, the dtype
/// in dtype or torch_dtype; eos_token_id may be a list. A missing head_dim is hidden_size / num_attention_heads and a
/// missing num_key_value_heads num_attention_heads, both for the architectures where Transformers does so. Throws Io
/// when the file cannot be read; Format naming the member that is missing, malformed or out of range; Unsupported
/// naming what this library does not compute: other architectures, quantized weights, mlp_bias, biases on o_proj,
/// activations other than silu, attention dropout, other rotary types.
ModelConfig read_model_config(const std::filesystem::path& directory);

/// Writes DIRECTORY/config.json as Transformers does (versions 4 and 5 read it), atomically. Throws as
/// check_model_config, and Io.
void write_model_config(const std::filesystem::path& directory, const ModelConfig& config);

}  // namespace rowan
