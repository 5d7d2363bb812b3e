// The weights of a Hugging Face model directory: one safetensors file, or shards with an index.
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rowan/io/model_config.h"
#include "rowan/io/safetensors.h"

namespace rowan {

/// All tensors of a directory under one roof. Opens DIRECTORY/model.safetensors, or else every shard that
/// DIRECTORY/model.safetensors.index.json names. Const members may be called from several threads.
class ModelFiles {
 public:
  /// Throws Io when a file cannot be read; Format for a malformed file or index, for a shard name that is not a plain
  /// file name (a path could lead out of the directory), and where index and shards do not hold the same tensors,
  /// naming the first.
  explicit ModelFiles(const std::filesystem::path& directory);

  const std::filesystem::path& directory() const noexcept { return directory_; }
  /// The index that names the shards; empty where there is one file without an index.
  const std::filesystem::path& index() const noexcept { return index_; }
  const std::vector<SafetensorsFile>& files() const noexcept { return files_; }
  /// Names of all tensors, sorted.
  std::vector<std::string> names() const;
  /// Null when there is no tensor of that name.
  const TensorInfo* find(std::string_view name) const noexcept;
  /// Throws Format naming directory and tensor when there is none.
  const TensorInfo& at(std::string_view name) const;

  /// As the members of SafetensorsFile.
  Tensor load(std::string_view name, StreamRef stream) const;
  Tensor load(std::string_view name, DType dtype, StreamRef stream) const;
  void load_into(std::string_view name, const Tensor& dst, StreamRef stream) const;

 private:
  void open_index(const std::filesystem::path& path);
  const SafetensorsFile& file_of(std::string_view name) const;

  std::filesystem::path directory_, index_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t, std::less<>> file_index_;  // tensor -> place in files_
};

/// Makes the directory where needed and writes model.safetensors and config.json, each atomically, the weights first.
/// Leave a tied lm_head out. Throws as write_safetensors and write_model_config.
void save_model_directory(const std::filesystem::path& directory, const ModelConfig& config,
                          std::span<const NamedTensor> tensors, StreamRef stream);

}  // namespace rowan
