// Whole files: replaced atomically, read with a limit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace rowan {

/// A file that appears complete or not at all. Bytes go to a temporary file in the target's directory; commit() syncs
/// it to disk, renames it over the target and syncs the directory. Whatever happens before (an error, a full disk, the
/// process killed), the target keeps its old content; at worst a hidden ".NAME.….tmp" file stays behind. A symbolic
/// link is followed, an existing file keeps its permissions, and a target that is a device or a pipe is written
/// directly. Errors are Io and name the file; a file size limit (RLIMIT_FSIZE) is an error like a full disk, and raises
/// no signal.
class AtomicFile {
 public:
  explicit AtomicFile(const std::filesystem::path& path);
  /// Removes the temporary file unless commit() succeeded.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Throws Io when anything of the file could not be stored; then the target is unchanged. Called once, after the last
  /// write.
  void commit();

 private:
  std::filesystem::path target_;
  std::filesystem::path temporary_;  // empty when the target is written directly
  int descriptor_ = -1;
};

/// Replaces a whole file atomically.
void write_text_file(const std::filesystem::path& path, std::string_view text);

/// The content of a regular file of at most `max_bytes` bytes. Throws Io when it cannot be read, Format when it is
/// larger.
std::string read_text_file(const std::filesystem::path& path, std::int64_t max_bytes);

/// Replaces `to` atomically by a copy of the regular file `from`; permissions are not copied. Throws Io.
void copy_file_atomically(const std::filesystem::path& from, const std::filesystem::path& to);

/// Makes a directory and its parents; no error when it exists. Throws Io naming the path.
void make_directories(const std::filesystem::path& path);

}  // namespace rowan
