// Checks of option values beside those that CLI11 has: the error's text, empty where the value is right.
#pragma once

#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <functional>
#include <string>

namespace rowan::app {

/// A finite number in [low, high].
inline std::function<std::string(const std::string&)> check_number(double low, double high) {
  return [low, high](const std::string& text) {
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool fits = error == std::errc() && end == text.data() + text.size() && value >= low && value <= high;
    return fits ? std::string() : fmt::format("expected a number from {} to {}, got {}", low, high, text);
  };
}

/// A whole number in [1, 2^31 - 1]: products of two of them fit an integer of 64 bits.
inline std::string check_count(const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool fits = error == std::errc() && end == text.data() + text.size() && value >= 1 && value <= INT32_MAX;
  return fits ? "" : fmt::format("expected a whole number from 1 to {}, got {}", INT32_MAX, text);
}

/// CLI11 alone would wrap -1 and 2^64 around.
inline std::string check_seed(const std::string& text) {
  const bool digits = !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  return digits && text.size() <= 18 ? "" : "expected a whole number from 0 to 10^18 - 1, got " + text;
}

inline std::string check_not_empty(const std::string& text) {
  return text.empty() ? "expected a name, got nothing" : "";
}

}  // namespace rowan::app
