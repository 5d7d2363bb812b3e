#include "rowan/io/atomic_directory.h"

#include <unistd.h>

#include "core/check.h"
#include "io/input_file.h"
#include "io/sync_directory.h"
#include "rowan/io/atomic_file.h"

namespace rowan {

namespace fs = std::filesystem;

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
  temporary_ = target_.parent_path() / fmt::format(".{}.{}.tmp", target_.filename().string(), ::getpid());
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
