// UTF-8, a character at a time.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace rowan::detail {

/// Bytes of the valid character that begins at `at`; 0 where there is none (invalid, cut off, or the end).
std::size_t utf8_length(std::string_view text, std::size_t at);
bool is_utf8(std::string_view text);
/// The code point of a valid character.
char32_t utf8_code_point(std::string_view character);
std::string to_utf8(char32_t code_point);
/// Where the character before `at` begins, in valid text; at > 0.
std::size_t utf8_previous(std::string_view text, std::size_t at);

/// The text with each longest run of bytes that could begin a character but does not complete it, and every other
/// invalid byte, replaced by U+FFFD (Unicode's "maximal subparts", as Rust's String::from_utf8_lossy).
std::string repair_utf8(std::string_view text);

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

}  // namespace rowan::detail
