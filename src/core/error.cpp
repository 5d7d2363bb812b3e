#include "rowan/core/error.h"

namespace rowan {

const char* to_string(ErrorKind kind) noexcept {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return "InvalidArgument";
    case ErrorKind::kUnsupported:
      return "Unsupported";
    case ErrorKind::kOutOfMemory:
      return "OutOfMemory";
    case ErrorKind::kCuda:
      return "Cuda";
    case ErrorKind::kCublas:
      return "Cublas";
    case ErrorKind::kNccl:
      return "Nccl";
    case ErrorKind::kIo:
      return "Io";
    case ErrorKind::kFormat:
      return "Format";
    case ErrorKind::kComm:
      return "Comm";
    case ErrorKind::kInterrupted:
      return "Interrupted";
  }
  return "Error";
}

}  // namespace rowan
