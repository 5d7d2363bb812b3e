// Reference data: tests/data/goldens, and the folder named by the environment variable ROWAN_GOLDENS with the same
// sub-folders.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "rowan/io/safetensors.h"

namespace rowan::test {

/// One reference file: tensors and the parameters in its metadata.
class Golden {
 public:
  explicit Golden(const std::filesystem::path& path) : file_(path) {}

  /// The file's path, for CAPTURE.
  std::string name() const { return file_.path().string(); }
  bool has(const std::string& tensor) const { return file_.find(tensor) != nullptr; }
  /// A tensor as stored, on the stream's device.
  Tensor tensor(const std::string& name, StreamRef stream = {}) const { return file_.load(name, stream); }
  /// Its elements as double.
  std::vector<double> values(const std::string& name) const;

  /// A parameter of the metadata; `missing` where it has none.
  std::string text(const std::string& key, const std::string& missing = "") const;
  double number(const std::string& key, double missing) const;
  /// "True" and "False" as Python writes them.
  bool flag(const std::string& key, bool missing) const;

 private:
  SafetensorsFile file_;
};

/// Every *.safetensors below the sub-folder `family` of both places, sorted.
std::vector<std::filesystem::path> golden_files(const std::string& family);

}  // namespace rowan::test
