#include "rowan/io/token_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>

#include "io/input_file.h"
#include "io/json.h"
#include "rowan/io/atomic_file.h"

namespace rowan {

namespace {

constexpr std::int64_t kMaxFileBytes = std::int64_t{4} << 30;
constexpr std::int64_t kIgnored = -100;

/// One line of the file; `where` is "FILE:LINE".
TokenRow parse_row(const std::string& where, std::string_view line) {
  detail::JsonScanner(where).scan(line);  // strict: duplicate keys, depth
  const auto json = nlohmann::ordered_json::parse(line);
  if (!json.is_object()) detail::fail_format(where, "expected an object, got " + detail::describe(json));
  TokenRow row;
  for (const auto& [name, values] : json.items()) {
    if (name != "input_ids" && name != "labels")
      detail::fail_format(where, "member " + detail::quote(name) + " is not input_ids or labels");
    if (!values.is_array()) detail::fail_format(where, name + ": expected an array, got " + detail::describe(values));
    for (const auto& value : values) {
      const bool integer = value.is_number_integer();
      const std::int64_t id = integer ? value.get<std::int64_t>() : -1;
      const bool ignored = integer && name == "labels" && id == kIgnored;
      if (!ignored && (id < 0 || id > std::numeric_limits<std::int32_t>::max())) {
        detail::fail_format(where, name + ": expected token ids, got " + detail::describe(value));
      }
      if (name == "labels") {
        row.labels.push_back(id);
      } else {
        row.input_ids.push_back(static_cast<std::int32_t>(id));
      }
    }
  }
  if (!json.contains("input_ids")) detail::fail_format(where, "input_ids is missing");
  if (!json.contains("labels")) row.labels.assign(row.input_ids.begin(), row.input_ids.end());
  if (row.labels.size() != row.input_ids.size()) {
    detail::fail_format(
        where, fmt::format("labels: expected {} as input_ids, got {}", row.input_ids.size(), row.labels.size()));
  }
  return row;
}

}  // namespace

std::vector<TokenRow> read_token_rows(const std::filesystem::path& path) {
  const std::string text = read_text_file(path, kMaxFileBytes);
  std::vector<TokenRow> rows;
  std::int64_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string_view line(text.data() + begin, end - begin);
    begin = end + 1;
    ++number;
    if (line.find_first_not_of(" \t\r") != std::string_view::npos)
      rows.push_back(parse_row(fmt::format("{}:{}", path.string(), number), line));
  }
  return rows;
}

void write_token_rows(const std::filesystem::path& path, std::span<const TokenRow> rows) {
  std::string text;
  for (const TokenRow& row : rows) {
    const nlohmann::ordered_json line = {{"input_ids", row.input_ids}, {"labels", row.labels}};
    text += line.dump() + "\n";
  }
  write_text_file(path, text);
}

}  // namespace rowan
