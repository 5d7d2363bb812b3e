// Python regular expressions on module paths.
#pragma once

#include <regex>
#include <string>

namespace rowan::detail {

/// Compiles a pattern so that matching takes polynomial time whatever the pattern. Throws InvalidArgument naming
/// `what`.
std::regex compile_module_pattern(const std::string& what, const std::string& pattern);

}  // namespace rowan::detail
