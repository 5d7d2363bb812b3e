#include "text/byte_characters.h"

#include <array>
#include <cstdint>

#include "text/utf8.h"

namespace rowan::detail {

namespace {

struct Table {
  Table() {
    char32_t next = 0x100;
    byte_of.fill(-1);
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      const char32_t character = printable ? static_cast<char32_t>(byte) : next++;
      characters[static_cast<std::size_t>(byte)] = to_utf8(character);
      byte_of[character] = static_cast<std::int16_t>(byte);
    }
  }
  std::array<std::string, 256> characters;
  std::array<std::int16_t, 0x144> byte_of;  // by code point; -1: no byte
};

const Table& table() {
  static const Table instance;
  return instance;
}

}  // namespace

std::string to_byte_characters(std::string_view bytes) {
  std::string text;
  text.reserve(2 * bytes.size());
  for (const char byte : bytes) text += table().characters[static_cast<unsigned char>(byte)];
  return text;
}

std::optional<std::string> from_byte_characters(std::string_view text) {
  std::string bytes;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = utf8_length(text, at);
    const char32_t character = utf8_code_point(text.substr(at, length));
    if (character >= table().byte_of.size() || table().byte_of[character] < 0) return std::nullopt;
    bytes += static_cast<char>(table().byte_of[character]);
    at += length;
  }
  return bytes;
}

}  // namespace rowan::detail
