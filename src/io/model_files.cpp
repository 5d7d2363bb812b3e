#include "rowan/io/model_files.h"

#include "core/check.h"
#include "io/input_file.h"
#include "io/json.h"
#include "rowan/io/atomic_file.h"

namespace rowan {

namespace {

using detail::fail;
using detail::fail_format;
using detail::quote;

constexpr std::int64_t kMaxIndexBytes = std::int64_t{64} << 20;
constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find_first_of(std::string_view("/\\\0", 3)) == name.npos;
}

}  // namespace

ModelFiles::ModelFiles(const std::filesystem::path& directory) : directory_(directory) {
  std::error_code ignored;
  if (std::filesystem::exists(directory / kWeights, ignored)) {
    files_.emplace_back(directory / kWeights);
    for (const TensorInfo& tensor : files_[0].tensors()) file_index_.emplace(tensor.name, 0);
  } else if (std::filesystem::exists(directory / kIndex, ignored)) {
    open_index(directory / kIndex);
  } else {
    const bool torch = std::filesystem::exists(directory / "pytorch_model.bin", ignored) ||
                       std::filesystem::exists(directory / "pytorch_model.bin.index.json", ignored);
    fail(ErrorKind::kIo, "{}: expected {} or {} in this directory{}", directory.string(), kWeights, kIndex,
         torch ? " (pytorch_model.bin is not read: it can be saved again as safetensors)" : "");
  }
}

void ModelFiles::open_index(const std::filesystem::path& path) {
  index_ = path;
  const auto index = detail::read_json_object(path, kMaxIndexBytes);
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object()) fail_format(path, "weight_map: expected an object");
  std::map<std::string, std::size_t> shards;
  for (const auto& [tensor, value] : map->items()) {
    const auto refuse = [&, &name = tensor](const char* why) {  // clang 14 cannot capture a structured binding
      fail_format(path, fmt::format("weight_map: {}: {}", quote(name), why));
    };
    if (!value.is_string()) refuse("expected a file name");
    const auto& shard = value.get_ref<const std::string&>();
    if (!is_plain_file_name(shard)) refuse("its shard is not a plain file name, and could lead out of the directory");
    const auto [place, is_new] = shards.emplace(shard, files_.size());
    if (is_new) files_.emplace_back(directory_ / shard);
    if (files_[place->second].find(tensor) == nullptr) {
      fail_format(files_[place->second].path(),
                  fmt::format("holds no tensor {}, which {} places there", quote(tensor), kIndex));
    }
    file_index_.emplace(tensor, place->second);
  }
  for (std::size_t i = 0; i < files_.size(); ++i) {
    for (const TensorInfo& tensor : files_[i].tensors()) {
      const auto place = file_index_.find(tensor.name);
      if (place == file_index_.end() || place->second != i) {
        fail_format(files_[i].path(),
                    fmt::format("holds tensor {}, which {} does not place there", quote(tensor.name), kIndex));
      }
    }
  }
}

std::vector<std::string> ModelFiles::names() const {
  std::vector<std::string> names;
  names.reserve(file_index_.size());
  for (const auto& [name, file] : file_index_) names.push_back(name);
  return names;
}

const TensorInfo* ModelFiles::find(std::string_view name) const noexcept {
  const auto place = file_index_.find(name);
  return place == file_index_.end() ? nullptr : files_[place->second].find(name);
}

const TensorInfo& ModelFiles::at(std::string_view name) const { return file_of(name).at(name); }

const SafetensorsFile& ModelFiles::file_of(std::string_view name) const {
  const auto place = file_index_.find(name);
  if (place == file_index_.end()) fail(ErrorKind::kFormat, "{}: holds no tensor {}", directory_.string(), quote(name));
  return files_[place->second];
}

Tensor ModelFiles::load(std::string_view name, StreamRef stream) const { return file_of(name).load(name, stream); }

Tensor ModelFiles::load(std::string_view name, DType dtype, StreamRef stream) const {
  return file_of(name).load(name, dtype, stream);
}

void ModelFiles::load_into(std::string_view name, const Tensor& dst, StreamRef stream) const {
  file_of(name).load_into(name, dst, stream);
}

void save_model_directory(const std::filesystem::path& directory, const ModelConfig& config,
                          std::span<const NamedTensor> tensors, StreamRef stream) {
  check_model_config(config);
  make_directories(directory);
  write_safetensors(directory / kWeights, tensors, {{"format", "pt"}}, stream);
  write_model_config(directory, config);
}

}  // namespace rowan
