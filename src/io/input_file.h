// A regular file opened for reading at positions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "rowan/core/error.h"

namespace rowan {
class AtomicFile;
}

namespace rowan::detail {

/// Throws Io: "PATH: cannot ACTION: what the system says".
[[noreturn]] void fail_system(const std::filesystem::path& path, const char* action, int error);

/// Throws Format: "PATH: CAUSE".
[[noreturn]] void fail_format(const std::filesystem::path& path, const std::string& cause);

class InputFile {
 public:
  explicit InputFile(const std::filesystem::path& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  /// Bytes when it was opened.
  std::int64_t size() const noexcept { return size_; }
  /// Reads exactly `bytes` bytes; a file that ends before is an error.
  void read_at(std::int64_t offset, void* out, std::int64_t bytes) const;

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::int64_t size_ = 0;
};

/// Appends `bytes` bytes of `source` from `offset` on to a file that is being written, through a bounded buffer.
void copy_bytes(const InputFile& source, std::int64_t offset, std::int64_t bytes, AtomicFile& to);

}  // namespace rowan::detail
