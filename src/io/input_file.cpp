#include "io/input_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace rowan::detail {

void fail_system(const std::filesystem::path& path, const char* action, int error) {
  throw Error(ErrorKind::kIo,
              fmt::format("{}: cannot {}: {}", path.string(), action, std::generic_category().message(error)));
}

void fail_format(const std::filesystem::path& path, const std::string& cause) {
  throw Error(ErrorKind::kFormat, fmt::format("{}: {}", path.string(), cause));
}

InputFile::InputFile(const std::filesystem::path& path) : path_(path) {
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe must not block here
  if (descriptor_ < 0) fail_system(path, "open", errno);
  struct stat status {};
  const int error = ::fstat(descriptor_, &status) != 0 ? errno : 0;
  if (error != 0 || !S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    if (error != 0) fail_system(path, "examine", error);
    throw Error(ErrorKind::kIo, fmt::format("{}: expected a regular file, got {}", path.string(),
                                            S_ISDIR(status.st_mode) ? "a directory" : "a device or pipe"));
  }
  size_ = status.st_size;
}

InputFile::~InputFile() { ::close(descriptor_); }

void InputFile::read_at(std::int64_t offset, void* out, std::int64_t bytes) const {
  constexpr std::int64_t kPiece = std::int64_t{1} << 30;  // one call transfers less than 2 GiB
  auto* to = static_cast<char*>(out);
  while (bytes > 0) {
    const ssize_t got = ::pread(descriptor_, to, static_cast<std::size_t>(std::min(bytes, kPiece)), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_system(path_, "read", errno);
    if (got == 0) {
      throw Error(
          ErrorKind::kIo,
          fmt::format("{}: the file ended at byte {} while it was read, expected {} bytes more (it had {} when opened)",
                      path_.string(), offset, bytes, size_));
    }
    to += got;
    offset += got;
    bytes -= got;
  }
}

}  // namespace rowan::detail
