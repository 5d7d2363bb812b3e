// The characters that stand for bytes in byte-level vocabularies (Radford et al., GPT-2): printable bytes for
// themselves, the others for U+0100 and on.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace rowan::detail {

/// A character for every byte.
std::string to_byte_characters(std::string_view bytes);
/// The bytes again; nullopt when a character stands for none.
std::optional<std::string> from_byte_characters(std::string_view text);

}  // namespace rowan::detail
