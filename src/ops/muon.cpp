#include "rowan/ops/muon.h"

#include "core/check.h"
#include "ops/muon_backend.h"
#include "ops/row_view.h"

namespace rowan {

namespace {

void require_control(const char* op, const Tensor& control, StreamRef stream) {
  if (!control.defined()) return;
  detail::require_shape(op, "control", control, {4});
  detail::require_dtype(op, "control", control, DType::kFloat64);
  detail::require_contiguous(op, "control", control);
  detail::require_on(op, "control", control, stream);
}

void require_master(const char* op, const char* name, const Tensor& t, StreamRef stream) {
  detail::require_on(op, name, t, stream);
  const bool known = t.dtype() == DType::kFloat32 || (t.dtype() == DType::kFloat64 && stream.device().is_cpu());
  detail::require(known, "{}: expected {} of dtype float32 (or float64 on the CPU), got {} on {}", op, name, t.dtype(),
                  stream.device());
  detail::require_rows(op, name, t);
}

void require_update(const char* op, const Tensor& update, const Tensor& like, StreamRef stream) {
  detail::require_shape(op, "update", update, like.shape());
  detail::require_on(op, "update", update, stream);
  const bool known = update.dtype() == DType::kBFloat16 || update.dtype() == DType::kFloat32 ||
                     (update.dtype() == DType::kFloat64 && like.dtype() == DType::kFloat64);
  detail::require(known,
                  "{}: expected update of dtype bfloat16 or float32 (or float64 beside float64), got {} beside {}", op,
                  update.dtype(), like.dtype());
}

}  // namespace

void muon_prepare(const Tensor& gradient, Tensor& momentum, double mu, bool nesterov, const Tensor& control,
                  Tensor& update, StreamRef stream) {
  constexpr const char* kOp = "muon_prepare";
  require_master(kOp, "gradient", gradient, stream);
  detail::require_shape(kOp, "momentum", momentum, gradient.shape());
  detail::require_dtype(kOp, "momentum", momentum, gradient.dtype());
  detail::require_contiguous(kOp, "momentum", momentum);
  detail::require_on(kOp, "momentum", momentum, stream);
  require_update(kOp, update, gradient, stream);
  detail::require_contiguous(kOp, "update", update);
  require_control(kOp, control, stream);
  detail::require(mu >= 0 && mu < 1, "{}: expected momentum in [0, 1), got {}", kOp, mu);
  detail::require(!update.overlaps(gradient) && !update.overlaps(momentum) && !momentum.overlaps(gradient),
                  "{}: expected gradient, momentum and update apart, got overlapping memory", kOp);
  MuonPrepareArguments a;
  a.cols = detail::common_cols({&gradient});
  a.elements = gradient.elements();
  if (a.elements == 0) return;
  a.gradient = gradient.raw();
  a.gradient_stride = detail::row_stride(gradient, a.cols);
  a.momentum = momentum.raw();
  a.update = update.raw();
  a.control = control.defined() ? control.data<double>() : nullptr;
  a.mu = mu;
  a.nesterov = nesterov;
  a.dtype = gradient.dtype();
  a.update_dtype = update.dtype();
  if (stream.device().is_cpu()) {
    cpu::muon_prepare(a);
    return;
  }
  cuda::muon_prepare(a, stream);
  gradient.record_use(stream);
  momentum.record_use(stream);
  control.record_use(stream);
  update.record_use(stream);
}

void muon_finish(Tensor& weight, const Tensor& update, double scale, const Tensor& rates, const Tensor& control,
                 Tensor* value, StreamRef stream) {
  constexpr const char* kOp = "muon_finish";
  require_master(kOp, "weight", weight, stream);
  require_update(kOp, update, weight, stream);
  detail::require_rows(kOp, "update", update);
  detail::require_shape(kOp, "rates", rates, {2});
  detail::require_dtype(kOp, "rates", rates, DType::kFloat64);
  detail::require_contiguous(kOp, "rates", rates);
  detail::require_on(kOp, "rates", rates, stream);
  require_control(kOp, control, stream);
  detail::require(!weight.overlaps(update), "{}: expected weight and update apart, got overlapping memory", kOp);
  if (value != nullptr) {
    detail::require_shape(kOp, "value", *value, weight.shape());
    detail::require_on(kOp, "value", *value, stream);
    detail::require(value->dtype() == DType::kBFloat16 || value->dtype() == DType::kFloat16,
                    "{}: expected value of dtype bfloat16 or float16 (or none), got {}", kOp, value->dtype());
    detail::require_rows(kOp, "value", *value);
  }
  MuonFinishArguments a;
  const Tensor copy = value != nullptr ? *value : Tensor();
  a.cols = detail::common_cols({&weight, &update, &copy});
  a.elements = weight.elements();
  if (a.elements == 0) return;
  a.weight = weight.raw();
  a.update = update.raw();
  a.value = copy.raw();
  a.weight_stride = detail::row_stride(weight, a.cols);
  a.update_stride = detail::row_stride(update, a.cols);
  a.value_stride = detail::row_stride(copy, a.cols);
  a.rates = rates.data<double>();
  a.control = control.defined() ? control.data<double>() : nullptr;
  a.scale = scale;
  a.dtype = weight.dtype();
  a.update_dtype = update.dtype();
  if (copy.defined()) a.value_dtype = copy.dtype();
  if (stream.device().is_cpu()) {
    cpu::muon_finish(a);
    return;
  }
  cuda::muon_finish(a, stream);
  for (const Tensor* t : {static_cast<const Tensor*>(&weight), &update, &rates, &control, &copy}) t->record_use(stream);
}

}  // namespace rowan
