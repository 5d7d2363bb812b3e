#include "rowan/ops/lora.h"

#include <algorithm>
#include <string>

#include "core/check.h"
#include "ops/alias.h"
#include "ops/dropout_backend.h"
#include "ops/lora_backend.h"
#include "rowan/ops/elementwise.h"

namespace rowan {

namespace {

using detail::require;

/// A tensor and what messages call it.
struct Named {
  const char* name;
  const Tensor& tensor;
};

bool is_half(DType dtype) { return dtype == DType::kBFloat16 || dtype == DType::kFloat16; }
DType accumulator(DType dtype) { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

/// Where row i begins; extents of 1 have free strides.
std::int64_t row_stride(const Tensor& t) { return t.size(0) > 1 ? t.stride(0) : std::max<std::int64_t>(t.size(1), 1); }
LoraMatrix matrix(const Tensor& t) { return {t.raw(), row_stride(t)}; }

bool has_rows(const Tensor& t) {
  return (t.size(1) <= 1 || t.stride(1) == 1) && (t.size(0) <= 1 || t.stride(0) >= t.size(1));
}

LoraFactor factor_view(const Tensor& t) {
  if (has_rows(t)) return {t.raw(), row_stride(t), false};
  return {t.raw(), row_stride(t.transpose(0, 1)), true};
}

/// A floating matrix with adjacent columns on the stream's device.
void check_activation(const char* op, Named t, StreamRef stream) {
  detail::require_floating(op, t.name, t.tensor);
  detail::require_rank(op, t.name, t.tensor, 2);
  detail::require_on(op, t.name, t.tensor, stream);
  require(has_rows(t.tensor),
          "{}: expected {} with adjacent columns and rows that do not overlap, got shape {} with strides {} and {}", op,
          t.name, t.tensor.shape(), t.tensor.stride(0), t.tensor.stride(1));
  if (stream.device().is_cuda() && t.tensor.dtype() == DType::kFloat64) {
    detail::fail(ErrorKind::kUnsupported, "{}: expected {} of dtype float32, bfloat16 or float16 on CUDA, got float64",
                 op, t.name);
  }
}

/// A matrix [rows, cols] with unit stride in either dimension.
void check_factor_layout(const char* op, Named t, std::int64_t rows, std::int64_t cols, StreamRef stream) {
  detail::require_shape(op, t.name, t.tensor, {rows, cols});
  detail::require_on(op, t.name, t.tensor, stream);
  require(has_rows(t.tensor) || has_rows(t.tensor.transpose(0, 1)),
          "{}: expected {} with unit stride in one dimension, got shape {} with strides {} and {}", op, t.name,
          t.tensor.shape(), t.tensor.stride(0), t.tensor.stride(1));
}

/// A or B beside activations of a dtype.
void check_factor(const char* op, Named t, std::int64_t rows, std::int64_t cols, DType dtype, StreamRef stream) {
  check_factor_layout(op, t, rows, cols, stream);
  require(t.tensor.dtype() == dtype || (t.tensor.dtype() == DType::kFloat32 && is_half(dtype)),
          "{}: expected {} of dtype {} or float32 beside 16-bit activations, got {}", op, t.name, dtype,
          t.tensor.dtype());
}

void check_rank(const char* op, std::int64_t rank) {
  require(rank >= 1, "{}: expected a rank of at least 1, got {}", op, rank);
}

void check_beta(const char* op, double beta) {
  require(beta == 0 || beta == 1, "{}: expected beta 0 or 1, got {}", op, beta);
}

void check_finite(const char* op, double scale) {
  require(std::isfinite(scale), "{}: expected a finite scale, got {}", op, scale);
}

void check_out_dtype(const char* op, Named t, DType dtype) {
  const bool fits = dtype == DType::kFloat64 ? t.tensor.dtype() == DType::kFloat64
                                             : is_floating(t.tensor.dtype()) && t.tensor.dtype() != DType::kFloat64;
  require(fits, "{}: expected {} of a floating dtype that goes with {}, got {}", op, t.name, dtype, t.tensor.dtype());
}

void check_gradient(const char* op, Named t, std::int64_t rows, std::int64_t cols, DType dtype, StreamRef stream) {
  check_factor_layout(op, t, rows, cols, stream);
  detail::require_dtype(op, t.name, t.tensor, accumulator(dtype));
}

/// The factor itself, or its values rounded to the activations' dtype.
Tensor in_dtype(const Tensor& factor, DType dtype, StreamRef stream) {
  if (factor.dtype() == dtype) return factor;
  Tensor rounded = Tensor::empty(factor.shape(), dtype, stream);
  cast(factor, rounded, stream);
  return rounded;
}

MaskArguments mask_of(const char* op, const DropoutMask* mask, StreamRef stream) {
  return mask ? detail::mask_arguments(op, *mask, stream) : MaskArguments{};
}
bool drops_everything(const DropoutMask* mask) { return mask && mask->p >= 1; }

void record_uses(std::initializer_list<const Tensor*> tensors, const DropoutMask* mask, StreamRef stream) {
  for (const Tensor* t : tensors) t->record_use(stream);
  if (mask) mask->counter.record_use(stream);
}

}  // namespace

namespace {

LoraShrinkArguments check_shrink(const char* op, const Tensor& wide, const Tensor& factor, double scale,
                                 const Tensor& out, StreamRef stream, const DropoutMask* mask) {
  check_activation(op, {"wide", wide}, stream);
  detail::require_rank(op, "factor", factor, 2);
  const std::int64_t rank = factor.size(0);
  check_rank(op, rank);
  check_factor(op, {"factor", factor}, rank, wide.size(1), wide.dtype(), stream);
  check_activation(op, {"out", out}, stream);
  require(out.size(0) == wide.size(0) && out.size(1) >= rank, "{}: expected out of shape [{}, at least {}], got {}", op,
          wide.size(0), rank, out.shape());
  detail::require_dtype(op, "out", out, wide.dtype());
  check_finite(op, scale);
  detail::require_apart(op, "out", out, "wide", wide);
  detail::require_apart(op, "out", out, "factor", factor);
  LoraShrinkArguments arguments;
  arguments.mask = mask_of(op, mask, stream);
  arguments.rows = wide.size(0);
  arguments.width = wide.size(1);
  arguments.rank = rank;
  arguments.padded_rank = out.size(1);
  arguments.wide = matrix(wide);
  arguments.out = matrix(out);
  arguments.dtype = wide.dtype();
  arguments.scale = scale;
  return arguments;
}

LoraReduceArguments check_reduce(const char* op, const Tensor& narrow, const Tensor& wide, const Tensor& grad,
                                 double beta, StreamRef stream, const DropoutMask* mask) {
  check_activation(op, {"narrow", narrow}, stream);
  check_rank(op, narrow.size(1));
  check_activation(op, {"wide", wide}, stream);
  detail::require_shape(op, "wide", wide, {narrow.size(0), wide.size(1)});
  detail::require_dtype(op, "wide", wide, narrow.dtype());
  check_gradient(op, {"grad", grad}, narrow.size(1), wide.size(1), narrow.dtype(), stream);
  check_beta(op, beta);
  detail::require_apart(op, "grad", grad, "narrow", narrow);
  detail::require_apart(op, "grad", grad, "wide", wide);
  LoraReduceArguments arguments;
  arguments.mask = mask_of(op, mask, stream);
  arguments.rows = narrow.size(0);
  arguments.width = wide.size(1);
  arguments.rank = narrow.size(1);
  arguments.narrow = matrix(narrow);
  arguments.wide = matrix(wide);
  arguments.grad = factor_view(grad);
  arguments.dtype = narrow.dtype();
  arguments.accumulate = beta != 0;
  return arguments;
}

void run(LoraShrinkArguments& arguments, const Tensor& wide, const Tensor& factor, Tensor& out, StreamRef stream,
         const DropoutMask* mask) {
  if (out.elements() == 0) return;
  if (arguments.width == 0 || drops_everything(mask)) return out.zero(stream);
  const Tensor rounded = in_dtype(factor, wide.dtype(), stream);
  arguments.factor = factor_view(rounded);
  if (stream.device().is_cuda()) {
    const cuda::LoraSplit split = cuda::lora_shrink_split(arguments, stream.device());
    const Tensor workspace = Tensor::empty({split.workspace_floats}, DType::kFloat32, stream);
    cuda::lora_shrink(arguments, split, workspace.data<float>(), stream);
  } else {
    cpu::lora_shrink(arguments);
  }
  record_uses({&wide, &factor, &out}, mask, stream);
}

void run(const LoraReduceArguments& arguments, const Tensor& narrow, const Tensor& wide, Tensor& grad, StreamRef stream,
         const DropoutMask* mask) {
  if (grad.elements() == 0) return;
  if (narrow.size(0) == 0 || drops_everything(mask)) {
    if (!arguments.accumulate) grad.zero(stream);
    return;
  }
  if (stream.device().is_cuda()) {
    const cuda::LoraSplit split = cuda::lora_reduce_split(arguments, stream.device());
    const Tensor workspace = Tensor::empty({split.workspace_floats}, DType::kFloat32, stream);
    cuda::lora_reduce(arguments, split, workspace.data<float>(), stream);
  } else {
    cpu::lora_reduce(arguments);
  }
  record_uses({&narrow, &wide, &grad}, mask, stream);
}

}  // namespace

void lora_shrink(const Tensor& wide, const Tensor& factor, double scale, Tensor& out, StreamRef stream,
                 const DropoutMask* mask) {
  LoraShrinkArguments arguments = check_shrink("lora_shrink", wide, factor, scale, out, stream, mask);
  run(arguments, wide, factor, out, stream, mask);
}

void lora_reduce(const Tensor& narrow, const Tensor& wide, Tensor& grad, double beta, StreamRef stream,
                 const DropoutMask* mask) {
  const LoraReduceArguments arguments = check_reduce("lora_reduce", narrow, wide, grad, beta, stream, mask);
  run(arguments, narrow, wide, grad, stream, mask);
}

void lora_shrink_reduce(const Tensor& wide, const Tensor& factor, double scale, Tensor& out, const Tensor& narrow,
                        Tensor& grad, double beta, StreamRef stream, const DropoutMask* mask) {
  constexpr const char* kOp = "lora_shrink_reduce";
  LoraShrinkArguments shrink = check_shrink(kOp, wide, factor, scale, out, stream, mask);
  const LoraReduceArguments reduce = check_reduce(kOp, narrow, wide, grad, beta, stream, mask);
  detail::require_apart(kOp, "out", out, "narrow", narrow);
  detail::require_apart(kOp, "out", out, "grad", grad);
  detail::require_apart(kOp, "grad", grad, "factor", factor);
  const bool shares = stream.device().is_cuda() && wide.elements() > 0 && !drops_everything(mask) &&
                      shrink.rank == reduce.rank && cuda::lora_shares_pass(shrink, stream.device());
  if (!shares) {
    run(shrink, wide, factor, out, stream, mask);
    return run(reduce, narrow, wide, grad, stream, mask);
  }
  const Tensor rounded = in_dtype(factor, wide.dtype(), stream);
  shrink.factor = factor_view(rounded);
  const Tensor workspace =
      Tensor::empty({cuda::lora_shrink_reduce_workspace(shrink, reduce, stream.device())}, DType::kFloat32, stream);
  cuda::lora_shrink_reduce(shrink, reduce, workspace.data<float>(), stream);
  record_uses({&wide, &factor, &out, &narrow, &grad}, mask, stream);
}

void lora_expand(const Tensor& narrow, const Tensor& factor, Tensor& out, double beta, StreamRef stream,
                 const DropoutMask* mask) {
  constexpr const char* kOp = "lora_expand";
  check_activation(kOp, {"narrow", narrow}, stream);
  check_rank(kOp, narrow.size(1));
  check_activation(kOp, {"out", out}, stream);
  detail::require_shape(kOp, "out", out, {narrow.size(0), out.size(1)});
  check_out_dtype(kOp, {"out", out}, narrow.dtype());
  check_factor(kOp, {"factor", factor}, narrow.size(1), out.size(1), narrow.dtype(), stream);
  check_beta(kOp, beta);
  detail::require_apart(kOp, "out", out, "narrow", narrow);
  detail::require_apart(kOp, "out", out, "factor", factor);
  LoraExpandArguments arguments;
  arguments.mask = mask_of(kOp, mask, stream);
  if (out.elements() == 0) return;
  if (drops_everything(mask)) {
    if (beta == 0) out.zero(stream);
    return;
  }

  const Tensor rounded = in_dtype(factor, narrow.dtype(), stream);
  arguments.rows = out.size(0);
  arguments.width = out.size(1);
  arguments.rank = narrow.size(1);
  arguments.narrow = matrix(narrow);
  arguments.out = matrix(out);
  arguments.factor = factor_view(rounded);
  arguments.dtype = narrow.dtype();
  arguments.out_dtype = out.dtype();
  arguments.accumulate = beta != 0;
  if (stream.device().is_cuda()) {
    cuda::lora_expand(arguments, stream);
  } else {
    cpu::lora_expand(arguments);
  }
  record_uses({&narrow, &factor, &out}, mask, stream);
}

void lora_forward(const Tensor& x, const Tensor& a, const Tensor& b, double scale, Tensor& y, double beta,
                  StreamRef stream) {
  constexpr const char* kOp = "lora_forward";
  check_activation(kOp, {"x", x}, stream);
  detail::require_rank(kOp, "A", a, 2);
  check_rank(kOp, a.size(0));
  check_factor(kOp, {"A", a}, a.size(0), x.size(1), x.dtype(), stream);
  check_activation(kOp, {"y", y}, stream);
  detail::require_shape(kOp, "y", y, {x.size(0), y.size(1)});
  check_out_dtype(kOp, {"y", y}, x.dtype());
  check_factor(kOp, {"B", b}, y.size(1), a.size(0), x.dtype(), stream);
  check_finite(kOp, scale);
  check_beta(kOp, beta);
  for (const Named input : {Named{"x", x}, Named{"A", a}, Named{"B", b}})
    detail::require_apart(kOp, "y", y, input.name, input.tensor);
  if (y.elements() == 0) return;
  const Tensor b_rounded = in_dtype(b, x.dtype(), stream);
  Tensor s = Tensor::empty({x.size(0), a.size(0)}, x.dtype(), stream);
  lora_shrink(x, a, scale, s, stream);
  lora_expand(s, b_rounded.transpose(0, 1), y, beta, stream);
  b.record_use(stream);
}

Tensor lora_forward(const Tensor& x, const Tensor& a, const Tensor& b, double scale, StreamRef stream,
                    std::optional<DType> dtype) {
  detail::require_rank("lora_forward", "x", x, 2);
  detail::require_rank("lora_forward", "B", b, 2);
  Tensor y = Tensor::empty({x.size(0), b.size(0)}, dtype.value_or(x.dtype()), stream);
  lora_forward(x, a, b, scale, y, 0, stream);
  return y;
}

void lora_da_dx(const Tensor& dy, const Tensor& x, const Tensor& a, const Tensor& b, double scale, Tensor& dx,
                Tensor& da, double beta_da, StreamRef stream) {
  constexpr const char* kOp = "lora_da_dx";
  check_activation(kOp, {"dy", dy}, stream);
  check_activation(kOp, {"x", x}, stream);
  detail::require_shape(kOp, "x", x, {dy.size(0), x.size(1)});
  detail::require_dtype(kOp, "x", x, dy.dtype());
  detail::require_rank(kOp, "A", a, 2);
  const std::int64_t rank = a.size(0);
  check_rank(kOp, rank);
  check_factor(kOp, {"A", a}, rank, x.size(1), x.dtype(), stream);
  check_factor(kOp, {"B", b}, dy.size(1), rank, x.dtype(), stream);
  check_activation(kOp, {"dx", dx}, stream);
  detail::require_shape(kOp, "dx", dx, x.shape());
  check_out_dtype(kOp, {"dx", dx}, x.dtype());
  check_gradient(kOp, {"dA", da}, rank, x.size(1), x.dtype(), stream);
  check_finite(kOp, scale);
  check_beta(kOp, beta_da);
  for (const Named input : {Named{"dy", dy}, Named{"x", x}, Named{"A", a}, Named{"B", b}}) {
    detail::require_apart(kOp, "dx", dx, input.name, input.tensor);
    detail::require_apart(kOp, "dA", da, input.name, input.tensor);
  }
  detail::require_apart(kOp, "dx", dx, "dA", da);
  const Tensor a_rounded = in_dtype(a, x.dtype(), stream);
  Tensor t = Tensor::empty({dy.size(0), rank}, x.dtype(), stream);
  lora_shrink(dy, b.transpose(0, 1), scale, t, stream);
  lora_reduce(t, x, da, beta_da, stream);  // before dx: what may run out of memory writes no output
  lora_expand(t, a_rounded, dx, 0, stream);
  a.record_use(stream);
}

LoraDaDx lora_da_dx(const Tensor& dy, const Tensor& x, const Tensor& a, const Tensor& b, double scale,
                    StreamRef stream) {
  detail::require_rank("lora_da_dx", "x", x, 2);
  detail::require_rank("lora_da_dx", "A", a, 2);
  LoraDaDx result{Tensor::empty(a.shape(), accumulator(x.dtype()), stream),
                  Tensor::empty(x.shape(), x.dtype(), stream)};
  lora_da_dx(dy, x, a, b, scale, result.dx, result.da, 0, stream);
  return result;
}

void lora_db(const Tensor& dy, const Tensor& x, const Tensor& a, double scale, Tensor& db, double beta,
             StreamRef stream) {
  constexpr const char* kOp = "lora_db";
  check_activation(kOp, {"dy", dy}, stream);
  check_activation(kOp, {"x", x}, stream);
  detail::require_shape(kOp, "x", x, {dy.size(0), x.size(1)});
  detail::require_dtype(kOp, "x", x, dy.dtype());
  detail::require_rank(kOp, "A", a, 2);
  check_rank(kOp, a.size(0));
  check_factor(kOp, {"A", a}, a.size(0), x.size(1), x.dtype(), stream);
  check_gradient(kOp, {"dB", db}, dy.size(1), a.size(0), x.dtype(), stream);
  check_finite(kOp, scale);
  check_beta(kOp, beta);
  for (const Named input : {Named{"dy", dy}, Named{"x", x}, Named{"A", a}})
    detail::require_apart(kOp, "dB", db, input.name, input.tensor);
  Tensor u = Tensor::empty({x.size(0), a.size(0)}, x.dtype(), stream);
  lora_shrink(x, a, scale, u, stream);
  lora_db_saved(dy, u, db, beta, stream);
}

Tensor lora_db(const Tensor& dy, const Tensor& x, const Tensor& a, double scale, StreamRef stream) {
  detail::require_rank("lora_db", "dy", dy, 2);
  detail::require_rank("lora_db", "A", a, 2);
  Tensor db = Tensor::empty({dy.size(1), a.size(0)}, accumulator(dy.dtype()), stream);
  lora_db(dy, x, a, scale, db, 0, stream);
  return db;
}

void lora_db_saved(const Tensor& dy, const Tensor& u, Tensor& db, double beta, StreamRef stream) {
  detail::require_rank("lora_db", "dB", db, 2);
  Tensor transposed = db.transpose(0, 1);
  lora_reduce(u, dy, transposed, beta, stream);
}

}  // namespace rowan
