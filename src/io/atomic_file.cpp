#include "rowan/io/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <utility>
#include <vector>

#include "io/file_size_signal.h"
#include "io/input_file.h"
#include "io/sync_directory.h"
#include "rowan/core/error.h"

namespace rowan {

namespace {

using detail::fail_system;

std::filesystem::path directory_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : std::filesystem::path(".");
}

/// The file that a chain of symbolic links leads to, existing or not.
std::filesystem::path follow_links(std::filesystem::path path) {
  constexpr int kMostLinks = 40;  // as Linux
  std::error_code error;
  for (int i = 0; std::filesystem::is_symlink(path, error); ++i) {
    if (i == kMostLinks) fail_system(path, "follow", ELOOP);
    const auto target = std::filesystem::read_symlink(path, error);
    if (error) break;
    path = target.is_absolute() ? target : directory_of(path) / target;
  }
  return path;
}

}  // namespace

void detail::sync_directory(const std::filesystem::path& directory) {
  const int descriptor = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) fail_system(directory, "open", errno);
  const int error = ::fsync(descriptor) != 0 ? errno : 0;
  ::close(descriptor);
  if (error != 0 && error != EINVAL)
    fail_system(directory, "sync", error);  // EINVAL: this file system does not offer it
}

AtomicFile::AtomicFile(const std::filesystem::path& path) : target_(follow_links(path)) {
  struct stat status {};
  const bool exists = ::stat(target_.c_str(), &status) == 0;
  if (exists && S_ISDIR(status.st_mode)) fail_system(target_, "write", EISDIR);
  if (exists && !S_ISREG(status.st_mode)) {
    descriptor_ = ::open(target_.c_str(), O_WRONLY | O_CLOEXEC);
    if (descriptor_ < 0) fail_system(target_, "open", errno);
    return;
  }
  static std::atomic<unsigned> counter{0};
  for (;;) {
    temporary_ =
        directory_of(target_) / fmt::format(".{}.{}-{}.tmp", target_.filename().string(), ::getpid(), counter++);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ >= 0) break;
    if (errno != EEXIST)
      fail_system(target_, "create a temporary file for", errno);  // EEXIST: left by a killed process
  }
  if (exists) static_cast<void>(::fchmod(descriptor_, status.st_mode & 07777));
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  constexpr std::size_t kPiece = std::size_t{1} << 30;  // one call transfers less than 2 GiB
  const detail::FileSizeSignalBlock no_signal;
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t put = ::write(descriptor_, from, std::min(bytes, kPiece));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) fail_system(target_, "write", put < 0 ? errno : ENOSPC);
    from += put;
    bytes -= static_cast<std::size_t>(put);
  }
}

void AtomicFile::commit() {
  const bool device = temporary_.empty();
  if (::fsync(descriptor_) != 0 && !(device && (errno == EINVAL || errno == EROFS)))
    fail_system(target_, "sync", errno);
  if (::close(std::exchange(descriptor_, -1)) != 0) fail_system(target_, "close", errno);
  if (device) return;
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail_system(target_, "replace", errno);
  temporary_.clear();
  detail::sync_directory(directory_of(target_));
}

void write_text_file(const std::filesystem::path& path, std::string_view text) {
  AtomicFile file(path);
  file.write(text);
  file.commit();
}

std::string read_text_file(const std::filesystem::path& path, std::int64_t max_bytes) {
  const detail::InputFile file(path);
  if (file.size() > max_bytes)
    detail::fail_format(path, fmt::format("{} bytes are above the limit of {}", file.size(), max_bytes));
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read_at(0, text.data(), file.size());
  return text;
}

void copy_file_atomically(const std::filesystem::path& from, const std::filesystem::path& to) {
  const detail::InputFile source(from);
  AtomicFile file(to);
  detail::copy_bytes(source, 0, source.size(), file);
  file.commit();
}

void detail::copy_bytes(const InputFile& source, std::int64_t offset, std::int64_t bytes, AtomicFile& to) {
  constexpr std::int64_t kPiece = std::int64_t{4} << 20;
  std::vector<char> buffer(static_cast<std::size_t>(std::min(bytes, kPiece)));
  while (bytes > 0) {
    const std::int64_t piece = std::min(bytes, kPiece);
    source.read_at(offset, buffer.data(), piece);
    to.write(buffer.data(), static_cast<std::size_t>(piece));
    offset += piece;
    bytes -= piece;
  }
}

void make_directories(const std::filesystem::path& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) fail_system(path, "create directory", error.value());
}

}  // namespace rowan
