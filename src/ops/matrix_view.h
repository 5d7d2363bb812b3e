// A tensor as a batch of matrices with rows of adjacent elements. For .cpp files only.
#pragma once

#include "core/check.h"

namespace rowan::detail {

/// Element (b, i, j) lies at b * batch_stride + i * row_stride + j.
struct MatrixView {
  std::int64_t batches = 1;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
};

/// Whether the leading dimensions of t (all but the last two) can be walked with one stride, which is then `stride`.
inline bool leading_stride(const Tensor& t, std::int64_t& stride) {
  stride = 0;
  std::int64_t extent = 1;  // of what is walked so far
  for (int d = t.rank() - 3; d >= 0; --d) {
    if (t.size(d) == 1) continue;
    if (extent > 1 && t.stride(d) != stride * extent) return false;
    if (extent == 1) stride = t.stride(d);
    extent *= t.size(d);
  }
  return true;
}

/// Rank 2 to 4, last stride 1, leading dimensions that one stride walks.
inline MatrixView matrix_view(const char* op, const char* name, const Tensor& t) {
  require_defined(op, name, t);
  require(t.rank() >= 2 && t.rank() <= 4, "{}: expected {} of rank 2 to 4, got shape {}", op, name, t.shape());
  require_unit_columns(op, name, t);
  MatrixView view;
  view.rows = t.size(-2);
  view.cols = t.size(-1);
  for (int d = 0; d < t.rank() - 2; ++d) view.batches *= t.size(d);
  view.row_stride = t.stride(-2);
  require(leading_stride(t, view.batch_stride),
          "{}: expected {} with leading dimensions that one stride walks, got shape {}", op, name, t.shape());
  return view;
}

}  // namespace rowan::detail
