// How the program ends.
#pragma once

#include "rowan/core/error.h"

namespace rowan::app {

/// Statuses of the program, as its help states them.
enum ExitCode : int {
  kDone = 0,
  kFailed = 1,   ///< failed while running
  kUsage = 2,    ///< wrong options or configuration
  kBadData = 3,  ///< a data file, model or checkpoint is missing or malformed
  kOutOfMemory = 4,
  kInterrupted = 130,  ///< SIGINT, after saving; 143 for SIGTERM
};

/// Thrown by a command that a signal has ended, after it has saved: the status is 128 + signal.
struct Interrupted {
  int signal;
};

inline ExitCode exit_code(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
    case ErrorKind::kUnsupported:
      return kUsage;
    case ErrorKind::kFormat:
      return kBadData;
    case ErrorKind::kOutOfMemory:
      return kOutOfMemory;
    case ErrorKind::kInterrupted:
      return kInterrupted;
    default:
      return kFailed;
  }
}

/// Runs a step that reads the user's files: where the operating system refuses one (it is missing, or not readable), or
/// it asks for what this library does not do, that is bad data, not a failure of the run nor a wrong option.
template <class F>
decltype(auto) reading_input(const F& step) {
  try {
    return step();
  } catch (const Error& error) {
    const bool of_the_file = error.kind() == ErrorKind::kIo || error.kind() == ErrorKind::kUnsupported ||
                             error.kind() == ErrorKind::kInvalidArgument;
    throw Error(of_the_file ? ErrorKind::kFormat : error.kind(), error.what());
  }
}

}  // namespace rowan::app
