// Measured choices and where they are kept.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

namespace rowan {

/// Candidate number `candidate` of `candidates` that were there.
struct TuningChoice {
  int candidate = 0;
  int candidates = 0;
  friend bool operator==(const TuningChoice&, const TuningChoice&) = default;
};

/// Choices by key. As text: a first line that names the format, then "key = candidate/candidates" a line.
class TuningTable {
 public:
  static constexpr std::size_t kMostChoices = 4096;
  static constexpr std::size_t kMostKeyBytes = 512;
  static constexpr int kMostCandidates = 256;

  std::optional<TuningChoice> find(std::string_view key) const;
  /// Replaces what is there; does nothing for a key or choice that the text could not hold, or where the table is full.
  void put(std::string_view key, TuningChoice choice);
  /// Adds the valid lines of a text that are new. Any text is taken; one of another format adds nothing.
  void merge(std::string_view text);
  std::string text() const;
  std::size_t size() const noexcept { return choices_.size(); }

 private:
  std::map<std::string, TuningChoice, std::less<>> choices_;
};

/// The choices of this process.
class Tuning {
 public:
  /// Set up from the environment on first use.
  static Tuning& process();
  Tuning(bool on, std::filesystem::path file);

  bool on() const;
  void set_on(bool on);
  bool measures() const;
  void adopt(std::string_view text);
  void set_file(const std::filesystem::path& file);
  std::optional<TuningChoice> find(std::string_view key);
  /// Remembers a choice, in the file too. Never fails for the file's sake.
  void put(std::string_view key, TuningChoice choice);
  std::string text();
  void merge(std::string_view text);

 private:
  void load();
  void save() noexcept;

  mutable std::mutex mutex_;
  bool measures_ = true;
  bool on_;
  bool loaded_ = false;
  std::filesystem::path file_;
  TuningTable table_;
};

}  // namespace rowan
