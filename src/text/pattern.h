// A "pattern" of tokenizer.json ({"String": …} or {"Regex": …}), and what its matches do to a text.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/json.h"
#include "text/regex.h"

namespace rowan::detail {

class Pattern {
 public:
  /// A part of a text: a match, or what lies between two.
  struct Span {
    std::size_t begin = 0, end = 0;
    bool matches = false;
  };

  explicit Pattern(const JsonObject& json);
  /// A fixed string, not empty.
  static Pattern literal(std::string text);
  static Pattern regex(const std::string& pattern);

  /// Spans that cover the text, in order. Matches of nothing are passed over.
  std::vector<Span> spans(std::string_view text) const;

 private:
  Pattern() = default;
  std::optional<Regex::Match> find(std::string_view text, std::size_t from) const;

  std::string literal_;
  std::optional<Regex> regex_;
};

/// What becomes of the matches when a text is split at them (SplitDelimiterBehavior).
enum class SplitBehavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

/// The parts of a text whose pattern gave these spans; `matches` means nothing in them.
std::vector<Pattern::Span> split(const std::vector<Pattern::Span>& spans, SplitBehavior behavior);

}  // namespace rowan::detail
