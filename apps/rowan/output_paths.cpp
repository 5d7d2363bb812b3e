#include "output_paths.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <nlohmann/json.hpp>

#include "rowan/core/error.h"
#include "rowan/io/atomic_file.h"

namespace rowan::app {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(const std::string& cause) { throw Error(ErrorKind::kInvalidArgument, cause); }

fs::path resolved(const fs::path& path) {
  std::error_code error;
  fs::path result = fs::weakly_canonical(fs::absolute(path), error);
  if (error) return path;
  return result.has_filename() ? result : result.parent_path();  // "out/"
}

/// Whether `path` is `directory` or lies below it; both resolved.
bool lies_in(const fs::path& path, const fs::path& directory) {
  const auto [end, ignored] = std::mismatch(directory.begin(), directory.end(), path.begin(), path.end());
  return end == directory.end();
}

bool is_run_config(const fs::path& file) {
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 20;
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(read_text_file(file, kMostBytes));
  } catch (const std::exception&) {
    return false;
  }
  return json.is_object() && json.contains("seed") && json.contains("optimizer") && !json.contains("architectures");
}

}  // namespace

void require_output_file(const fs::path& out, const InputPaths& inputs) {
  const fs::path file = resolved(out);
  for (const auto& [name, input] : inputs) {
    if (input.empty()) continue;
    const fs::path from = resolved(input);
    if (file == from || (fs::is_directory(from) && lies_in(file, from) && fs::exists(file)))
      refuse(fmt::format("--out: {} is a file of {}", out.string(), name));
  }
}

void require_run_directory(const fs::path& out, const InputPaths& inputs) {
  const fs::path directory = resolved(out);
  for (const auto& [name, input] : inputs) {
    if (!input.empty() && lies_in(resolved(input), directory))
      refuse(fmt::format("--out: {} holds {}, whose files the run would replace", out.string(), name));
  }
  for (const char* name : {"adapter_config.json", "model.safetensors", "model.safetensors.index.json"}) {
    if (fs::exists(directory / name))
      refuse(fmt::format("--out: {} holds a model or an adapter ({})", out.string(), name));
  }
  const fs::path config = directory / "config.json";
  if (fs::exists(config) && !is_run_config(config))
    refuse(fmt::format("--out: {} has a config.json that is not a run's", out.string()));
}

RunLock::RunLock(const fs::path& directory) : directory_(directory), made_(!fs::exists(directory)) {
  const fs::path path = directory / ".lock";
  for (;;) {
    make_directories(directory);
    file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (file_ < 0) throw Error(ErrorKind::kIo, fmt::format("{}: cannot open: {}", path.string(), std::strerror(errno)));
    const bool taken = ::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    struct stat opened = {}, named = {};
    const bool alive = ::fstat(file_, &opened) == 0 && ::stat(path.c_str(), &named) == 0 &&
                       opened.st_dev == named.st_dev && opened.st_ino == named.st_ino;
    if (!taken && alive) return;
    ::close(file_);
    file_ = -1;
    if (taken) refuse(fmt::format("--out: another run writes to {}", directory.string()));
    // The run that made the directory removed the file before it was locked: nobody else would see this lock.
  }
}

RunLock::~RunLock() {
  std::error_code ignored;
  if (made_ && std::distance(fs::directory_iterator(directory_, ignored), fs::directory_iterator()) == 1) {
    fs::remove(directory_ / ".lock", ignored);
    fs::remove(directory_, ignored);
  }
  if (file_ >= 0) ::close(file_);
}

}  // namespace rowan::app
