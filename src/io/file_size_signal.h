// A file size limit as an error instead of a signal.
#pragma once

#include <csignal>
#include <ctime>

namespace rowan::detail {

/// Holds back SIGXFSZ on this thread, so that a file size limit is an error (EFBIG) and does not end the process.
class FileSizeSignalBlock {
 public:
  FileSizeSignalBlock() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGXFSZ);
    pthread_sigmask(SIG_BLOCK, &signals_, &previous_);
  }
  ~FileSizeSignalBlock() {
    const timespec now{};
    if (sigismember(&previous_, SIGXFSZ) == 0)
      sigtimedwait(&signals_, nullptr, &now);  // takes away the one that a write raised
    pthread_sigmask(SIG_SETMASK, &previous_, nullptr);
  }
  FileSizeSignalBlock(const FileSizeSignalBlock&) = delete;
  FileSizeSignalBlock& operator=(const FileSizeSignalBlock&) = delete;

 private:
  sigset_t signals_{};
  sigset_t previous_{};
};

}  // namespace rowan::detail
