// Tensors as rows of adjacent elements, for operations that treat every element alike. For .cpp files only.
#pragma once

#include <initializer_list>

#include "core/check.h"

namespace rowan::detail {

/// Throws unless the tensor is contiguous, or of rank 2 with adjacent columns.
inline void require_rows(const char* op, const char* name, const Tensor& t) {
  require_defined(op, name, t);
  require(
      t.is_contiguous() || (t.rank() == 2 && (t.size(1) == 1 || t.stride(1) == 1)),
      "{}: expected {} to be contiguous, or of rank 2 with adjacent columns, got strides that leave gaps (shape {})",
      op, name, t.shape());
}

/// Elements of a row such that every tensor (all of one shape, each passed by require_rows; undefined ones do not
/// count) consists of rows of that length: one row where all are contiguous.
inline std::int64_t common_cols(std::initializer_list<const Tensor*> tensors) {
  for (const Tensor* t : tensors) {
    if (t->defined() && !t->is_contiguous()) return t->size(1);
  }
  return (*tensors.begin())->elements();
}

/// Distance of two neighbouring rows of `cols` elements.
inline std::int64_t row_stride(const Tensor& t, std::int64_t cols) {
  return !t.defined() || t.is_contiguous() ? cols : t.stride(0);
}

}  // namespace rowan::detail
