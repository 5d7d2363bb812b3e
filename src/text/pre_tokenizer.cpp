#include "text/pre_tokenizer.h"

#include <utility>

#include "text/byte_characters.h"
#include "text/pattern.h"
#include "text/utf8.h"

namespace rowan::detail {

namespace {

constexpr const char* kGpt2Pattern = R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

void split_pieces(std::vector<Piece>& pieces, const Pattern& pattern, SplitBehavior behavior, bool invert = false) {
  std::vector<Piece> parts;
  for (const Piece& piece : pieces) {
    auto spans = pattern.spans(piece.text);
    if (invert) {
      for (auto& span : spans) span.matches = !span.matches;
    }
    for (const auto& part : split(spans, behavior))
      parts.push_back({piece.text.substr(part.begin, part.end - part.begin), piece.at_start && part.begin == 0});
  }
  pieces = std::move(parts);
}

SplitBehavior read_behavior(const JsonObject& json) {
  const std::string& name = json.string("behavior");
  if (name == "Removed") return SplitBehavior::kRemoved;
  if (name == "Isolated") return SplitBehavior::kIsolated;
  if (name == "MergedWithPrevious") return SplitBehavior::kMergedWithPrevious;
  if (name == "MergedWithNext") return SplitBehavior::kMergedWithNext;
  if (name == "Contiguous") return SplitBehavior::kContiguous;
  json.refuse("behavior", quote(name) + " is not supported");
}

PreTokenizer make_split(const JsonObject& json) {
  json.allow_only({"type", "pattern", "behavior", "invert"});
  return [pattern = Pattern(json.object("pattern")), behavior = read_behavior(json),
          invert = json.boolean("invert", false)](std::vector<Piece>& pieces) {
    split_pieces(pieces, pattern, behavior, invert);
  };
}

PreTokenizer make_byte_level(const JsonObject& json) {
  json.allow_only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
  const bool prefix_space = json.boolean("add_prefix_space", true), use_regex = json.boolean("use_regex", true);
  return [prefix_space, use_regex, pattern = Pattern::regex(kGpt2Pattern)](std::vector<Piece>& pieces) {
    if (prefix_space) {
      for (Piece& piece : pieces) {
        if (!piece.text.starts_with(' ')) piece.text.insert(0, 1, ' ');
      }
    }
    if (use_regex) split_pieces(pieces, pattern, SplitBehavior::kIsolated);
    for (Piece& piece : pieces) piece.text = to_byte_characters(piece.text);
  };
}

PreTokenizer make_metaspace(const JsonObject& json) {
  json.allow_only({"type", "replacement", "str_rep", "add_prefix_space", "prepend_scheme", "split"});
  const std::string replacement = json.string("replacement");
  if (utf8_length(replacement, 0) != replacement.size() || replacement.empty())
    json.fail("replacement", "expected one character, got " + quote(replacement));
  const PrependScheme scheme = read_prepend_scheme(json);
  const bool splits = json.boolean("split", true);
  return [=, space = Pattern::literal(" "), mark = Pattern::literal(replacement)](std::vector<Piece>& pieces) {
    for (Piece& piece : pieces) {
      std::string text;
      for (const auto& span : space.spans(piece.text))
        text += span.matches ? replacement : piece.text.substr(span.begin, span.end - span.begin);
      const bool prepends = scheme == PrependScheme::kAlways || (scheme == PrependScheme::kFirst && piece.at_start);
      piece.text = prepends && !text.starts_with(replacement) ? replacement + text : text;
    }
    if (splits) split_pieces(pieces, mark, SplitBehavior::kMergedWithNext);
  };
}

}  // namespace

PrependScheme read_prepend_scheme(const JsonObject& json) {
  if (!json.has("prepend_scheme"))
    return json.boolean("add_prefix_space", true) ? PrependScheme::kAlways : PrependScheme::kNever;
  const std::string& name = json.string("prepend_scheme");
  if (name == "always") return PrependScheme::kAlways;
  if (name == "first") return PrependScheme::kFirst;
  if (name == "never") return PrependScheme::kNever;
  json.refuse("prepend_scheme", quote(name) + " is not supported");
}

PreTokenizer make_pre_tokenizer(const JsonObject& json) {
  const std::string& type = json.string("type");
  if (type == "Sequence") {
    json.allow_only({"type", "pretokenizers"});
    std::vector<PreTokenizer> steps;
    for (const JsonObject& step : json.objects("pretokenizers")) steps.push_back(make_pre_tokenizer(step));
    return [steps](std::vector<Piece>& pieces) {
      for (const PreTokenizer& step : steps) step(pieces);
    };
  }
  if (type == "Split") return make_split(json);
  if (type == "ByteLevel") return make_byte_level(json);
  if (type == "Metaspace") return make_metaspace(json);
  json.refuse("type", "the pre-tokenizer " + quote(type) + " is not supported");
}

}  // namespace rowan::detail
