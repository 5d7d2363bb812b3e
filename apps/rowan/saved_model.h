// A model on disk, with or without an adapter, checked before it takes memory.
#pragma once

#include <optional>
#include <string>

#include "rowan/io/model_files.h"
#include "rowan/io/peft_adapter.h"
#include "rowan/nn/llama.h"

namespace rowan::app {

class SavedModel {
 public:
  /// `adapter` is empty for the base alone, `dtype` for that of the model's configuration. Reads headers and
  /// configurations only; what does not fit is bad data, a wrong dtype a wrong option.
  SavedModel(const std::string& directory, const std::string& adapter, const std::string& dtype);

  const ModelConfig& config() const noexcept { return config_; }
  DType dtype() const noexcept { return options_.dtype; }
  LlamaModel load(StreamRef stream) const;

 private:
  ModelConfig config_;
  LlamaOptions options_;
  std::optional<ModelFiles> files_;
  std::optional<AdapterFiles> adapter_;
};

}  // namespace rowan::app
