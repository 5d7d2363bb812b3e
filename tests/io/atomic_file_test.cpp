#include "rowan/io/atomic_file.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <optional>

#include "catch.h"
#include "rowan/core/error.h"
#include "support/files.h"

namespace rowan {

using test::read_file;
using test::ScratchDirectory;
using test::write_file;

namespace {

/// The largest file that this process may write, lowered while it lives.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &previous_);
    const rlimit lowered{bytes, previous_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &lowered);
  }
  ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &previous_); }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit previous_{};
};

template <class F>
std::optional<ErrorKind> error_of(const F& call, std::string* message = nullptr) {
  try {
    call();
    return std::nullopt;
  } catch (const Error& error) {
    if (message != nullptr) *message = error.what();
    return error.kind();
  }
}

auto entries(const std::filesystem::path& directory) {
  return std::distance(std::filesystem::directory_iterator(directory), std::filesystem::directory_iterator());
}

}  // namespace

TEST_CASE("an atomic file appears at commit and not before", "[io]") {
  ScratchDirectory scratch;
  const auto path = scratch / "file";
  write_file(path, "old");
  {
    AtomicFile file(path);
    file.write("new ");
    file.write("content");
    CHECK(read_file(path) == "old");
    file.commit();
  }
  CHECK(read_file(path) == "new content");
  CHECK(entries(scratch.path()) == 1);
}

TEST_CASE("an atomic file that is abandoned leaves the old one and nothing else", "[io]") {
  ScratchDirectory scratch;
  const auto path = scratch / "file";
  write_file(path, "old");
  { AtomicFile(path).write("half"); }
  CHECK(read_file(path) == "old");
  CHECK(entries(scratch.path()) == 1);
}

TEST_CASE("a file size limit is an error that leaves the old file, and writing can go on", "[io]") {
  ScratchDirectory scratch;
  const auto path = scratch / "file";
  write_text_file(path, "old");
  std::string message;
  {
    const FileSizeLimit limit(1 << 16);
    CHECK(error_of([&] { write_text_file(path, std::string(1 << 20, 'x')); }, &message) == ErrorKind::kIo);
  }
  CHECK(message.find(path.string()) != message.npos);
  CHECK(message.find("too large") != message.npos);
  CHECK(read_file(path) == "old");
  CHECK(entries(scratch.path()) == 1);
  write_text_file(path, "new");
  CHECK(read_file(path) == "new");
}

TEST_CASE("a full device is an error", "[io]") {
  std::string message;
  CHECK(error_of([] { write_text_file("/dev/full", "text"); }, &message) == ErrorKind::kIo);
  CHECK(message.find("No space left") != message.npos);
  CHECK(::access("/dev/full", F_OK) == 0);
  write_text_file("/dev/null", "text");
}

TEST_CASE("an atomic file follows links and keeps permissions", "[io]") {
  ScratchDirectory scratch;
  write_file(scratch / "target", "old");
  ::chmod((scratch / "target").c_str(), 0640);
  std::filesystem::create_symlink("target", scratch / "link");
  write_text_file(scratch / "link", "new");
  CHECK(std::filesystem::is_symlink(scratch / "link"));
  CHECK(read_file(scratch / "target") == "new");
  struct stat status {};
  ::stat((scratch / "target").c_str(), &status);
  CHECK((status.st_mode & 0777) == 0640);
}

TEST_CASE("an atomic file over a loop of links is an error, and the loop stays", "[io]") {
  ScratchDirectory scratch;
  std::filesystem::create_symlink("loop", scratch / "loop");
  std::string message;
  CHECK(error_of([&] { write_text_file(scratch / "loop", "text"); }, &message) == ErrorKind::kIo);
  CHECK(message.find("Too many levels") != message.npos);
  CHECK(std::filesystem::is_symlink(scratch / "loop"));
}

TEST_CASE("a file is copied whole, in the place of another", "[io]") {
  ScratchDirectory scratch;
  const std::string content(5 << 20, 'c');  // more than the buffer
  write_file(scratch / "from", content);
  write_file(scratch / "to", "old");
  copy_file_atomically(scratch / "from", scratch / "to");
  CHECK(read_file(scratch / "to") == content);
  CHECK(error_of([&] { copy_file_atomically(scratch / "absent", scratch / "to"); }) == ErrorKind::kIo);
  CHECK(read_file(scratch / "to") == content);
}

TEST_CASE("an atomic file in a missing directory, or over a directory, is an error that names it", "[io]") {
  ScratchDirectory scratch;
  std::string message;
  CHECK(error_of([&] { AtomicFile file(scratch / "absent/file"); }, &message) == ErrorKind::kIo);
  CHECK(message.find("absent") != message.npos);
  CHECK(error_of([&] { AtomicFile file(scratch.path()); }) == ErrorKind::kIo);
}

TEST_CASE("a process killed while it writes leaves the old or the new file", "[io]") {
  ScratchDirectory scratch;
  const auto path = scratch / "file";
  constexpr std::size_t kSize = 1 << 18;
  write_text_file(path, std::string(kSize, 'a'));
  for (int round = 0; round < 20; ++round) {
    const pid_t child = ::fork();
    if (child == 0) {
      for (char c = 'a';; c = c == 'z' ? 'a' : static_cast<char>(c + 1)) write_text_file(path, std::string(kSize, c));
    }
    ::usleep(static_cast<useconds_t>(2000 + 1700 * round));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const std::string content = read_file(path);
    REQUIRE(content.size() == kSize);
    REQUIRE(std::count(content.begin(), content.end(), content[0]) == static_cast<std::ptrdiff_t>(kSize));
  }
}

TEST_CASE("read_text_file enforces its limit and takes regular files only", "[io]") {
  ScratchDirectory scratch;
  write_file(scratch / "file", "12345");
  CHECK(read_text_file(scratch / "file", 5) == "12345");
  CHECK(error_of([&] { read_text_file(scratch / "file", 4); }) == ErrorKind::kFormat);
  CHECK(error_of([&] { read_text_file(scratch / "absent", 4); }) == ErrorKind::kIo);
  REQUIRE(::mkfifo((scratch / "pipe").c_str(), 0600) == 0);
  CHECK(error_of([&] { read_text_file(scratch / "pipe", 4); }) == ErrorKind::kIo);  // and does not wait for a writer
}

TEST_CASE("make_directories makes parents, and says when it cannot", "[io]") {
  ScratchDirectory scratch;
  make_directories(scratch / "a/b/c");
  make_directories(scratch / "a/b/c");
  CHECK(std::filesystem::is_directory(scratch / "a/b/c"));
  write_file(scratch / "file", "");
  CHECK(error_of([&] { make_directories(scratch / "file/below"); }) == ErrorKind::kIo);
}

}  // namespace rowan
