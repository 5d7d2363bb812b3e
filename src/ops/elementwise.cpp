#include "rowan/ops/elementwise.h"

#include <cmath>

#include "core/check.h"
#include "ops/alias.h"
#include "ops/elementwise_backend.h"
#include "ops/matrix_ref.h"

namespace rowan {

namespace {

void require_computable(const char* op, const char* name, const Tensor& t, StreamRef stream) {
  detail::require_floating(op, name, t);
  detail::require_on(op, name, t, stream);
  if (stream.device().is_cuda() && t.dtype() == DType::kFloat64) {
    detail::fail(ErrorKind::kUnsupported, "{}: expected {} of dtype float32, bfloat16 or float16 on CUDA, got float64",
                 op, name);
  }
}

/// Distinct elements at distinct addresses.
void require_distinct(const char* op, const char* name, const MatrixRef& t) {
  const std::int64_t row = t.rows > 1 ? t.row_stride : 0, col = t.cols > 1 ? t.col_stride : 0;
  const bool row_major = t.rows <= 1 || (row > 0 && row >= (t.cols - 1) * col + 1);
  const bool col_major = t.cols <= 1 || (col > 0 && col >= (t.rows - 1) * row + 1);
  detail::require((t.rows <= 1 || row > 0) && (t.cols <= 1 || col > 0) && (row_major || col_major),
                  "{}: expected {} without coinciding elements, got row stride {} and column stride {}", op, name,
                  t.row_stride, t.col_stride);
}

bool same_view(const MatrixRef& a, const MatrixRef& b) {
  return a.data == b.data && a.rows == b.rows && a.cols == b.cols && a.row_stride == b.row_stride &&
         a.col_stride == b.col_stride;
}

void require_apart_or_same(const char* op, const char* out_name, const Tensor& out, const MatrixRef& out_view,
                           const char* name, const Tensor& t, const MatrixRef& view) {
  if (!same_view(out_view, view)) detail::require_apart(op, out_name, out, name, t);
}

void check_row_vector(const char* op, const Tensor& y, const Tensor& vector, StreamRef stream) {
  require_computable(op, "y", y, stream);
  detail::require_rank(op, "y", y, 2);
  detail::require_shape(op, "vector", vector, {y.size(1)});
  detail::require_dtype(op, "vector", vector, y.dtype());
  detail::require_on(op, "vector", vector, stream);
  detail::require_contiguous(op, "vector", vector);
  detail::require_apart(op, "y", y, "vector", vector);
}

/// The rows of a rank-2 tensor, never merged to one.
MatrixRef rows_of(const Tensor& t) { return {t.raw(), t.dtype(), t.size(0), t.size(1), t.stride(0), t.stride(1)}; }

}  // namespace

void cast(const Tensor& src, Tensor& dst, StreamRef stream) {
  require_computable("cast", "src", src, stream);
  require_computable("cast", "dst", dst, stream);
  detail::require_shape("cast", "dst", dst, src.shape());
  detail::require_apart("cast", "dst", dst, "src", src);
  if (dst.elements() == 0) return;
  MatrixRef from = detail::matrix_ref("cast", "src", src), to = detail::matrix_ref("cast", "dst", dst);
  detail::match_rows({&from, &to}, src.rank() > 0 ? src.size(-1) : 1);
  require_distinct("cast", "dst", to);
  if (stream.device().is_cuda()) {
    cuda::cast(from, to, stream);
  } else {
    cpu::cast(from, to);
  }
  src.record_use(stream);
  dst.record_use(stream);
}

void fill(Tensor& t, double value, StreamRef stream) {
  require_computable("fill", "t", t, stream);
  if (t.elements() == 0) return;
  const MatrixRef view = detail::matrix_ref("fill", "t", t);
  if (stream.device().is_cuda()) {
    cuda::fill(view, value, stream);
  } else {
    cpu::fill(view, value);
  }
  t.record_use(stream);
}

void scale(Tensor& t, double factor, StreamRef stream) {
  require_computable("scale", "t", t, stream);
  detail::require(std::isfinite(factor), "scale: expected a finite factor, got {}", factor);
  if (factor == 0) return fill(t, 0, stream);
  if (t.elements() == 0 || factor == 1) return;
  const MatrixRef view = detail::matrix_ref("scale", "t", t);
  require_distinct("scale", "t", view);
  if (stream.device().is_cuda()) {
    cuda::scale(view, factor, stream);
  } else {
    cpu::scale(view, factor);
  }
  t.record_use(stream);
}

void add(const Tensor& a, const Tensor& b, Tensor& out, StreamRef stream) {
  require_computable("add", "a", a, stream);
  require_computable("add", "b", b, stream);
  require_computable("add", "out", out, stream);
  detail::require_shape("add", "b", b, a.shape());
  detail::require_shape("add", "out", out, a.shape());
  detail::require_dtype("add", "b", b, a.dtype());
  detail::require_dtype("add", "out", out, a.dtype());
  if (out.elements() == 0) return;
  MatrixRef a_view = detail::matrix_ref("add", "a", a), b_view = detail::matrix_ref("add", "b", b),
            out_view = detail::matrix_ref("add", "out", out);
  detail::match_rows({&a_view, &b_view, &out_view}, a.rank() > 0 ? a.size(-1) : 1);
  require_distinct("add", "out", out_view);
  require_apart_or_same("add", "out", out, out_view, "a", a, a_view);
  require_apart_or_same("add", "out", out, out_view, "b", b, b_view);
  if (stream.device().is_cuda()) {
    cuda::add(a_view, b_view, out_view, stream);
  } else {
    cpu::add(a_view, b_view, out_view);
  }
  a.record_use(stream);
  b.record_use(stream);
  out.record_use(stream);
}

void add_row_vector(Tensor& y, const Tensor& vector, StreamRef stream) {
  check_row_vector("add_row_vector", y, vector, stream);
  if (y.elements() == 0) return;
  const MatrixRef view = rows_of(y);
  require_distinct("add_row_vector", "y", view);
  if (stream.device().is_cuda()) {
    cuda::add_row_vector(view, vector.raw(), stream);
  } else {
    cpu::add_row_vector(view, vector.raw());
  }
  y.record_use(stream);
  vector.record_use(stream);
}

void broadcast_row(const Tensor& vector, Tensor& y, StreamRef stream) {
  check_row_vector("broadcast_row", y, vector, stream);
  if (y.elements() == 0) return;
  const MatrixRef view = rows_of(y);
  require_distinct("broadcast_row", "y", view);
  if (stream.device().is_cuda()) {
    cuda::broadcast_row(vector.raw(), view, stream);
  } else {
    cpu::broadcast_row(vector.raw(), view);
  }
  y.record_use(stream);
  vector.record_use(stream);
}

void sum_rows(const Tensor& x, Tensor& out, StreamRef stream, double beta) {
  constexpr const char* kOp = "sum_rows";
  require_computable(kOp, "x", x, stream);
  detail::require_rank(kOp, "x", x, 2);
  detail::require_shape(kOp, "out", out, {x.size(1)});
  detail::require_dtype(kOp, "out", out, x.dtype() == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32);
  detail::require_on(kOp, "out", out, stream);
  detail::require_contiguous(kOp, "out", out);
  detail::require_apart(kOp, "out", out, "x", x);
  detail::require(std::isfinite(beta), "sum_rows: expected a finite beta, got {}", beta);
  if (x.elements() == 0) return scale(out, beta, stream);
  const MatrixRef view = rows_of(x);
  if (stream.device().is_cuda()) {
    const Tensor partial = Tensor::empty({sum_rows_chunks(view.rows), view.cols}, DType::kFloat32, stream);
    cuda::sum_rows(view, partial.data<float>(), out.data<float>(), beta, stream);
  } else {
    cpu::sum_rows(view, out.raw(), beta);
  }
  x.record_use(stream);
  out.record_use(stream);
}

void sum(const Tensor& x, Tensor& out, StreamRef stream) {
  require_computable("sum", "x", x, stream);
  detail::require_shape("sum", "out", out, {1});
  detail::require_dtype("sum", "out", out, DType::kFloat64);
  detail::require_on("sum", "out", out, stream);
  detail::require_apart("sum", "out", out, "x", x);
  if (x.elements() == 0) return out.zero(stream);
  const MatrixRef view = detail::matrix_ref("sum", "x", x);
  const Tensor partial = Tensor::empty({sum_chunks(x.elements())}, DType::kFloat64, stream);
  if (stream.device().is_cuda()) {
    cuda::sum(view, partial.data<double>(), out.data<double>(), stream);
  } else {
    cpu::sum(view, partial.data<double>(), out.data<double>());
  }
  x.record_use(stream);
  out.record_use(stream);
}

}  // namespace rowan
