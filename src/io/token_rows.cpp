#include "rowan/io/token_rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>

#include "io/input_file.h"
#include "io/token_rows.h"
#include "rowan/io/atomic_file.h"

namespace rowan {

namespace {

constexpr std::int64_t kIgnored = -100;

}  // namespace

nlohmann::ordered_json detail::parse_line(const std::string& where, std::string_view line) {
  JsonScanner(where).scan(line);  // strict: duplicate keys, depth
  auto json = nlohmann::ordered_json::parse(line);
  if (!json.is_object()) fail_format(where, "expected an object, got " + describe(json));
  return json;
}

TokenRow detail::parse_token_row(const std::string& where, const nlohmann::ordered_json& json) {
  TokenRow row;
  for (const auto& [name, values] : json.items()) {
    if (name != "input_ids" && name != "labels")
      fail_format(where, "member " + quote(name) + " is not input_ids or labels");
    if (!values.is_array()) fail_format(where, name + ": expected an array, got " + describe(values));
    for (const auto& value : values) {
      const bool integer = value.is_number_integer();
      const std::int64_t id = integer ? value.get<std::int64_t>() : -1;
      const bool ignored = integer && name == "labels" && id == kIgnored;
      if (!ignored && (id < 0 || id > std::numeric_limits<std::int32_t>::max())) {
        fail_format(where, name + ": expected token ids, got " + describe(value));
      }
      if (name == "labels") {
        row.labels.push_back(id);
      } else {
        row.input_ids.push_back(static_cast<std::int32_t>(id));
      }
    }
  }
  if (!json.contains("input_ids")) fail_format(where, "input_ids is missing");
  if (!json.contains("labels")) row.labels.assign(row.input_ids.begin(), row.input_ids.end());
  if (row.labels.size() != row.input_ids.size()) {
    fail_format(where,
                fmt::format("labels: expected {} as input_ids, got {}", row.input_ids.size(), row.labels.size()));
  }
  return row;
}

std::vector<TokenRow> read_token_rows(const std::filesystem::path& path) {
  const std::string text = read_text_file(path, detail::kMaxDatasetBytes);
  std::vector<TokenRow> rows;
  detail::for_lines(text, [&](std::string_view line, std::int64_t number) {
    const std::string where = fmt::format("{}:{}", path.string(), number);
    rows.push_back(detail::parse_token_row(where, detail::parse_line(where, line)));
  });
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
