// One row of token ids, for the readers of data sets.
#pragma once

#include <string>

#include "io/json.h"
#include "rowan/io/token_rows.h"

namespace rowan::detail {

inline constexpr std::int64_t kMaxDatasetBytes = std::int64_t{4} << 30;

/// A line of JSON, strictly; `where` is "FILE:LINE".
nlohmann::ordered_json parse_line(const std::string& where, std::string_view line);
/// {"input_ids", "labels"}.
TokenRow parse_token_row(const std::string& where, const nlohmann::ordered_json& json);

/// Calls f(line, number) for every line that is not blank, in order.
template <class F>
void for_lines(std::string_view text, F&& f) {
  std::int64_t number = 0;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    ++number;
    if (line.find_first_not_of(" \t\r") != line.npos) f(line, number);
  }
}

}  // namespace rowan::detail
