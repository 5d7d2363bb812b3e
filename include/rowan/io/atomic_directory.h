// Directories that appear whole.
#pragma once

#include <filesystem>

namespace rowan {

/// A new directory that appears complete or not at all. Files are made in path(), a hidden directory beside the target;
/// commit() renames it to the target and syncs the directory that holds both. Whatever happens before, the target stays
/// as it was; a killed process leaves the hidden ".NAME.PID.tmp" behind.
class AtomicDirectory {
 public:
  /// Makes the target's parents and path(). Throws InvalidArgument when the target is something else than an empty
  /// directory or nothing, Io when the system refuses.
  explicit AtomicDirectory(const std::filesystem::path& target);
  /// Removes path() unless commit() succeeded.
  ~AtomicDirectory();
  AtomicDirectory(const AtomicDirectory&) = delete;
  AtomicDirectory& operator=(const AtomicDirectory&) = delete;

  const std::filesystem::path& path() const noexcept { return temporary_; }
  /// Throws Io; then the target is unchanged. Called once, when every file in path() is written and synced.
  void commit();

 private:
  std::filesystem::path target_;
  std::filesystem::path temporary_;
};

}  // namespace rowan
