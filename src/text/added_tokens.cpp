#include "text/added_tokens.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "text/regex.h"
#include "text/utf8.h"

namespace rowan::detail {

namespace {

/// Looking for a token takes up to its length at every place of a text.
constexpr std::size_t kMaxContentBytes = 1024;

bool is_white_space(std::string_view character) {
  static const Regex pattern(R"(\p{White_Space})");
  return pattern.find(character, 0).has_value();
}

bool is_word(std::string_view character) {
  static const Regex pattern(R"([\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{200C}\x{200D}])");
  return pattern.find(character, 0).has_value();
}

std::string_view character_before(std::string_view text, std::size_t at) {
  if (at == 0) return {};
  const std::size_t begin = utf8_previous(text, at);
  return text.substr(begin, at - begin);
}

std::string_view character_at(std::string_view text, std::size_t at) { return text.substr(at, utf8_length(text, at)); }

}  // namespace

std::vector<AddedToken> read_added_tokens(const JsonObject& json) {
  std::vector<AddedToken> tokens;
  if (!json.has("added_tokens")) return tokens;
  for (const JsonObject& entry : json.objects("added_tokens")) {
    entry.allow_only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    AddedToken token;
    token.id = static_cast<std::int32_t>(entry.integer("id", 0, std::numeric_limits<std::int32_t>::max() - 1));
    token.content = entry.string("content");
    token.special = entry.boolean("special", false);
    token.single_word = entry.boolean("single_word", false);
    token.lstrip = entry.boolean("lstrip", false);
    token.rstrip = entry.boolean("rstrip", false);
    token.normalized = entry.boolean("normalized", !token.special);
    if (token.content.size() > kMaxContentBytes)
      entry.refuse("content", fmt::format("more than {} bytes are not supported", kMaxContentBytes));
    tokens.push_back(std::move(token));
  }
  return tokens;
}

void AddedTokenFinder::add(const AddedToken& token, std::string_view text) {
  if (text.empty()) return;
  std::size_t node = 0;
  for (const char byte : text) {
    const auto [child, is_new] = nodes_[node].children.emplace(byte, nodes_.size());
    node = child->second;
    if (is_new) nodes_.emplace_back();
  }
  if (nodes_[node].token == nullptr) nodes_[node].token = &token;
}

AddedTokenFinder::Section AddedTokenFinder::match(std::string_view text, std::size_t at) const {
  Section longest{at, at, nullptr};
  std::size_t node = 0;
  for (std::size_t i = at; i < text.size(); ++i) {
    const auto child = nodes_[node].children.find(text[i]);
    if (child == nodes_[node].children.end()) break;
    node = child->second;
    if (nodes_[node].token != nullptr) longest = {at, i + 1, nodes_[node].token};
  }
  return longest;
}

std::vector<AddedTokenFinder::Section> AddedTokenFinder::find(std::string_view text) const {
  std::vector<Section> sections;
  std::size_t done = 0;
  for (std::size_t at = 0; at < text.size();) {
    Section found = match(text, at);
    if (found.token == nullptr) {
      ++at;
      continue;
    }
    at = found.end;
    const AddedToken& token = *found.token;
    if (token.single_word && (is_word(character_before(text, found.begin)) || is_word(character_at(text, found.end)))) {
      continue;
    }
    if (token.lstrip) {
      while (found.begin > done && is_white_space(character_before(text, found.begin)))
        found.begin = utf8_previous(text, found.begin);
    }
    if (token.rstrip) {
      while (is_white_space(character_at(text, found.end))) found.end += character_at(text, found.end).size();
    }
    if (done < found.begin) sections.push_back({done, found.begin, nullptr});
    sections.push_back(found);
    done = found.end;
  }
  if (done < text.size()) sections.push_back({done, text.size(), nullptr});
  return sections;
}

}  // namespace rowan::detail
