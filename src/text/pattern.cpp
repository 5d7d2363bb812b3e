#include "text/pattern.h"

#include <algorithm>
#include <utility>

#include "rowan/core/error.h"
#include "text/utf8.h"

namespace rowan::detail {

Pattern::Pattern(const JsonObject& json) {
  if (json.members().size() != 1) json.fail("String", "expected a String or a Regex, one of them");
  if (json.has("Regex")) {
    try {
      regex_.emplace(json.string("Regex"));
    } catch (const Error& error) {
      json.refuse("Regex", error.what());
    }
  } else if (json.has("String")) {
    literal_ = json.string("String");
    if (literal_.empty()) json.fail("String", "expected a text, got an empty one");
  } else {
    json.allow_only({"String", "Regex"});
    json.fail("String", "it is missing");
  }
}

Pattern Pattern::literal(std::string text) {
  Pattern pattern;
  pattern.literal_ = std::move(text);
  return pattern;
}

Pattern Pattern::regex(const std::string& regex) {
  Pattern pattern;
  pattern.regex_.emplace(regex);
  return pattern;
}

std::optional<Regex::Match> Pattern::find(std::string_view text, std::size_t from) const {
  if (regex_) return regex_->find(text, from);
  const std::size_t at = text.find(literal_, from);
  if (at == text.npos) return std::nullopt;
  return Regex::Match{at, at + literal_.size()};
}

std::vector<Pattern::Span> Pattern::spans(std::string_view text) const {
  std::vector<Span> spans;
  std::size_t done = 0;
  for (std::size_t from = 0; from < text.size();) {
    const auto match = find(text, from);
    if (!match) break;
    if (match->begin == match->end) {
      from = match->end + std::max<std::size_t>(utf8_length(text, match->end), 1);
      continue;
    }
    if (match->begin > done) spans.push_back({done, match->begin, false});
    spans.push_back({match->begin, match->end, true});
    done = from = match->end;
  }
  if (done < text.size()) spans.push_back({done, text.size(), false});
  return spans;
}

std::vector<Pattern::Span> split(const std::vector<Pattern::Span>& spans, SplitBehavior behavior) {
  using Span = Pattern::Span;
  std::vector<Span> parts;
  bool last_matched = false;
  const auto join_if = [&](bool joined, const Span& span) {
    if (joined && !parts.empty()) {
      parts.back().begin = std::min(parts.back().begin, span.begin);
      parts.back().end = std::max(parts.back().end, span.end);
    } else {
      parts.push_back(span);
    }
    last_matched = span.matches;
  };
  switch (behavior) {
    case SplitBehavior::kRemoved:
      std::copy_if(spans.begin(), spans.end(), std::back_inserter(parts), [](const Span& s) { return !s.matches; });
      break;
    case SplitBehavior::kIsolated:
      parts = spans;
      break;
    case SplitBehavior::kContiguous:
      for (const Span& span : spans) join_if(span.matches == last_matched, span);
      break;
    case SplitBehavior::kMergedWithPrevious:
      for (const Span& span : spans) join_if(span.matches && !last_matched, span);
      break;
    case SplitBehavior::kMergedWithNext:
      for (auto span = spans.rbegin(); span != spans.rend(); ++span) join_if(span->matches && !last_matched, *span);
      std::reverse(parts.begin(), parts.end());
      break;
  }
  return parts;
}

}  // namespace rowan::detail
