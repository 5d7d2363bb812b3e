// Argument checks shared by the transformer operations. For .cpp files only.
#pragma once

#include <initializer_list>

#include "core/check.h"
#include "ops/head_view.h"

namespace rowan::detail {

/// What an operation accumulates in and what its saved statistics are stored as.
inline DType accumulator_dtype(DType dtype) { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

/// A tensor the operation computes with: floating, on the stream's device, not float64 on CUDA, adjacent columns.
inline void require_compute(const char* op, const char* name, const Tensor& t, StreamRef stream) {
  require_floating(op, name, t);
  require_on(op, name, t, stream);
  require_unit_columns(op, name, t);
  if (t.dtype() == DType::kFloat64 && !stream.device().is_cpu()) {
    fail(ErrorKind::kUnsupported, "{}: expected {} of dtype float32, bfloat16 or float16 on {}, got float64 (CPU only)",
         op, name, stream.device());
  }
}

/// A further operand of the same dtype, with the given shape.
inline void require_like(const char* op, const char* name, const Tensor& t, DType dtype, const Shape& shape,
                         StreamRef stream) {
  require_dtype(op, name, t, dtype);
  require_on(op, name, t, stream);
  require_shape(op, name, t, shape);
  require_unit_columns(op, name, t);
}

/// A contiguous operand: per-row statistics, weights, ids.
inline void require_packed(const char* op, const char* name, const Tensor& t, DType dtype, const Shape& shape,
                           StreamRef stream) {
  require_dtype(op, name, t, dtype);
  require_on(op, name, t, stream);
  require_shape(op, name, t, shape);
  require_contiguous(op, name, t);
}

/// Of rank 2 or 3.
inline HeadView head_view(const Tensor& t) { return {t.raw(), t.stride(0), t.rank() == 3 ? t.stride(1) : 0}; }

/// After the launch: storages that belong to other streams learn about this one.
inline void record_uses(StreamRef stream, std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* t : tensors) {
    if (t != nullptr && t->defined()) t->record_use(stream);
  }
}

}  // namespace rowan::detail
