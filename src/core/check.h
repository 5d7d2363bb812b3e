// Argument checks with messages in the library's form "op: expected …, got …". For .cpp files only (fmt does not
// compile in .cu).
#pragma once

#include <fmt/format.h>

#include <string>
#include <utility>

#include "rowan/core/device.h"
#include "rowan/core/dtype.h"
#include "rowan/core/error.h"
#include "rowan/core/shape.h"
#include "rowan/core/tensor.h"

template <>
struct fmt::formatter<rowan::Shape> : fmt::formatter<std::string> {
  auto format(const rowan::Shape& shape, fmt::format_context& context) const {
    return fmt::formatter<std::string>::format(rowan::to_string(shape), context);
  }
};
template <>
struct fmt::formatter<rowan::DType> : fmt::formatter<std::string> {
  auto format(rowan::DType dtype, fmt::format_context& context) const {
    return fmt::formatter<std::string>::format(rowan::to_string(dtype), context);
  }
};
template <>
struct fmt::formatter<rowan::Device> : fmt::formatter<std::string> {
  auto format(rowan::Device device, fmt::format_context& context) const {
    return fmt::formatter<std::string>::format(rowan::to_string(device), context);
  }
};

namespace rowan::detail {

template <class... Args>
[[noreturn]] void fail(ErrorKind kind, fmt::format_string<Args...> format, Args&&... args) {
  throw Error(kind, fmt::format(format, std::forward<Args>(args)...));
}

/// Throws InvalidArgument with the formatted message unless `condition` holds; formats only then.
template <class... Args>
void require(bool condition, fmt::format_string<Args...> format, Args&&... args) {
  if (!condition) fail(ErrorKind::kInvalidArgument, format, std::forward<Args>(args)...);
}

/// Checks one tensor argument of an operation at a time.
inline void require_defined(const char* op, const char* name, const Tensor& t) {
  require(t.defined(), "{}: expected {} to be a tensor, got an undefined one", op, name);
}
inline void require_shape(const char* op, const char* name, const Tensor& t, const Shape& shape) {
  require_defined(op, name, t);
  require(t.shape() == shape, "{}: expected {} of shape {}, got {}", op, name, shape, t.shape());
}
inline void require_rank(const char* op, const char* name, const Tensor& t, int rank) {
  require_defined(op, name, t);
  require(t.rank() == rank, "{}: expected {} of rank {}, got shape {}", op, name, rank, t.shape());
}
inline void require_dtype(const char* op, const char* name, const Tensor& t, DType dtype) {
  require_defined(op, name, t);
  require(t.dtype() == dtype, "{}: expected {} of dtype {}, got {}", op, name, dtype, t.dtype());
}
inline void require_floating(const char* op, const char* name, const Tensor& t) {
  require_defined(op, name, t);
  require(is_floating(t.dtype()), "{}: expected {} of a floating dtype, got {}", op, name, t.dtype());
}
/// The tensor lives where the stream runs.
inline void require_on(const char* op, const char* name, const Tensor& t, StreamRef stream) {
  require_defined(op, name, t);
  require(t.device() == stream.device(), "{}: expected {} on {} (the stream's device), got {}", op, name,
          stream.device(), t.device());
}
/// Elements of a row are adjacent; rows may be apart.
inline void require_unit_columns(const char* op, const char* name, const Tensor& t) {
  require_defined(op, name, t);
  require(t.rank() > 0 && (t.size(-1) <= 1 || t.stride(-1) == 1),
          "{}: expected {} with adjacent columns (last stride 1), got shape {}", op, name, t.shape());
}
inline void require_contiguous(const char* op, const char* name, const Tensor& t) {
  require_defined(op, name, t);
  require(t.is_contiguous(), "{}: expected {} to be contiguous, got strides that leave gaps (shape {})", op, name,
          t.shape());
}

}  // namespace rowan::detail
