#include "rowan/ops/dropout.h"

#include <cmath>

#include "core/check.h"
#include "ops/alias.h"
#include "ops/dropout_backend.h"

namespace rowan {

namespace {
constexpr const char* kOp = "dropout";
}

namespace detail {

MaskArguments mask_arguments(const char* op, const DropoutMask& mask, StreamRef stream) {
  require(mask.p >= 0 && mask.p <= 1, "{}: expected a dropout probability in [0, 1], got {}", op, mask.p);
  MaskArguments arguments;
  if (mask.counter.defined()) {
    require_shape(op, "the mask's counter", mask.counter, {1});
    require_dtype(op, "the mask's counter", mask.counter, DType::kInt64);
    require_on(op, "the mask's counter", mask.counter, stream);
    arguments.counter = mask.counter.data<std::int64_t>();
  }
  arguments.active = mask.p > 0;
  arguments.threshold = static_cast<std::uint64_t>(std::ceil(mask.p * 0x1p32));
  arguments.seed = mask.seed;
  arguments.offset = mask.offset;
  arguments.factor = mask.p < 1 ? 1 / (1 - mask.p) : 0;
  return arguments;
}

}  // namespace detail

void dropout_forward(const Tensor& x, const DropoutMask& mask, Tensor& y, StreamRef stream) {
  detail::require_floating(kOp, "x", x);
  detail::require_rank(kOp, "x", x, 2);
  detail::require_shape(kOp, "y", y, x.shape());
  detail::require_dtype(kOp, "y", y, x.dtype());
  detail::require_on(kOp, "x", x, stream);
  detail::require_on(kOp, "y", y, stream);
  detail::require_unit_columns(kOp, "x", x);
  detail::require_unit_columns(kOp, "y", y);
  if (stream.device().is_cuda() && x.dtype() == DType::kFloat64) {
    detail::fail(ErrorKind::kUnsupported, "dropout: expected float32, bfloat16 or float16 on CUDA, got float64");
  }
  const auto view = [](const Tensor& t) { return MatrixRef{t.raw(), t.dtype(), t.size(0), t.size(1), t.stride(0), 1}; };
  const bool in_place = x.raw() == y.raw() && x.stride(0) == y.stride(0);
  if (!in_place) detail::require_apart(kOp, "y", y, "x", x);
  detail::require(y.size(0) <= 1 || y.stride(0) >= y.size(1),
                  "dropout: expected rows of y that do not overlap, got row stride {}", y.stride(0));
  const MaskArguments arguments = detail::mask_arguments(kOp, mask, stream);
  if (y.elements() == 0) return;
  if (stream.device().is_cuda()) {
    cuda::dropout(view(x), arguments, view(y), stream);
  } else {
    cpu::dropout(view(x), arguments, view(y));
  }
  x.record_use(stream);
  y.record_use(stream);
  mask.counter.record_use(stream);
}

}  // namespace rowan
