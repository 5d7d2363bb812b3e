// Checks of option values beside those that CLI11 has: the error's text, empty where the value is right.
#pragma once

#include <string>

namespace rowan::app {

/// CLI11 alone would wrap -1 and 2^64 around.
inline std::string check_seed(const std::string& text) {
  const bool digits = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  return digits && text.size() <= 18 ? "" : "expected a whole number from 0 to 10^18 - 1, got " + text;
}

inline std::string check_not_empty(const std::string& text) {
  return text.empty() ? "expected a name, got nothing" : "";
}

}  // namespace rowan::app
