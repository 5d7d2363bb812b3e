#include "io/json.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "io/input_file.h"
#include "rowan/io/atomic_file.h"

namespace rowan::detail {

namespace {

constexpr int kMaxDepth = 128;
constexpr std::size_t kMaxOpenKeys = 1u << 20;  // bounds the memory of the duplicate check; a vocabulary is one object

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
  last_key_ = name;
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
  const std::string where = last_key_.empty() ? "" : fmt::format(" (behind key {})", quote(last_key_));
  fail(fmt::format("malformed JSON at byte {}{}: {}", position, where, cause));
}

void JsonScanner::fail(const std::string& cause) const { fail_format(source_, cause); }

template <class Json>
Json read_json_object(const std::filesystem::path& path, std::int64_t max_bytes) {
  const std::string text = read_text_file(path, max_bytes);
  JsonScanner(path).scan(text);
  Json value = Json::parse(text);
  if (!value.is_object()) fail_format(path, fmt::format("expected a JSON object, got {}", value.type_name()));
  return value;
}
template nlohmann::json read_json_object(const std::filesystem::path&, std::int64_t);
template nlohmann::ordered_json read_json_object(const std::filesystem::path&, std::int64_t);

std::string describe(const nlohmann::ordered_json& value) {
  if (value.is_string()) return quote(value.get_ref<const std::string&>());
  return value.is_structured() ? fmt::format("an {}", value.type_name()) : value.dump();
}

const nlohmann::ordered_json* JsonObject::find(const std::string& name) const {
  const auto place = object_.find(name);
  return place == object_.end() || place->is_null() ? nullptr : &*place;
}

const nlohmann::ordered_json& JsonObject::at(const std::string& name) const {
  const auto* value = find(name);
  if (value == nullptr) fail(name, "it is missing");
  return *value;
}

std::int64_t JsonObject::integer(const std::string& name, std::int64_t min, std::int64_t max) const {
  const auto& value = at(name);
  const bool fits = value.is_number_unsigned() ? value.get<std::uint64_t>() <= std::numeric_limits<std::int64_t>::max()
                                               : value.is_number_integer();
  if (!fits || value.get<std::int64_t>() < min || value.get<std::int64_t>() > max) {
    fail(name, fmt::format("expected an integer from {} to {}, got {}", min, max, describe(value)));
  }
  return value.get<std::int64_t>();
}

double JsonObject::number(const std::string& name, double min, double max) const {
  const auto& value = at(name);
  if (!value.is_number() || !(value.get<double>() >= min && value.get<double>() <= max)) {
    fail(name, fmt::format("expected a number from {} to {}, got {}", min, max, describe(value)));
  }
  return value.get<double>();
}

const std::string& JsonObject::string(const std::string& name) const {
  const auto& value = at(name);
  if (!value.is_string()) fail(name, fmt::format("expected a string, got {}", describe(value)));
  return value.get_ref<const std::string&>();
}

bool JsonObject::boolean(const std::string& name, bool absent) const {
  const auto* value = find(name);
  if (value == nullptr) return absent;
  if (!value->is_boolean()) fail(name, fmt::format("expected true or false, got {}", describe(*value)));
  return value->get<bool>();
}

JsonObject JsonObject::object(const std::string& name) const {
  const auto& value = at(name);
  if (!value.is_object()) fail(name, fmt::format("expected an object, got {}", describe(value)));
  return {path_, value, prefix_ + name + "."};
}

std::vector<JsonObject> JsonObject::objects(const std::string& name) const {
  const auto& value = at(name);
  if (!value.is_array()) fail(name, fmt::format("expected an array, got {}", describe(value)));
  std::vector<JsonObject> all;
  for (std::size_t i = 0; i < value.size(); ++i) {
    if (!value[i].is_object())
      fail(fmt::format("{}.{}", name, i), fmt::format("expected an object, got {}", describe(value[i])));
    all.emplace_back(path_, value[i], fmt::format("{}{}.{}.", prefix_, name, i));
  }
  return all;
}

void JsonObject::allow_only(std::initializer_list<std::string_view> names) const {
  for (const auto& [name, value] : object_.items()) {
    if (!value.is_null() && std::find(names.begin(), names.end(), name) == names.end())
      refuse(name, "it is not supported");
  }
}

void JsonObject::fail(const std::string& name, const std::string& cause) const {
  fail_format(path_, fmt::format("{}{}: {}", prefix_, name, cause));
}

void JsonObject::refuse(const std::string& name, const std::string& cause) const {
  throw Error(ErrorKind::kUnsupported, fmt::format("{}: {}{}: {}", path_.string(), prefix_, name, cause));
}

}  // namespace rowan::detail
