#include "ops/newton_schulz_products.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "rowan/ops/gemm.h"

namespace rowan::detail {

namespace {

constexpr std::int64_t kPad = 64;
std::int64_t padded(std::int64_t side) { return (side + kPad - 1) / kPad * kPad; }

/// The power of two nearest to x (in its logarithm), at most 2^most.
double power_of_two_near(double x, int most) {
  return std::ldexp(1.0, std::min(most, static_cast<int>(std::lround(std::log2(x)))));
}

NewtonSchulzMatrix as_matrix(const Tensor& t) {
  return {t.raw(), t.dtype(), t.size(0), t.size(1), t.size(2), t.stride(0), t.stride(1)};
}

/// X, its Gram matrix and its product with a p x p matrix, on the short side.
class ShortSide {
 public:
  ShortSide(const NewtonSchulzMatrix& u, DType dtype, StreamRef stream)
      : wide_(u.is_wide()),
        stream_(stream),
        x_(Tensor::empty({u.batches, padded(u.rows), padded(u.cols)}, dtype, stream)),
        next_(Tensor::empty(x_.shape(), dtype, stream)) {}

  std::int64_t side() const { return wide_ ? x_.size(1) : x_.size(2); }

  void load(const NewtonSchulzMatrix& u, const Tensor& inverse, double scale) {
    if (stream_.device().is_cuda()) {
      cuda::newton_schulz_load(u, inverse.data<double>(), scale, as_matrix(x_), stream_);
    } else {
      cpu::newton_schulz_load(u, inverse.data<double>(), scale, as_matrix(x_));
    }
  }
  void store(double scale, const NewtonSchulzMatrix& out) const {
    if (stream_.device().is_cuda()) {
      cuda::newton_schulz_store(as_matrix(x_), scale, out, stream_);
    } else {
      cpu::newton_schulz_store(as_matrix(x_), scale, out);
    }
  }
  /// gram = alpha X X^T (X^T X where X is tall).
  void gram(double alpha, Tensor& gram) const {
    const Tensor transposed = x_.transpose(1, 2);
    gemm(wide_ ? x_ : transposed, wide_ ? transposed : x_, gram, stream_, {.alpha = alpha});
  }
  /// X <- alpha q X + beta X (X q where X is tall).
  void apply(double alpha, const Tensor& q, double beta) {
    if (beta != 0) next_.copy_from(x_, stream_);
    gemm(wide_ ? q : x_, wide_ ? x_ : q, next_, stream_, {.alpha = alpha, .beta = beta});
    std::swap(x_, next_);
  }

 private:
  bool wide_;
  StreamRef stream_;
  Tensor x_;
  Tensor next_;
};

/// out = alpha a b + beta c for symmetric matrices that commute, so that the result is symmetric too.
void symmetric_product(double alpha, const Tensor& a, const Tensor& b, double beta, const Tensor& c, Tensor& out,
                       bool allow_tf32, StreamRef stream) {
  out.copy_from(c, stream);
  gemm(a, b, out, stream, {.alpha = alpha, .beta = beta, .allow_tf32 = allow_tf32});
}

void add_identity(const Tensor& z, double alpha, double beta, Tensor& q, StreamRef stream) {
  if (stream.device().is_cuda()) {
    cuda::newton_schulz_add_identity(as_matrix(z), alpha, beta, as_matrix(q), stream);
  } else {
    cpu::newton_schulz_add_identity(as_matrix(z), alpha, beta, as_matrix(q));
  }
}

}  // namespace

void newton_schulz_standard(const NewtonSchulzMatrix& u, const NewtonSchulzMatrix& out, const Tensor& inverse,
                            const NewtonSchulzSteps& steps, StreamRef stream) {
  ShortSide x(u, DType::kBFloat16, stream);
  const Shape square{u.batches, x.side(), x.side()};
  Tensor gram = Tensor::empty(square, DType::kBFloat16, stream),
         polynomial = Tensor::empty(square, DType::kBFloat16, stream);
  x.load(u, inverse, 1);
  for (int i = 0; i < steps.count; ++i) {
    const auto& [a, b, c] = steps.step[i];
    x.gram(1, gram);
    symmetric_product(c, gram, gram, b, gram, polynomial, false, stream);
    x.apply(1, polynomial, a);
  }
  x.store(1, out);
}

void newton_schulz_gram(const NewtonSchulzMatrix& u, const NewtonSchulzMatrix& out, const Tensor& inverse,
                        const NewtonSchulzSteps& steps, const GramStorage& storage, StreamRef stream) {
  const double p = static_cast<double>(u.short_side()), q = static_cast<double>(u.long_side());
  // Scales of X before the first Gram matrix (entries up to 1), of X after it (up to 2), and of R, T and Z (up to 8):
  // all products stay below float16's 65504.
  const double first_scale = storage.scaled ? power_of_two_near(std::sqrt(p * q), 15) : 1;
  const double later_scale = storage.scaled ? power_of_two_near(std::sqrt(q), 14) : 1;
  const double s = storage.scaled ? power_of_two_near(p, 12) : 1;

  ShortSide x(u, storage.dtype, stream);
  const Shape square{u.batches, x.side(), x.side()};
  const bool tf32 = storage.tf32_from > 0 && u.short_side() >= storage.tf32_from;
  const auto make = [&] { return Tensor::empty(square, storage.dtype, stream); };
  const auto product = [&](const Tensor& left, const Tensor& right, double beta, const Tensor& added, Tensor& result) {
    symmetric_product(1 / s, left, right, beta, added, result, tf32, stream);
  };
  Tensor r = make(), z = make(), t = make(), h = make(), next = make();

  double scale = first_scale;
  x.load(u, inverse, scale);
  for (int begin = 0; begin < steps.count;) {
    const int end = storage.steps_a_restart > 0 ? std::min(steps.count, begin + storage.steps_a_restart) : steps.count;
    x.gram(s / (scale * scale), r);
    for (int i = begin; i < end; ++i) {
      const auto& [a, b, c] = steps.step[i];
      symmetric_product(c / s, r, r, b, r, z, tf32, stream);  // Z = b R + c R^2
      if (i == begin) {
        add_identity(z, 1 / s, a, h, stream);  // only Q carries the identity
      } else {
        product(h, z, a, h, next);  // Q <- a Q + Q Z
        std::swap(h, next);
      }
      if (i + 1 < end) {
        product(z, r, a, r, t);  // T = a R + Z R
        product(t, z, a, t, r);  // R <- a T + T Z
      }
    }
    x.apply(later_scale / scale, h, 0);
    scale = later_scale;
    begin = end;
  }
  x.store(1 / scale, out);
}

}  // namespace rowan::detail
