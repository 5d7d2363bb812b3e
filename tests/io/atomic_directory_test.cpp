#include "rowan/io/atomic_directory.h"

#include <sys/wait.h>
#include <unistd.h>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan/io/atomic_file.h"
#include "support/files.h"

namespace rowan {

using test::ScratchDirectory;

TEST_CASE("an atomic directory appears at commit and not before", "[io]") {
  const ScratchDirectory scratch;
  const std::string name = GENERATE("new", "new/", "parent/new", "./new");
  AtomicDirectory directory(scratch / name);
  write_text_file(directory.path() / "file", "content");
  CHECK_FALSE(std::filesystem::exists(scratch / name));
  directory.commit();
  CHECK(test::read_file(scratch / name / "file") == "content");
  CHECK(directory.path().empty());
}

TEST_CASE("an atomic directory takes the place of an empty one, and of nothing else", "[io]") {
  const ScratchDirectory scratch;
  std::filesystem::create_directories(scratch / "empty");
  std::filesystem::create_symlink("empty", scratch / "link");
  AtomicDirectory directory(scratch / "link");
  write_text_file(directory.path() / "file", "content");
  directory.commit();
  CHECK(test::read_file(scratch / "empty/file") == "content");
  CHECK(std::filesystem::is_symlink(scratch / "link"));
  CHECK_THROWS_AS(AtomicDirectory(scratch / "empty"), Error);  // no longer empty
  CHECK_THROWS_AS(AtomicDirectory(scratch / "empty/file"), Error);
  CHECK_THROWS_AS(AtomicDirectory(scratch / "empty/file/new"), Error);
  std::filesystem::create_symlink("loop", scratch / "loop");
  CHECK_THROWS_AS(AtomicDirectory(scratch / "loop"), Error);
}

TEST_CASE("an atomic directory that is abandoned leaves nothing", "[io]") {
  const ScratchDirectory scratch;
  { const AtomicDirectory directory(scratch / "new"); }
  CHECK(std::filesystem::is_empty(scratch.path()));
}

TEST_CASE("what a killed process left of an atomic directory goes with the next one", "[io]") {
  const ScratchDirectory scratch;
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const AtomicDirectory directory(scratch / "new");
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK_FALSE(std::filesystem::is_empty(scratch.path()));
  { const AtomicDirectory other(scratch / "other"); }
  CHECK_FALSE(std::filesystem::is_empty(scratch.path()));
  { const AtomicDirectory directory(scratch / "new"); }
  CHECK(std::filesystem::is_empty(scratch.path()));
}

}  // namespace rowan
