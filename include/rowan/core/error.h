// The one exception type of the library.
#pragma once

#include <stdexcept>
#include <string>

namespace rowan {

/// What kind of failure an Error reports; programs map it to exit codes.
enum class ErrorKind {
  kInvalidArgument,  ///< a shape, dtype, stride, device or value that the operation does not take
  kUnsupported,      ///< valid, but this build or device cannot do it
  kOutOfMemory,      ///< an allocation failed; the message holds the byte count
  kCuda,             ///< a CUDA runtime call or kernel failed
  kCublas,           ///< a cuBLAS or cuBLASLt call failed
  kNccl,             ///< an NCCL call failed
  kIo,               ///< the operating system refused a file operation
  kFormat,           ///< a file's content is malformed or does not fit
  kComm,             ///< a peer rank failed, left or missed a deadline
  kInterrupted,      ///< the caller asked to stop
};

/// Name of a kind, for example "InvalidArgument".
const char* to_string(ErrorKind kind) noexcept;

/// Thrown by every function of the library that fails. The message names the operation and both values:
/// "rms_norm: expected weight of shape [64], got [32]". Unless a function says otherwise, a throw leaves all tensors
/// untouched.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace rowan
