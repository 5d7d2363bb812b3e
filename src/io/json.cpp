#include "io/json.h"

#include <fmt/format.h>

#include <algorithm>

#include "io/input_file.h"
#include "rowan/io/atomic_file.h"

namespace rowan::detail {

namespace {

constexpr int kMaxDepth = 128;
constexpr std::size_t kMaxOpenKeys = 1u << 18;  // bounds the memory of the duplicate check

}  // namespace

std::string quote(std::string_view text) {
  constexpr std::size_t kShown = 80;
  const bool cut = text.size() > kShown;
  const nlohmann::json value = std::string(text.substr(0, kShown)) + (cut ? "..." : "");
  return value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

void JsonScanner::scan(std::string_view text) {
  // nlohmann-json skips a byte order mark and takes a NUL for the end of the text.
  if (text.starts_with("\xEF\xBB\xBF")) fail("JSON starts with a byte order mark");
  if (const auto nul = text.find('\0'); nul != text.npos) fail(fmt::format("JSON holds a NUL byte at {}", nul));
  nlohmann::json::sax_parse(text.begin(), text.end(), this);
}

bool JsonScanner::key(string_t& name) {
  if (++keys_ > kMaxOpenKeys) fail(fmt::format("JSON objects hold more than {} keys", kMaxOpenKeys));
  if (!open_objects_.back().insert(name).second) fail(fmt::format("duplicate key {}", quote(name)));
  return true;
}

void JsonScanner::enter() {
  if (++depth_ > kMaxDepth) fail(fmt::format("JSON is more than {} levels deep", kMaxDepth));
}

bool JsonScanner::start_object(std::size_t) {
  enter();
  open_objects_.emplace_back();
  return true;
}

bool JsonScanner::end_object() {
  --depth_;
  keys_ -= open_objects_.back().size();
  open_objects_.pop_back();
  return true;
}

bool JsonScanner::start_array(std::size_t) {
  enter();
  return true;
}

bool JsonScanner::end_array() {
  --depth_;
  return true;
}

bool JsonScanner::parse_error(std::size_t position, const std::string&, const nlohmann::json::exception& error) {
  // "[json.exception.parse_error.101] parse error at line 1, column 5: syntax error while …; last read: '…'": keep the
  // middle.
  std::string_view cause = error.what();
  if (const auto end = cause.find("] "); end != cause.npos) cause.remove_prefix(end + 2);
  if (const auto start = cause.find(": "); start != cause.npos) cause.remove_prefix(start + 2);
  cause = cause.substr(0, std::min<std::size_t>(cause.find("last read:"), 160));
  while (cause.ends_with(' ') || cause.ends_with(';') || cause.ends_with('-')) cause.remove_suffix(1);
  fail(fmt::format("malformed JSON at byte {}: {}", position, cause));
}

void JsonScanner::fail(const std::string& cause) const { fail_format(source_, cause); }

nlohmann::json read_json_object(const std::filesystem::path& path, std::int64_t max_bytes) {
  const std::string text = read_text_file(path, max_bytes);
  JsonScanner(path).scan(text);
  nlohmann::json value = nlohmann::json::parse(text);
  if (!value.is_object()) fail_format(path, fmt::format("expected a JSON object, got {}", value.type_name()));
  return value;
}

}  // namespace rowan::detail
