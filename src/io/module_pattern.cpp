#include "io/module_pattern.h"

#include <string_view>

#include "core/check.h"
#include "io/json.h"

namespace rowan::detail {

namespace {

constexpr std::size_t kMaxPatternBytes = 2048;  // std::regex recurses once a character

/// What ECMAScript reads in another way than Python, or nullptr.
const char* foreign_syntax(std::string_view pattern) {
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const std::string_view rest = pattern.substr(i);
    if (rest.starts_with("(?") && !rest.starts_with("(?:") && !rest.starts_with("(?=") && !rest.starts_with("(?!")) {
      return "groups that begin with (? other than (?: (?= (?! are not supported";
    }
    if (rest.starts_with("[[")) return "[[ is not supported";
    if (rest[0] == '\\') {
      const char next = rest.size() > 1 ? rest[1] : '\0';
      const bool letter_or_digit =
          (next >= 'a' && next <= 'z') || (next >= 'A' && next <= 'Z') || (next >= '0' && next <= '9');
      if (letter_or_digit && std::string_view("dDsSwWbB").find(next) == std::string_view::npos) {
        return "escapes of letters and digits other than \\d \\s \\w \\b and their opposites are not supported";
      }
      ++i;
    }
  }
  return nullptr;
}

}  // namespace

std::regex compile_module_pattern(const std::string& what, const std::string& pattern) {
  const auto refuse = [&](const char* why) {
    fail(ErrorKind::kInvalidArgument, "{}: pattern {} is refused: {}", what, quote(pattern), why);
  };
  if (pattern.size() > kMaxPatternBytes) refuse("it is longer than 2048 bytes");
  if (const char* why = foreign_syntax(pattern)) refuse(why);
  auto flags = std::regex::ECMAScript | std::regex::optimize;
#ifdef __GLIBCXX__
  flags |= std::regex_constants::__polynomial;  // otherwise (a*)*b takes forever
#endif
  try {
    return std::regex(pattern, flags);
  } catch (const std::regex_error& error) {
    refuse(error.what());
  }
  return {};
}

}  // namespace rowan::detail
