#include "rowan/io/atomic_directory.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <string>

#include "core/check.h"
#include "io/input_file.h"
#include "io/sync_directory.h"
#include "rowan/io/atomic_file.h"

namespace rowan {

namespace fs = std::filesystem;

namespace {

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "host";
  std::string text(name.data());
  std::replace(text.begin(), text.end(), '/', '-');
  return text;
}

/// Removes what processes of this machine that are no more have left beside a target.
void remove_leftovers(const fs::path& target, const std::string& prefix) {
  std::error_code error;
  for (fs::directory_iterator entry(target.parent_path(), error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(prefix) || !name.ends_with(".tmp")) continue;
    const std::string digits = name.substr(prefix.size(), name.size() - prefix.size() - 4);
    pid_t pid = 0;
    const auto [stop, problem] = std::from_chars(digits.data(), digits.data() + digits.size(), pid);
    if (problem != std::errc() || stop != digits.data() + digits.size() || pid <= 0) continue;
    std::error_code ignored;
    if (::kill(pid, 0) != 0 && errno == ESRCH) fs::remove_all(entry->path(), ignored);
  }
}

}  // namespace

AtomicDirectory::AtomicDirectory(const fs::path& target) {
  std::error_code error;
  target_ = fs::weakly_canonical(fs::absolute(target), error);  // through links, so that the rename replaces none
  if (error) detail::fail_system(target, "resolve", error.value());
  if (!target_.has_filename()) target_ = target_.parent_path();  // "out/"
  const fs::file_status status = fs::status(target_, error);
  const bool usable =
      status.type() == fs::file_type::not_found || (fs::is_directory(status) && fs::is_empty(target_, error) && !error);
  detail::require(usable, "{}: expected a new or an empty directory", target.string());
  make_directories(target_.parent_path());
  const std::string prefix = fmt::format(".{}.{}.", target_.filename().string(), host_name());
  remove_leftovers(target_, prefix);
  temporary_ = target_.parent_path() / fmt::format("{}{}.tmp", prefix, ::getpid());
  fs::remove_all(temporary_, error);  // of a killed process that had this id
  make_directories(temporary_);
}

AtomicDirectory::~AtomicDirectory() {
  std::error_code ignored;
  if (!temporary_.empty()) fs::remove_all(temporary_, ignored);
}

void AtomicDirectory::commit() {
  std::error_code error;
  fs::rename(temporary_, target_, error);
  if (error) detail::fail_system(target_, "create", error.value());
  temporary_.clear();
  detail::sync_directory(target_.parent_path());
}

}  // namespace rowan
