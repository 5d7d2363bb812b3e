// Private backend of dropout: the same call for both devices.
#pragma once

#include "ops/dropout_mask.h"
#include "ops/elementwise_backend.h"
#include "rowan/ops/dropout.h"

namespace rowan {

namespace detail {
/// Checks a mask of the operation `op` and turns it into what kernels take; p = 0 gives an inactive one. Throws
/// InvalidArgument.
MaskArguments mask_arguments(const char* op, const DropoutMask& mask, StreamRef stream);
}  // namespace detail

namespace cpu {
void dropout(const MatrixRef& x, const MaskArguments& mask, const MatrixRef& y);
}
namespace cuda {
void dropout(const MatrixRef& x, const MaskArguments& mask, const MatrixRef& y, StreamRef stream);
}

}  // namespace rowan
