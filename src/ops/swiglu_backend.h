// Private backend of SwiGLU: the same calls for both devices.
#pragma once

#include <cstdint>

#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

/// [rows, width] with unit column stride.
struct SwigluMatrix {
  void* data = nullptr;
  std::int64_t stride = 0;
};

struct SwigluArguments {
  std::int64_t rows = 0;
  std::int64_t width = 0;
  DType dtype = DType::kFloat32;
  SwigluMatrix gate;
  SwigluMatrix up;
  SwigluMatrix out;               ///< forward
  SwigluMatrix dout, dgate, dup;  ///< backward
};

// rows and width are at least 1.
namespace cpu {
void swiglu_forward(const SwigluArguments& arguments);
void swiglu_backward(const SwigluArguments& arguments);
}  // namespace cpu
namespace cuda {
void swiglu_forward(const SwigluArguments& arguments, StreamRef stream);
void swiglu_backward(const SwigluArguments& arguments, StreamRef stream);
}  // namespace cuda

}  // namespace rowan
