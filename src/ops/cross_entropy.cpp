#include "rowan/ops/cross_entropy.h"

#include <cmath>

#include "ops/cross_entropy_backend.h"
#include "ops/operands.h"

namespace rowan {

void cross_entropy(const Tensor& logits, const Tensor& labels, Tensor& losses, Tensor* dlogits, double grad_scale,
                   StreamRef stream) {
  using namespace detail;
  const char* const op = "cross_entropy";
  require_rank(op, "logits", logits, 2);
  require_compute(op, "logits", logits, stream);
  require(logits.size(1) >= 1, "{}: expected logits with at least one column, got shape {}", op, logits.shape());
  require_packed(op, "labels", labels, DType::kInt64, {logits.size(0)}, stream);
  require_packed(op, "losses", losses, accumulator_dtype(logits.dtype()), {logits.size(0)}, stream);
  if (dlogits != nullptr) require_like(op, "dlogits", *dlogits, logits.dtype(), logits.shape(), stream);
  require(std::isfinite(grad_scale), "{}: expected a finite grad_scale, got {}", op, grad_scale);
  if (logits.size(0) == 0) return;

  CrossEntropyArguments arguments;
  arguments.rows = logits.size(0);
  arguments.classes = logits.size(1);
  arguments.dtype = logits.dtype();
  arguments.logits = logits.raw();
  arguments.logits_stride = logits.stride(0);
  arguments.labels = labels.data<std::int64_t>();
  arguments.losses = losses.raw();
  arguments.grad_scale = grad_scale;
  if (dlogits != nullptr) {
    arguments.dlogits = dlogits->raw();
    arguments.dlogits_stride = dlogits->stride(0);
  }
  if (stream.device().is_cpu()) {
    cpu::cross_entropy(arguments);
  } else {
    cuda::cross_entropy(arguments, stream);
    record_uses(stream, {&logits, &labels, &losses, dlogits});
  }
}

}  // namespace rowan
