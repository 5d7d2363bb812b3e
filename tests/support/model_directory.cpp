#include "support/model_directory.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

namespace rowan::test {

std::vector<NamedTensor> load_all(const std::filesystem::path& file, DType dtype) {
  const SafetensorsFile source(file);
  std::vector<NamedTensor> tensors;
  for (const TensorInfo& info : source.tensors())
    tensors.push_back({info.name, source.load(info.name, dtype, StreamRef())});
  return tensors;
}

void write_model(const std::filesystem::path& directory, const std::string& family,
                 const std::vector<NamedTensor>& tensors, int shards) {
  std::filesystem::create_directories(directory);
  std::filesystem::copy_file(data_path("models") / family / "config.json", directory / "config.json",
                             std::filesystem::copy_options::overwrite_existing);
  if (shards == 1) {
    write_safetensors(directory / "model.safetensors", tensors, {{"format", "pt"}}, StreamRef());
    return;
  }
  nlohmann::ordered_json map;
  for (int i = 0; i < shards; ++i) {
    const std::string name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards);
    std::vector<NamedTensor> part;
    for (std::size_t t = static_cast<std::size_t>(i); t < tensors.size(); t += static_cast<std::size_t>(shards)) {
      part.push_back(tensors[t]);
      map[tensors[t].name] = name;
    }
    write_safetensors(directory / name, part, {{"format", "pt"}}, StreamRef());
  }
  write_file(directory / "model.safetensors.index.json",
             nlohmann::ordered_json{{"metadata", {{"total_size", 0}}}, {"weight_map", map}}.dump(2));
}

void write_adapter_files(const std::filesystem::path& directory, const std::string& json,
                         const std::vector<NamedTensor>& tensors) {
  std::filesystem::create_directories(directory);
  write_file(directory / "adapter_config.json", json);
  write_safetensors(directory / "adapter_model.safetensors", tensors, {{"format", "pt"}}, StreamRef());
}

}  // namespace rowan::test
