// Regular expressions on UTF-8 in Oniguruma's syntax: tokenizer.json is written for that library.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

struct re_pattern_buffer;

namespace rowan::detail {

class Regex {
 public:
  struct Match {
    std::size_t begin = 0, end = 0;
  };

  /// Throws Unsupported with the library's reason for a pattern that it does not take.
  explicit Regex(const std::string& pattern);

  /// The leftmost match at or after `from`. The text must be UTF-8. Throws Unsupported when the search takes more
  /// backtracking than any sensible pattern needs.
  std::optional<Match> find(std::string_view text, std::size_t from) const;

 private:
  std::shared_ptr<re_pattern_buffer> compiled_;
};

}  // namespace rowan::detail
