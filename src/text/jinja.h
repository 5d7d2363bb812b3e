// Jinja templates in a spelling that can be compared.
#pragma once

#include <string>
#include <string_view>

namespace rowan::detail {

/// The template without comments, without white space outside of strings (and between tags), with single quotes, with
/// x['role'] and x['content'] for x.role and x.content, "\n" written as a line feed, and adjacent strings joined.
std::string normalize_jinja(std::string_view text);

}  // namespace rowan::detail
