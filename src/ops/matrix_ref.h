// Tensors as matrices with any strides, for elementwise operations. For .cpp files only.
#pragma once

#include <initializer_list>

#include "core/check.h"
#include "ops/elementwise_backend.h"

namespace rowan::detail {

/// A contiguous tensor is one row; otherwise all dimensions but the last become the rows. Throws InvalidArgument where
/// they do not step evenly through memory. At least one element.
inline MatrixRef matrix_ref(const char* op, const char* name, const Tensor& t) {
  MatrixRef view{t.raw(), t.dtype(), 1, t.elements(), t.elements(), 1};
  if (t.is_contiguous()) return view;
  view.cols = t.size(-1);
  view.rows = t.elements() / view.cols;
  view.col_stride = t.stride(-1);
  view.row_stride = 0;
  std::int64_t outer = 1;  // rows covered by the dimensions looked at so far
  for (int d = t.rank() - 2; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    if (outer == 1) view.row_stride = t.stride(d);
    require(t.stride(d) == view.row_stride * outer,
            "{}: expected {} whose leading dimensions step evenly through memory, got shape {}", op, name, t.shape());
    outer *= t.size(d);
  }
  return view;
}

/// Cuts contiguous views (one long row) to the rows of the others, so that elements of one index pair belong together.
inline void match_rows(std::initializer_list<MatrixRef*> views, std::int64_t cols) {
  bool flat = true;
  for (const MatrixRef* view : views) flat = flat && view->rows == 1;
  if (flat) return;
  for (MatrixRef* view : views) {
    if (view->rows == 1 && view->cols != cols) {
      view->rows = view->cols / cols;
      view->cols = cols;
      view->row_stride = cols;
    }
  }
}

}  // namespace rowan::detail
