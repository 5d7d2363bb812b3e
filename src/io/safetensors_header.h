// The header of a safetensors file: checking it, and writing one. Works on bytes, so that it can be tested without
// files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rowan/io/safetensors.h"

namespace rowan::detail {

constexpr std::int64_t kMaxHeaderBytes = 100'000'000;
constexpr int kHeaderLengthBytes = 8;

/// Bytes of one element of a dtype as the format spells it; 0 for a dtype that is not accepted.
std::int64_t safetensors_element_bytes(std::string_view dtype) noexcept;

/// The header's length from the first bytes of a file (fewer than 8 only where the file is that short). Throws Format.
std::int64_t safetensors_header_length(std::string_view first_bytes, std::int64_t file_bytes,
                                       const std::filesystem::path& path);

struct SafetensorsHeader {
  std::map<std::string, std::string> metadata;
  std::vector<TensorInfo> tensors;  // sorted by name
};

/// Checks a header's JSON against the rules that SafetensorsFile documents. Throws Format.
SafetensorsHeader parse_safetensors_header(std::string_view json, std::int64_t file_bytes,
                                           const std::filesystem::path& path);

/// " (it looks like …)" for content that is plainly something else, or an empty string.
std::string describe_content(std::string_view first_bytes);

/// The padded JSON of a header, and which tensor comes at each place in the file (the reference's order).
struct SafetensorsLayout {
  std::string header;
  std::vector<std::size_t> order;
};
/// Throws InvalidArgument for names that a reader would reject.
SafetensorsLayout make_safetensors_layout(std::span<const NamedTensor> tensors,
                                          const std::map<std::string, std::string>& metadata,
                                          const std::filesystem::path& path);

}  // namespace rowan::detail
