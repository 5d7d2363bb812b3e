#include "ops/newton_schulz_products.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/symmetric_product_backend.h"
#include "rowan/ops/gemm.h"

namespace rowan::detail {

namespace {

constexpr std::int64_t kPad = 64;
/// From this side on, gram_fp32 takes its p x p products in TF32.
constexpr std::int64_t kTf32Side = 257;
std::int64_t padded(std::int64_t side) { return (side + kPad - 1) / kPad * kPad; }

/// The power of two nearest to x (in its logarithm), at most 2^most.
double power_of_two_near(double x, int most) {
  return std::ldexp(1.0, std::min(most, static_cast<int>(std::lround(std::log2(x)))));
}

NewtonSchulzMatrix as_matrix(const Tensor& t) {
  return {t.raw(), t.dtype(), t.size(0), t.size(1), t.size(2), t.stride(0), t.stride(1)};
}

/// q += factor I.
void add_identity(double factor, Tensor& q, StreamRef stream) {
  if (stream.device().is_cuda()) {
    cuda::newton_schulz_add_identity(as_matrix(q), factor, stream);
  } else {
    cpu::newton_schulz_add_identity(as_matrix(q), factor);
  }
}

/// Products of matrices [batches, p, ..] that are known to be symmetric: by a kernel that computes half of them where
/// there is one and it is faster, else whole.
class SymmetricProducts {
 public:
  SymmetricProducts(bool allow_tf32, StreamRef stream) : allow_tf32_(allow_tf32), stream_(stream) {}

  /// out = alpha a a^T.
  void gram(double alpha, const Tensor& a, Tensor& out) {
    if (by_triangle(alpha, a, a, 0, out, 0, out)) return;
    gemm(a, a.transpose(1, 2), out, stream_, {.alpha = alpha});
  }
  /// out = alpha a b for symmetric matrices that commute.
  void product(double alpha, const Tensor& a, const Tensor& b, Tensor& out) {
    if (by_triangle(alpha, a, b, 0, out, 0, out)) return;
    gemm(a, b, out, stream_, {.alpha = alpha, .allow_tf32 = allow_tf32_});
  }
  /// out = a b + beta c.
  void add_product(const Tensor& a, const Tensor& b, double beta, const Tensor& c, Tensor& out) {
    gemm(a, b, out, stream_, {.beta = beta, .allow_tf32 = allow_tf32_, .addend = &c});
  }
  /// out = gamma I + beta r + alpha r^2 for symmetric r.
  void polynomial(double gamma, double beta, double alpha, const Tensor& r, Tensor& out) {
    if (by_triangle(alpha, r, r, beta, r, gamma, out)) return;
    gemm(r, r, out, stream_, {.alpha = alpha, .beta = beta, .allow_tf32 = allow_tf32_, .addend = &r});
    if (gamma != 0) add_identity(gamma, out, stream_);
  }

 private:
  static SymmetricOperand operand(const Tensor& t) { return {t.raw(), t.stride(1), t.stride(0)}; }

  bool by_triangle(double alpha, const Tensor& a, const Tensor& b, double beta, const Tensor& c, double gamma,
                   Tensor& out) {
    if (!stream_.device().is_cuda()) return false;
    const SymmetricProductArguments arguments{out.dtype(), out.size(0),  out.size(1), a.size(2), operand(a), operand(b),
                                              operand(c),  operand(out), alpha,       beta,      gamma};
    if (!cuda::symmetric_product_pays(arguments, stream_)) return false;
    if (!workspace_.defined()) {
      const auto floats = static_cast<std::int64_t>(sizeof(float));
      workspace_ = Tensor::zeros({cuda::symmetric_product_workspace(stream_) / floats}, DType::kFloat32, stream_);
    }
    cuda::symmetric_product(arguments, workspace_.raw(), stream_);
    return true;
  }

  bool allow_tf32_;
  StreamRef stream_;
  Tensor workspace_;
};

/// X with its short side first: its rows are the short side's, whichever way round u lies.
class ShortSide {
 public:
  ShortSide(const NewtonSchulzMatrix& u, DType dtype, StreamRef stream)
      : stream_(stream),
        x_(Tensor::empty({u.batches, padded(u.short_side()), padded(u.long_side())}, dtype, stream)),
        next_(Tensor::empty(x_.shape(), dtype, stream)) {}

  const Tensor& x() const { return x_; }

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
  /// X <- alpha q X + beta X.
  void apply(double alpha, const Tensor& q, double beta) {
    gemm(q, x_, next_, stream_, {.alpha = alpha, .beta = beta, .addend = &x_});
    std::swap(x_, next_);
  }

 private:
  StreamRef stream_;
  Tensor x_;
  Tensor next_;
};

}  // namespace

void newton_schulz_standard(const NewtonSchulzMatrix& u, const NewtonSchulzMatrix& out, const Tensor& inverse,
                            const NewtonSchulzSteps& steps, StreamRef stream) {
  ShortSide x(u, DType::kBFloat16, stream);
  SymmetricProducts products(false, stream);
  const Shape square{u.batches, x.x().size(1), x.x().size(1)};
  Tensor gram = Tensor::empty(square, DType::kBFloat16, stream),
         polynomial = Tensor::empty(square, DType::kBFloat16, stream);
  x.load(u, inverse, 1);
  for (int i = 0; i < steps.count; ++i) {
    const auto& [a, b, c] = steps.step[i];
    products.gram(1, x.x(), gram);
    products.polynomial(0, b, c, gram, polynomial);
    x.apply(1, polynomial, a);
  }
  x.store(1, out);
}

void newton_schulz_gram(const NewtonSchulzMatrix& u, const NewtonSchulzMatrix& out, const Tensor& inverse,
                        const NewtonSchulzSteps& steps, int steps_a_restart, StreamRef stream) {
  const double p = static_cast<double>(u.short_side()), q = static_cast<double>(u.long_side());
  // Scales of X before the first Gram matrix (entries up to 1), of X after it (up to 2), and of R and T (up to 8): all
  // products stay below float16's 65504, and above its subnormal numbers.
  const double first_scale = power_of_two_near(std::sqrt(p * q), 15);
  const double later_scale = power_of_two_near(std::sqrt(q), 14);
  const double s = power_of_two_near(p, 12);

  ShortSide x(u, DType::kFloat16, stream);
  SymmetricProducts products(false, stream);
  const auto make = [&] { return Tensor::empty({u.batches, x.x().size(1), x.x().size(1)}, DType::kFloat16, stream); };
  Tensor r = make(), h = make(), t = make(), product = make(), next = make();
  double scale = first_scale;
  x.load(u, inverse, scale);
  for (int begin = 0; begin < steps.count;) {
    const int end = std::min(steps.count, begin + steps_a_restart);
    products.gram(s / (scale * scale), x.x(), r);
    for (int i = begin; i < end; ++i) {
      const auto& [a, b, c] = steps.step[i];
      products.polynomial(a, b / s, c / (s * s), r, h);  // H = a I + b R + c R^2
      if (i + 1 < end) {
        products.product(1, r, h, t);  // R <- R H^2
        products.product(1, t, h, r);
      }
      if (i == begin) {
        std::swap(product, h);
      } else {
        products.product(1, product, h, next);  // Q <- Q H
        std::swap(product, next);
      }
    }
    x.apply(later_scale / scale, product, 0);
    scale = later_scale;
    begin = end;
  }
  x.store(1 / scale, out);
}

Tensor gram_fp32_polynomial(Tensor& r, const NewtonSchulzSteps& steps, StreamRef stream) {
  SymmetricProducts products(r.size(-1) >= kTf32Side, stream);
  const auto make = [&] { return Tensor::empty(r.shape(), DType::kFloat32, stream); };
  Tensor z = make(), t = make(), q = make(), next = make();
  for (int i = 0; i < steps.count; ++i) {
    const auto& [a, b, c] = steps.step[i];
    products.polynomial(0, b, c, r, z);  // Z = b R + c R^2
    if (i == 0) {
      q.copy_from(z, stream);
      add_identity(a, q, stream);
    } else {
      products.add_product(q, z, a, q, next);  // Q <- a Q + Q Z
      std::swap(q, next);
    }
    if (i + 1 == steps.count) break;
    products.add_product(z, r, a, r, t);  // T = a R + Z R
    products.add_product(t, z, a, t, r);  // R <- a T + T Z
  }
  return q;
}

void newton_schulz_gram_fp32(const NewtonSchulzMatrix& u, const NewtonSchulzMatrix& out, const Tensor& inverse,
                             const NewtonSchulzSteps& steps, StreamRef stream) {
  ShortSide x(u, DType::kFloat32, stream);
  SymmetricProducts products(false, stream);
  Tensor r = Tensor::empty({u.batches, x.x().size(1), x.x().size(1)}, DType::kFloat32, stream);
  x.load(u, inverse, 1);
  products.gram(1, x.x(), r);
  x.apply(1, gram_fp32_polynomial(r, steps, stream), 0);
  x.store(1, out);
}

}  // namespace rowan::detail
