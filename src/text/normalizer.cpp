#include "text/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "text/pattern.h"
#include "text/utf8.h"

namespace rowan::detail {

namespace {

struct Free {
  void operator()(utf8proc_uint8_t* p) const { std::free(p); }
};

bool is_ascii(const std::string& text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

int combining_class(std::string_view character) {
  return utf8proc_get_property(static_cast<utf8proc_int32_t>(utf8_code_point(character)))->combining_class;
}

/// Puts long runs of combining marks in canonical order, an equivalent text: utf8proc's own ordering takes the square
/// of a run's length.
std::string order_long_runs(const std::string& text) {
  constexpr std::size_t kLong = 64;
  std::string ordered;
  std::vector<std::pair<int, std::string_view>> run;  // (class, mark)
  const auto end_run = [&] {
    if (run.size() > kLong)
      std::stable_sort(run.begin(), run.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    for (const auto& [mark_class, mark] : run) ordered += mark;
    run.clear();
  };
  for (std::size_t at = 0; at < text.size();) {
    const std::string_view character = std::string_view(text).substr(at, utf8_length(text, at));
    at += character.size();
    if (const int mark_class = combining_class(character); mark_class != 0) {
      run.emplace_back(mark_class, character);
    } else {
      end_run();
      ordered += character;
    }
  }
  end_run();
  return ordered;
}

Normalizer unicode_form(int options) {
  return [options](std::string text) {
    if (is_ascii(text)) return text;  // every form keeps it
    text = order_long_runs(text);
    utf8proc_uint8_t* raw = nullptr;
    const utf8proc_ssize_t length =
        utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()),
                     &raw, static_cast<utf8proc_option_t>(UTF8PROC_STABLE | options));
    const std::unique_ptr<utf8proc_uint8_t, Free> normalized(raw);
    require(length >= 0, "Unicode normalization: {}", utf8proc_errmsg(length));
    return std::string(reinterpret_cast<const char*>(normalized.get()), static_cast<std::size_t>(length));
  };
}

}  // namespace

Normalizer make_replace(const JsonObject& json) {
  json.allow_only({"type", "pattern", "content"});
  return [pattern = Pattern(json.object("pattern")), content = json.string("content")](std::string text) {
    std::string replaced;
    for (const auto& span : pattern.spans(text)) {
      replaced += span.matches ? content : text.substr(span.begin, span.end - span.begin);
    }
    return replaced;
  };
}

Normalizer make_normalizer(const JsonObject& json) {
  const std::string& type = json.string("type");
  if (type == "Sequence") {
    json.allow_only({"type", "normalizers"});
    std::vector<Normalizer> steps;
    for (const JsonObject& step : json.objects("normalizers")) steps.push_back(make_normalizer(step));
    return [steps](std::string text) {
      for (const Normalizer& step : steps) text = step(std::move(text));
      return text;
    };
  }
  if (type == "Replace") return make_replace(json);
  if (type == "Prepend") {
    json.allow_only({"type", "prepend"});
    return [prefix = json.string("prepend")](std::string text) { return text.empty() ? text : prefix + text; };
  }
  json.allow_only({"type"});
  if (type == "NFC") return unicode_form(UTF8PROC_COMPOSE);
  if (type == "NFD") return unicode_form(UTF8PROC_DECOMPOSE);
  if (type == "NFKC") return unicode_form(UTF8PROC_COMPOSE | UTF8PROC_COMPAT);
  if (type == "NFKD") return unicode_form(UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT);
  json.refuse("type", "the normalizer " + quote(type) + " is not supported");
}

}  // namespace rowan::detail
