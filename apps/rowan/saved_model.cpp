#include "saved_model.h"

#include "exit_code.h"
#include "options.h"
#include "rowan/nn/llama_files.h"

namespace rowan::app {

SavedModel::SavedModel(const std::string& directory, const std::string& adapter, const std::string& dtype)
    : config_(reading_input([&] { return read_model_config(directory); })) {
  options_.dtype =
      dtype.empty() ? config_.dtype : parse_dtype(dtype, {DType::kFloat32, DType::kBFloat16, DType::kFloat16});
  reading_input([&] {
    files_.emplace(directory);
    check_base(*files_, config_);
    if (adapter.empty()) return;
    adapter_.emplace(adapter);
    static_cast<void>(adapter_->match(linear_shapes(config_)));
    options_.lora = lora_for(adapter_->config(), config_);
  });
}

LlamaModel SavedModel::load(StreamRef stream) const {
  LlamaModel model(config_, options_, stream);
  reading_input([&] {
    load_base(model, *files_, stream);
    if (adapter_) load_adapter(model, *adapter_, stream);
  });
  return model;
}

}  // namespace rowan::app
