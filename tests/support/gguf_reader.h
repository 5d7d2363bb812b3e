// Reads GGUF files byte by byte, as ggml's documentation describes them; shares nothing with the writer.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace rowan::test {

struct GgufFile {
  struct TensorEntry {
    std::vector<std::uint64_t> extents;  ///< in the file's order, the fastest first
    std::uint32_t type = 0;              ///< 0 float32, 1 float16
    std::uint64_t offset = 0;            ///< of its data, from the start of the file
    std::vector<double> values;
  };

  std::uint32_t version = 0;
  std::map<std::string, std::string> texts;
  std::map<std::string, std::uint32_t> numbers;
  std::map<std::string, float> reals;
  std::map<std::string, TensorEntry> tensors;

  /// Throws std::runtime_error for what is no sound file.
  explicit GgufFile(const std::filesystem::path& path);
};

}  // namespace rowan::test
