// What may be written where: a command's output never takes the place of its input, nor of something foreign.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace rowan::app {

/// Options that name inputs, with what was given; empty paths are passed over.
using InputPaths = std::vector<std::pair<std::string, std::filesystem::path>>;

/// Throws InvalidArgument where a file to be written is an input, or lies in an input directory under the name of a
/// file that is there.
void require_output_file(const std::filesystem::path& out, const InputPaths& inputs);

/// Throws InvalidArgument where `out` is or contains an input directory, holds a model or an adapter, or has a
/// config.json that is not a run's.
void require_run_directory(const std::filesystem::path& out, const InputPaths& inputs);

/// Holds a run's directory, which it makes, for this process alone; takes it away again where nothing was written.
class RunLock {
 public:
  /// Throws InvalidArgument where another process holds it. File systems without locks are taken as they are.
  explicit RunLock(const std::filesystem::path& directory);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  std::filesystem::path directory_;
  bool made_ = false;
  int file_ = -1;
};

}  // namespace rowan::app
