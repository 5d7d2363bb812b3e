#include "rowan/ops/rms_norm.h"

#include <cmath>

#include "ops/operands.h"
#include "ops/rms_norm_backend.h"

namespace rowan {

namespace {

using namespace detail;

/// Everything but the last dimension.
Shape row_shape(const Tensor& x) { return x.rank() == 3 ? Shape{x.size(0), x.size(1)} : Shape{x.size(0)}; }

RmsNormArguments check(const char* op, const Tensor& x, const Tensor& weight, const Tensor& rstd, StreamRef stream) {
  require_compute(op, "x", x, stream);
  require(x.rank() == 2 || x.rank() == 3, "{}: expected x of rank 2 or 3, got shape {}", op, x.shape());
  require_packed(op, "weight", weight, x.dtype(), {x.size(-1)}, stream);
  require_packed(op, "rstd", rstd, accumulator_dtype(x.dtype()), row_shape(x), stream);

  RmsNormArguments arguments;
  arguments.tokens = x.size(0);
  arguments.heads = x.rank() == 3 ? x.size(1) : 1;
  arguments.width = x.size(-1);
  arguments.dtype = x.dtype();
  arguments.x = head_view(x);
  arguments.weight = weight.raw();
  arguments.rstd = rstd.raw();
  return arguments;
}

}  // namespace

void rms_norm_forward(const Tensor& x, const Tensor& weight, double eps, Tensor& y, Tensor& rstd, StreamRef stream) {
  const char* const op = "rms_norm_forward";
  RmsNormArguments arguments = check(op, x, weight, rstd, stream);
  require_like(op, "y", y, x.dtype(), x.shape(), stream);
  require(std::isfinite(eps) && eps >= 0, "{}: expected a finite eps >= 0, got {}", op, eps);
  arguments.y = head_view(y);
  arguments.eps = eps;
  if (x.elements() == 0) return;
  if (stream.device().is_cpu()) {
    cpu::rms_norm_forward(arguments);
  } else {
    cuda::rms_norm_forward(arguments, stream);
    record_uses(stream, {&x, &weight, &y, &rstd});
  }
}

void rms_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& weight, const Tensor& rstd, Tensor& dx,
                       Tensor* dweight, StreamRef stream, double dx_beta) {
  const char* const op = "rms_norm_backward";
  RmsNormArguments arguments = check(op, x, weight, rstd, stream);
  require_like(op, "dy", dy, x.dtype(), x.shape(), stream);
  require_like(op, "dx", dx, x.dtype(), x.shape(), stream);
  require(std::isfinite(dx_beta), "{}: expected a finite dx_beta, got {}", op, dx_beta);
  if (dweight != nullptr) require_packed(op, "dweight", *dweight, rstd.dtype(), weight.shape(), stream);
  arguments.dy = head_view(dy);
  arguments.dx = head_view(dx);
  arguments.dx_beta = dx_beta;
  if (x.elements() == 0) return;
  Tensor partials;
  if (dweight != nullptr) {
    partials = Tensor::empty({rms_norm_chunks(arguments.rows()), arguments.width}, rstd.dtype(), stream);
    arguments.dweight = dweight->raw();
    arguments.partials = partials.raw();
  }
  if (stream.device().is_cpu()) {
    cpu::rms_norm_backward(arguments);
  } else {
    cuda::rms_norm_backward(arguments, stream);
    record_uses(stream, {&dy, &x, &weight, &rstd, &dx, dweight});
  }
}

}  // namespace rowan
