#include "text/regex.h"

#include <oniguruma.h>

#include <algorithm>
#include <climits>
#include <mutex>

#include "core/check.h"
#include "io/json.h"

namespace rowan::detail {

namespace {

const OnigUChar* bytes_of(std::string_view text) { return reinterpret_cast<const OnigUChar*>(text.data()); }

std::string reason(int status, OnigErrorInfo* info = nullptr) {
  OnigUChar text[ONIG_MAX_ERROR_MESSAGE_LEN];
  const int length = info ? onig_error_code_to_str(text, status, info) : onig_error_code_to_str(text, status);
  return {reinterpret_cast<const char*>(text), static_cast<std::size_t>(length)};
}

void initialize_library() {
  static std::once_flag once;
  std::call_once(once, [] {
    OnigEncoding encodings[] = {ONIG_ENCODING_UTF8};
    onig_initialize(encodings, 1);
  });
}

struct FreeParameters {
  void operator()(OnigMatchParam* p) const { onig_free_match_param(p); }
};
struct FreeRegion {
  void operator()(OnigRegion* r) const { onig_region_free(r, 1); }
};

}  // namespace

Regex::Regex(const std::string& pattern) {
  initialize_library();
  regex_t* compiled = nullptr;
  OnigErrorInfo info{};
  const OnigUChar* const begin = bytes_of(pattern);
  const int status = onig_new(&compiled, begin, begin + pattern.size(), ONIG_OPTION_NONE, ONIG_ENCODING_UTF8,
                              ONIG_SYNTAX_DEFAULT, &info);
  if (status != ONIG_NORMAL)
    fail(ErrorKind::kUnsupported, "regular expression {}: {}", quote(pattern), reason(status, &info));
  compiled_.reset(compiled, onig_free);
}

std::optional<Regex::Match> Regex::find(std::string_view text, std::size_t from) const {
  // A greedy loop keeps one entry a character, so limits grow with the text; its square they do not allow.
  const std::unique_ptr<OnigMatchParam, FreeParameters> parameters(onig_new_match_param());
  const std::unique_ptr<OnigRegion, FreeRegion> region(onig_region_new());
  if (!parameters || !region) throw std::bad_alloc();
  onig_initialize_match_param(parameters.get());
  const std::size_t steps = 10'000'000 + 64 * text.size();
  onig_set_retry_limit_in_match_of_match_param(parameters.get(), steps);
  onig_set_retry_limit_in_search_of_match_param(parameters.get(), steps);
  onig_set_match_stack_limit_size_of_match_param(
      parameters.get(), static_cast<unsigned>(std::min<std::size_t>(1'000'000 + 4 * text.size(), UINT_MAX)));
  const OnigUChar *const begin = bytes_of(text), *const end = begin + text.size();
  const int at = onig_search_with_param(compiled_.get(), begin, end, begin + from, end, region.get(), ONIG_OPTION_NONE,
                                        parameters.get());
  if (at == ONIG_MISMATCH) return std::nullopt;
  if (at < 0) {
    fail(ErrorKind::kUnsupported, "regular expression on a text of {} bytes: {}", text.size(), reason(at));
  }
  return Match{static_cast<std::size_t>(region->beg[0]), static_cast<std::size_t>(region->end[0])};
}

}  // namespace rowan::detail
