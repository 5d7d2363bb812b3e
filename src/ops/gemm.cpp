#include "rowan/ops/gemm.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "ops/alias.h"
#include "ops/gemm_backend.h"
#include "rowan/ops/elementwise.h"

namespace rowan {

namespace {

constexpr const char* kOp = "gemm";

/// The last two dimensions as an operand; extents of 1 have free strides.
GemmOperand operand(const char* name, const Tensor& t) {
  const std::int64_t rows = t.size(-2), cols = t.size(-1), row_stride = t.stride(-2), col_stride = t.stride(-1);
  GemmOperand result;
  result.data = t.raw();
  result.batch_stride = t.rank() == 3 && t.size(0) > 1 ? t.stride(0) : 0;
  if ((cols <= 1 || col_stride == 1) && (rows <= 1 || row_stride >= cols)) {
    result.ld = rows <= 1 ? std::max<std::int64_t>(cols, 1) : row_stride;
    return result;
  }
  detail::require(
      (rows <= 1 || row_stride == 1) && (cols <= 1 || col_stride >= rows),
      "gemm: expected {} with unit stride in one of its last two dimensions, got shape {} with strides {} and {}", name,
      t.shape(), row_stride, col_stride);
  result.ld = cols <= 1 ? std::max<std::int64_t>(rows, 1) : col_stride;
  result.transposed = true;
  return result;
}

void check_addend(const Tensor& addend, const Tensor& c, StreamRef stream) {
  detail::require_shape(kOp, "addend", addend, c.shape());
  detail::require_dtype(kOp, "addend", addend, c.dtype());
  detail::require_on(kOp, "addend", addend, stream);
  for (int d = 0; d < c.rank(); ++d) {
    detail::require(c.size(d) <= 1 || addend.stride(d) == c.stride(d),
                    "gemm: expected an addend with c's strides, got {} for {} in dimension {}", addend.stride(d),
                    c.stride(d), d);
  }
  if (addend.raw() != c.raw()) detail::require_apart(kOp, "c", c, "addend", addend);
}

}  // namespace

void gemm(const Tensor& a, const Tensor& b, Tensor& c, StreamRef stream, const GemmOptions& options) {
  detail::require_floating(kOp, "a", a);
  detail::require(a.rank() == 2 || a.rank() == 3, "gemm: expected a of rank 2 or 3, got shape {}", a.shape());
  detail::require_rank(kOp, "b", b, a.rank());
  detail::require_rank(kOp, "c", c, a.rank());
  GemmArguments arguments;
  arguments.batch = a.rank() == 3 ? a.size(0) : 1;
  arguments.m = a.size(-2);
  arguments.k = a.size(-1);
  arguments.n = b.size(-1);
  detail::require_shape(kOp, "b", b, a.shape().with(-2, arguments.k).with(-1, arguments.n));
  detail::require_shape(kOp, "c", c, a.shape().with(-1, arguments.n));
  detail::require_dtype(kOp, "b", b, a.dtype());
  detail::require(c.dtype() == a.dtype() || (c.dtype() == DType::kFloat32 && a.dtype() != DType::kFloat64),
                  "gemm: expected c of dtype {} or float32, got {}", a.dtype(), c.dtype());
  detail::require_on(kOp, "a", a, stream);
  detail::require_on(kOp, "b", b, stream);
  detail::require_on(kOp, "c", c, stream);
  detail::require(std::isfinite(options.alpha) && std::isfinite(options.beta),
                  "gemm: expected finite alpha and beta, got {} and {}", options.alpha, options.beta);
  if (stream.device().is_cuda() && a.dtype() == DType::kFloat64) {
    detail::fail(ErrorKind::kUnsupported, "gemm: expected float32, bfloat16 or float16 on CUDA, got float64");
  }

  arguments.a = operand("a", a);
  arguments.b = operand("b", b);
  const GemmOperand c_operand = operand("c", c);
  detail::require(!c_operand.transposed,
                  "gemm: expected c with adjacent columns (last stride 1), got shape {} with strides {} and {}",
                  c.shape(), c.stride(-2), c.stride(-1));
  arguments.c = c.raw();
  arguments.ldc = c_operand.ld;
  arguments.c_batch_stride = c_operand.batch_stride;
  const std::int64_t last = arguments.batch - 1, matrix = (arguments.m - 1) * arguments.ldc + arguments.n;
  detail::require(
      last <= 0 || arguments.c_batch_stride >= matrix ||
          (arguments.c_batch_stride >= arguments.n &&
           (arguments.m == 1 || arguments.ldc >= last * arguments.c_batch_stride + arguments.n)),
      "gemm: expected matrices of c that do not overlap, got batch stride {} and row stride {} for shape {}",
      arguments.c_batch_stride, arguments.ldc, c.shape());
  detail::require_apart(kOp, "c", c, "a", a);
  detail::require_apart(kOp, "c", c, "b", b);
  if (options.addend) {
    check_addend(*options.addend, c, stream);
    arguments.addend = options.addend->raw();
  }
  if (c.elements() == 0) return;

  arguments.dtype = a.dtype();
  arguments.c_dtype = c.dtype();
  arguments.alpha = options.alpha;
  arguments.beta = options.beta;
  arguments.allow_tf32 = options.allow_tf32;
  if (arguments.k == 0) {
    if (options.addend && options.beta != 0) c.copy_from(*options.addend, stream);
    for (std::int64_t i = 0; i < arguments.batch; ++i) {
      Tensor matrix_of_c = c.rank() == 3 ? c.select(0, i) : c;
      scale(matrix_of_c, options.beta, stream);
    }
  } else if (stream.device().is_cuda()) {
    cuda::gemm(arguments, stream);
  } else {
    cpu::gemm(arguments);
  }
  a.record_use(stream);
  b.record_use(stream);
  c.record_use(stream);
  if (options.addend) options.addend->record_use(stream);
}

}  // namespace rowan
