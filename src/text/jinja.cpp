#include "text/jinja.h"

#include <algorithm>
#include <cctype>
#include <utility>

namespace rowan::detail {

namespace {

constexpr std::string_view kWhiteSpace = " \t\r\n";

void replace_all(std::string& text, std::string_view from, std::string_view to) {
  std::string replaced;
  std::size_t at = 0;
  for (std::size_t next; (next = text.find(from, at)) != text.npos; at = next + from.size()) {
    replaced.append(text, at, next - at);
    replaced += to;
  }
  replaced.append(text, at);
  text = std::move(replaced);
}

/// The code of a tag, between its braces.
std::string normalize_code(std::string_view code) {
  std::string normal;
  char quote = 0;
  for (std::size_t i = 0; i < code.size(); ++i) {
    const char c = code[i];
    if (quote != 0 && c == '\\' && i + 1 < code.size()) {
      const char escaped = code[++i];
      normal += escaped == 'n' ? '\n' : escaped;
    } else if (quote == 0 ? c == '\'' || c == '"' : c == quote) {
      quote = quote == 0 ? c : 0;
      normal += '\'';
    } else if (quote != 0 || kWhiteSpace.find(c) == kWhiteSpace.npos) {
      normal += c;
    }
  }
  return normal;
}

}  // namespace

std::string normalize_jinja(std::string_view text) {
  std::string normal;
  while (!text.empty()) {
    const std::size_t brace = text.find('{');
    const char kind = brace != text.npos && brace + 1 < text.size() ? text[brace + 1] : '\0';
    const bool tag = kind == '{' || kind == '%' || kind == '#';
    const std::string_view outside = text.substr(0, brace == text.npos ? brace : tag ? brace : brace + 1);
    if (outside.find_first_not_of(kWhiteSpace) != outside.npos) normal += outside;
    if (!tag) {
      text.remove_prefix(outside.size());
      continue;
    }
    const char close[] = {kind == '{' ? '}' : kind, '}'};
    const std::size_t end = std::min(text.find(std::string_view(close, 2), brace + 2), text.size());
    std::string_view code = text.substr(brace + 2, end - brace - 2);
    text.remove_prefix(std::min(end + 2, text.size()));
    if (kind == '#') continue;
    if (code.starts_with('-')) code.remove_prefix(1);
    if (code.ends_with('-')) code.remove_suffix(1);
    normal += '{';
    normal += kind;
    normal += normalize_code(code);
    normal.append(close, 2);
  }
  replace_all(normal, ".role", "['role']");
  replace_all(normal, ".content", "['content']");
  replace_all(normal, "'+'", "");
  return normal;
}

}  // namespace rowan::detail
