#include "text/utf8.h"

#include <utf8proc.h>

#include <algorithm>

namespace rowan::detail {

namespace {

unsigned byte_at(std::string_view text, std::size_t at) { return static_cast<unsigned char>(text[at]); }

bool is_continuation(std::string_view text, std::size_t at) { return (byte_at(text, at) & 0xC0) == 0x80; }

/// Bytes at `at`, which begins no complete character, that count as one error: at least 1.
std::size_t maximal_subpart(std::string_view text, std::size_t at) {
  const unsigned lead = byte_at(text, at);
  const std::size_t wanted = lead >= 0xF0 && lead <= 0xF4 ? 4 : lead >= 0xE0 && lead < 0xF0 ? 3 : 1;
  if (wanted == 1 || at + 1 >= text.size()) return 1;
  // The second byte decides about overlong forms, surrogates and the end of Unicode.
  const unsigned second = byte_at(text, at + 1);
  const unsigned low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const unsigned high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  if (second < low || second > high) return 1;
  return wanted == 4 && at + 2 < text.size() && is_continuation(text, at + 2) ? 3 : 2;
}

}  // namespace

std::size_t utf8_length(std::string_view text, std::size_t at) {
  if (at >= text.size()) return 0;
  if (byte_at(text, at) < 0x80) return 1;
  utf8proc_int32_t code_point = -1;
  const utf8proc_ssize_t length =
      utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(text.data()) + at,
                       static_cast<utf8proc_ssize_t>(std::min<std::size_t>(text.size() - at, 4)), &code_point);
  return length > 0 ? static_cast<std::size_t>(length) : 0;
}

bool is_utf8(std::string_view text) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8_length(text, at);
    if (length == 0) return false;
    at += length;
  }
  return true;
}

char32_t utf8_code_point(std::string_view character) {
  utf8proc_int32_t code_point = -1;
  utf8proc_iterate(reinterpret_cast<const utf8proc_uint8_t*>(character.data()),
                   static_cast<utf8proc_ssize_t>(character.size()), &code_point);
  return static_cast<char32_t>(code_point);
}

std::string to_utf8(char32_t code_point) {
  utf8proc_uint8_t bytes[4];
  const utf8proc_ssize_t length = utf8proc_encode_char(static_cast<utf8proc_int32_t>(code_point), bytes);
  return {reinterpret_cast<const char*>(bytes), static_cast<std::size_t>(length)};
}

std::size_t utf8_previous(std::string_view text, std::size_t at) {
  do {
    --at;
  } while (at > 0 && is_continuation(text, at));
  return at;
}

std::string repair_utf8(std::string_view text) {
  std::string repaired;
  repaired.reserve(text.size());
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8_length(text, at);
    if (length > 0) {
      repaired += text.substr(at, length);
      at += length;
    } else {
      repaired += kReplacementCharacter;
      at += maximal_subpart(text, at);
    }
  }
  return repaired;
}

}  // namespace rowan::detail
