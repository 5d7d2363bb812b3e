#include "ops/gram_sum.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "ops/gram_sum_backend.h"
#include "ops/matrix_view.h"
#include "ops/newton_schulz_products.h"
#include "rowan/ops/gemm.h"

namespace rowan::detail {

namespace {

constexpr const char* kOp = "newton_schulz";
/// From this side on products with K columns may run in TF32, as in the path gram_fp32.
constexpr std::int64_t kTf32Side = 257;

NewtonSchulzMatrix as_matrix(const Tensor& t) {
  const MatrixView v = matrix_view(kOp, "a matrix", t);
  return {t.raw(), t.dtype(), v.batches, v.rows, v.cols, v.batch_stride, v.row_stride};
}

bool has_adjacent_rows(const Tensor& t) {
  const NewtonSchulzMatrix m = as_matrix(t);
  return m.is_wide() || m.row_stride == m.cols;
}

/// Itself, or a copy whose rows are adjacent.
Tensor with_adjacent_rows(const Tensor& t, StreamRef stream) {
  if (has_adjacent_rows(t)) return t;
  Tensor copy = Tensor::empty(t.shape(), t.dtype(), stream);
  copy.copy_from(t, stream);
  return copy;
}

/// Matrices of equal shapes with adjacent rows, cut into rows anew so that they are not tall: newton_schulz_load and
/// newton_schulz_store would transpose a tall matrix, and only want its elements in order here.
NewtonSchulzMatrix as_wide(const Tensor& t) {
  NewtonSchulzMatrix m = as_matrix(t);
  require(m.is_wide() || m.row_stride == m.cols, "{}: expected adjacent rows, got a row stride of {} for {}", kOp,
          m.row_stride, t.shape());
  std::int64_t joined = 1;
  while (m.rows % joined != 0 || m.rows / joined > m.cols * joined) ++joined;
  if (joined > 1) {
    m.rows /= joined;
    m.cols *= joined;
    m.row_stride = m.cols;
  }
  return m;
}

/// to = factors[b] from, for each matrix b.
void scale_into(const Tensor& from, const Tensor& factors, Tensor& to, StreamRef stream) {
  if (from.elements() == 0) return;
  const Tensor source = with_adjacent_rows(from, stream);
  Tensor result = has_adjacent_rows(to) ? to : Tensor::empty(to.shape(), to.dtype(), stream);
  if (stream.device().is_cuda()) {
    cuda::newton_schulz_load(as_wide(source), factors.data<double>(), 1, as_wide(result), stream);
  } else {
    cpu::newton_schulz_load(as_wide(source), factors.data<double>(), 1, as_wide(result));
  }
  if (result.raw() != to.raw()) to.copy_from(result, stream);
}

}  // namespace

void gram_largest(const Tensor& t, Tensor& largest, StreamRef stream) {
  if (t.elements() == 0) return largest.zero(stream);
  if (stream.device().is_cuda()) {
    cuda::gram_largest(as_matrix(t), largest.data<float>(), stream);
  } else {
    cpu::gram_largest(as_matrix(t), largest.data<float>());
  }
}

void gram_partial(const Tensor& u, MatrixLayout layout, const Tensor& largest, Tensor& x, Tensor& gram,
                  StreamRef stream) {
  const Tensor powers = Tensor::empty({u.size(0)}, DType::kFloat64, stream);
  if (stream.device().is_cuda()) {
    cuda::gram_powers(largest.data<float>(), u.size(0), powers.data<double>(), stream);
  } else {
    cpu::gram_powers(largest.data<float>(), u.size(0), powers.data<double>());
  }
  scale_into(u, powers, x, stream);
  const Tensor transposed = x.transpose(1, 2);
  const bool out_in = layout == MatrixLayout::kOutIn;
  // Products of bfloat16 values are exact in TF32.
  const bool tf32 = u.dtype() == DType::kBFloat16 && gram.size(-1) >= kTf32Side;
  gemm(out_in ? transposed : x, out_in ? x : transposed, gram, stream, {.allow_tf32 = tf32});
}

void gram_polynomial(Tensor& gram, const Tensor& largest, const NewtonSchulzOptions& options, StreamRef stream) {
  const NewtonSchulzSteps steps = newton_schulz_steps(options);
  if (gram.elements() == 0) return;
  const Tensor inverse = Tensor::empty({gram.size(0)}, DType::kFloat64, stream),
               inverse_square = Tensor::empty({gram.size(0)}, DType::kFloat64, stream);
  GramNormArguments norms;
  norms.gram = gram.data<float>();
  norms.largest = largest.data<float>();
  norms.batches = gram.size(0);
  norms.side = gram.size(1);
  norms.factor = options.schedule.norm_factor;
  norms.epsilon = options.epsilon;
  norms.inverse = inverse.data<double>();
  norms.inverse_square = inverse_square.data<double>();
  if (stream.device().is_cuda()) {
    cuda::gram_norms(norms, stream);
  } else {
    cpu::gram_norms(norms);
  }
  Tensor r = Tensor::empty(gram.shape(), DType::kFloat32, stream);
  scale_into(gram, inverse_square, r, stream);
  const Tensor h = gram_fp32_polynomial(r, steps, stream);
  scale_into(h, inverse, gram, stream);
}

void gram_apply(const Tensor& x, MatrixLayout layout, const Tensor& h, Tensor& out, StreamRef stream) {
  if (out.elements() == 0) return;
  const bool out_in = layout == MatrixLayout::kOutIn, wide = out.dtype() == DType::kFloat32;
  Tensor sums = wide ? out : Tensor::empty(x.shape(), DType::kFloat32, stream);
  gemm(out_in ? x : h, out_in ? h : x, sums, stream, {.allow_tf32 = !wide && h.size(-1) >= kTf32Side});
  if (wide) return;
  Tensor result = has_adjacent_rows(out) ? out : Tensor::empty(out.shape(), out.dtype(), stream);
  if (stream.device().is_cuda()) {
    cuda::newton_schulz_store(as_wide(sums), 1, as_wide(result), stream);
  } else {
    cpu::newton_schulz_store(as_wide(sums), 1, as_wide(result));
  }
  if (result.raw() != out.raw()) out.copy_from(result, stream);
}

}  // namespace rowan::detail
