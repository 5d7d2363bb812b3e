// A tensor as rows of adjacent elements, for operations that treat every element alike. For .cpp files only.
#pragma once

#include "core/check.h"

namespace rowan::detail {

struct RowView {
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t stride = 0;  ///< elements from one row to the next
};

/// A contiguous tensor is one row; otherwise rank 2 with unit column stride is required.
inline RowView row_view(const char* op, const char* name, const Tensor& t) {
  require_defined(op, name, t);
  if (t.is_contiguous()) return {1, t.elements(), t.elements()};
  require(t.rank() == 2 && (t.size(1) == 1 || t.stride(1) == 1),
          "{}: expected {} to be contiguous, or of rank 2 with adjacent columns, got strides that leave gaps (shape {})", op, name, t.shape());
  return {t.size(0), t.size(1), t.stride(0)};
}

}  // namespace rowan::detail
