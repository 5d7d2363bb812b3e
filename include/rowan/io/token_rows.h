// Data sets of token ids: JSON Lines of {"input_ids": […], "labels": […]}.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

namespace rowan {

/// One sequence as Transformers takes it: labels[i] is the token at i itself (models shift inside), -100 where it
/// counts for nothing.
struct TokenRow {
  std::vector<std::int32_t> input_ids;
  std::vector<std::int64_t> labels;  ///< as many as input_ids
};

/// Reads a file line by line; blank lines are passed over, and without "labels" every token is its own label. Throws Io
/// when the file cannot be read; Format naming file and line for malformed JSON, another member, a value that is no
/// token id, or unequal lengths.
std::vector<TokenRow> read_token_rows(const std::filesystem::path& path);

/// Writes rows in that form, atomically.
void write_token_rows(const std::filesystem::path& path, std::span<const TokenRow> rows);

}  // namespace rowan
