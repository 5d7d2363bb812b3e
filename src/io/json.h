// Strict JSON: what nlohmann-json checks (grammar, UTF-8, surrogates) plus duplicate keys, depth, size, and raw NUL
// bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace rowan::detail {

/// Text from a file as it may appear in a message: escaped, at most 80 bytes of it, in double quotes.
std::string quote(std::string_view text);

/// Receives the events of a strict scan. Overriders call the base first. Every failure throws Format naming the file.
class JsonScanner : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit JsonScanner(std::filesystem::path source) : source_(std::move(source)) {}
  /// Scans one JSON text with nothing but white space around it.
  void scan(std::string_view text);

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool key(string_t& name) override;
  bool start_object(std::size_t) override;
  bool end_object() override;
  bool start_array(std::size_t) override;
  bool end_array() override;
  bool parse_error(std::size_t position, const std::string& token, const nlohmann::json::exception& error) override;

 protected:
  /// Containers open around the current value.
  int depth() const noexcept { return depth_; }
  [[noreturn]] void fail(const std::string& cause) const;

 private:
  void enter();

  std::filesystem::path source_;
  int depth_ = 0;
  std::size_t keys_ = 0;  // of all open objects
  std::string last_key_;
  std::vector<std::unordered_set<std::string>> open_objects_;
};

/// Reads a JSON object from a file of at most `max_bytes`. Members keep their order in ordered_json (whose lookup is
/// linear).
template <class Json = nlohmann::json>
Json read_json_object(const std::filesystem::path& path, std::int64_t max_bytes);

/// Members of a JSON object, taken with their types and ranges checked. Errors are Format: "FILE: MEMBER: expected …,
/// got …". A member that is null counts as absent. The object must outlive this view.
class JsonObject {
 public:
  JsonObject(std::filesystem::path path, const nlohmann::ordered_json& object, std::string prefix = "")
      : path_(std::move(path)), object_(object), prefix_(std::move(prefix)) {}

  /// Null when absent.
  const nlohmann::ordered_json* find(const std::string& name) const;
  bool has(const std::string& name) const { return find(name) != nullptr; }
  const nlohmann::ordered_json& at(const std::string& name) const;

  std::int64_t integer(const std::string& name, std::int64_t min, std::int64_t max) const;
  double number(const std::string& name, double min, double max) const;
  const std::string& string(const std::string& name) const;
  bool boolean(const std::string& name, bool absent) const;
  JsonObject object(const std::string& name) const;
  /// An array of objects.
  std::vector<JsonObject> objects(const std::string& name) const;
  const nlohmann::ordered_json& members() const noexcept { return object_; }

  /// Throws Unsupported for a member that is not among these, unless it is null.
  void allow_only(std::initializer_list<std::string_view> names) const;

  [[noreturn]] void fail(const std::string& name, const std::string& cause) const;
  /// Throws Unsupported: "FILE: MEMBER: CAUSE".
  [[noreturn]] void refuse(const std::string& name, const std::string& cause) const;

 private:
  std::filesystem::path path_;
  const nlohmann::ordered_json& object_;
  std::string prefix_;  // of member names in messages: "rope_parameters."
};

/// A value as it may appear in a message.
std::string describe(const nlohmann::ordered_json& value);

}  // namespace rowan::detail
