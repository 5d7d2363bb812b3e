#include "text/decoder.h"

#include <charconv>
#include <optional>
#include <utility>

#include "text/byte_characters.h"
#include "text/normalizer.h"
#include "text/pre_tokenizer.h"
#include "text/utf8.h"

namespace rowan::detail {

namespace {

std::string join(const std::vector<std::string>& tokens) {
  std::string text;
  for (const std::string& token : tokens) text += token;
  return text;
}

/// A token whose characters do not all stand for bytes (an added token) is its own UTF-8.
std::vector<std::string> decode_bytes(std::vector<std::string> tokens) {
  std::string bytes;
  for (const std::string& token : tokens) bytes += from_byte_characters(token).value_or(token);
  return {repair_utf8(bytes)};
}

/// The byte of a token "<0x0A>".
std::optional<char> fallback_byte(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return std::nullopt;
  unsigned byte = 0;
  const auto [end, error] = std::from_chars(token.data() + 3, token.data() + 5, byte, 16);
  if (error != std::errc() || end != token.data() + 5) return std::nullopt;
  return static_cast<char>(byte);
}

/// Runs of byte tokens become their text, or one U+FFFD a byte where they are none.
std::vector<std::string> decode_fallback_bytes(std::vector<std::string> tokens) {
  std::vector<std::string> texts;
  std::string run;
  const auto end_run = [&] {
    if (is_utf8(run)) {
      texts.push_back(run);
    } else {
      texts.insert(texts.end(), run.size(), std::string(kReplacementCharacter));
    }
    run.clear();
  };
  for (std::string& token : tokens) {
    if (const auto byte = fallback_byte(token)) {
      run += *byte;
    } else {
      if (!run.empty()) end_run();
      texts.push_back(std::move(token));
    }
  }
  if (!run.empty()) end_run();
  return texts;
}

Decoder make_strip(const JsonObject& json) {
  json.allow_only({"type", "content", "start", "stop"});
  const std::string content = json.string("content");
  if (content.empty() || utf8_length(content, 0) != content.size())
    json.fail("content", "expected one character, got " + quote(content));
  constexpr std::int64_t kMaxStripped = 1 << 20;
  const std::int64_t start = json.integer("start", 0, kMaxStripped), stop = json.integer("stop", 0, kMaxStripped);
  return [=](std::vector<std::string> tokens) {
    for (std::string& token : tokens) {
      for (std::int64_t i = 0; i < start && token.starts_with(content); ++i) token.erase(0, content.size());
      for (std::int64_t i = 0; i < stop && token.ends_with(content); ++i) token.erase(token.size() - content.size());
    }
    return tokens;
  };
}

Decoder make_metaspace_decoder(const JsonObject& json) {
  json.allow_only({"type", "replacement", "str_rep", "add_prefix_space", "prepend_scheme", "split"});
  const std::string replacement = json.string("replacement");
  if (replacement.empty()) json.fail("replacement", "expected one character, got none");
  const bool drops_first = read_prepend_scheme(json) != PrependScheme::kNever;
  return [replacement, drops_first](std::vector<std::string> tokens) {
    bool first = true;
    for (std::string& token : tokens) {
      const std::string space = first && drops_first ? "" : " ";
      for (std::size_t at = 0; (at = token.find(replacement, at)) != token.npos; at += space.size())
        token.replace(at, replacement.size(), space);
      first = false;
    }
    return tokens;
  };
}

}  // namespace

Decoder make_decoder(const JsonObject& json) {
  const std::string& type = json.string("type");
  if (type == "Sequence") {
    json.allow_only({"type", "decoders"});
    std::vector<Decoder> steps;
    for (const JsonObject& step : json.objects("decoders")) steps.push_back(make_decoder(step));
    return [steps](std::vector<std::string> tokens) {
      for (const Decoder& step : steps) tokens = step(std::move(tokens));
      return tokens;
    };
  }
  if (type == "ByteLevel") {
    json.allow_only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    return decode_bytes;
  }
  if (type == "Strip") return make_strip(json);
  if (type == "Metaspace") return make_metaspace_decoder(json);
  if (type == "Replace") {
    return [replace = make_replace(json)](std::vector<std::string> tokens) {
      for (std::string& token : tokens) token = replace(std::move(token));
      return tokens;
    };
  }
  json.allow_only({"type"});
  if (type == "ByteFallback") return decode_fallback_bytes;
  if (type == "Fuse") return [](std::vector<std::string> tokens) { return std::vector{join(tokens)}; };
  json.refuse("type", "the decoder " + quote(type) + " is not supported");
}

}  // namespace rowan::detail
