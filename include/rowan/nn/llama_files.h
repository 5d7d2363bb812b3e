// Models of the Llama family to and from Hugging Face directories, and their LoRA factors to and from PEFT directories.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "rowan/io/model_files.h"
#include "rowan/io/peft_adapter.h"
#include "rowan/nn/llama.h"

namespace rowan {

/// A weight of a base model.
struct BaseWeight {
  std::string name;
  Shape shape;
};

/// Every base weight of a model, under the names of Transformers' checkpoints.
std::vector<BaseWeight> base_weights(const ModelConfig& config);

/// Holds a directory's tensors against a configuration; reads headers only. Throws Format naming the first tensor that
/// is missing, of another shape, or of no use to the model (a tied lm_head and rotary buffers of old checkpoints are
/// passed over), Unsupported naming the first whose dtype is not a floating one that a Tensor can hold.
void check_base(const ModelFiles& files, const ModelConfig& config);

/// Fills every base weight from the directory's tensors, each rounded to the model's dtype at most once and read
/// through one small host buffer. Throws as check_base, before anything is written; Io when reading fails.
void load_base(LlamaModel& model, const ModelFiles& files, StreamRef stream);

/// Writes config.json and model.safetensors with the model's base weights in its dtype, each file atomically, the weights first.
void save_base(const std::filesystem::path& directory, const LlamaModel& model, StreamRef stream);

/// What LlamaOptions::lora should be for an adapter configuration. Throws as resolve_targets.
std::function<std::optional<LoraConfig>(const std::string&)> lora_for(const AdapterConfig& config,
                                                                      const ModelConfig& model);

/// Fills every LoRA factor. Throws as AdapterFiles::match, before anything is written. The model was made with
/// lora_for(files.config()).
void load_adapter(LlamaModel& model, const AdapterFiles& files, StreamRef stream);

/// Writes the model's LoRA factors, in float32 whatever the model's dtype, as a PEFT directory, each file atomically, the weights
/// first.
void save_adapter(const std::filesystem::path& directory, const LlamaModel& model, const AdapterConfig& config,
                  StreamRef stream);

/// The linear layers that LoRA can sit on, with their sizes, in order.
std::vector<LinearShape> linear_shapes(const ModelConfig& config);

}  // namespace rowan
