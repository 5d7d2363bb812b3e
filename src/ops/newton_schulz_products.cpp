#include "ops/newton_schulz_products.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/symmetric_product_backend.h"
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

void add_identity(const Tensor& z, double alpha, double beta, Tensor& q, StreamRef stream) {
  if (stream.device().is_cuda()) {
    cuda::newton_schulz_add_identity(as_matrix(z), alpha, beta, as_matrix(q), stream);
  } else {
    cpu::newton_schulz_add_identity(as_matrix(z), alpha, beta, as_matrix(q));
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
  /// out = alpha a b + beta c + gamma I for symmetric matrices that commute.
  void product(double alpha, const Tensor& a, const Tensor& b, double beta, const Tensor& c, double gamma,
               Tensor& out) {
    if (by_triangle(alpha, a, b, beta, c, gamma, out)) return;
    out.copy_from(c, stream_);
    gemm(a, b, out, stream_, {.alpha = alpha, .beta = beta, .allow_tf32 = allow_tf32_});
    if (gamma != 0) add_identity(out, 1, gamma, out, stream_);
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
    if (beta != 0) next_.copy_from(x_, stream_);
    gemm(q, x_, next_, stream_, {.alpha = alpha, .beta = beta});
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
    products.product(c, gram, gram, b, gram, 0, polynomial);
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
  const bool tf32 = storage.tf32_from > 0 && u.short_side() >= storage.tf32_from;
  SymmetricProducts products(tf32, stream);
  const Shape square{u.batches, x.x().size(1), x.x().size(1)};
  const auto make = [&] { return Tensor::empty(square, storage.dtype, stream); };
  const auto product = [&](const Tensor& left, const Tensor& right, double beta, const Tensor& added, Tensor& result) {
    products.product(1 / s, left, right, beta, added, 0, result);
  };
  Tensor r = make(), z = make(), t = make(), h = make(), next = make();

  double scale = first_scale;
  x.load(u, inverse, scale);
  for (int begin = 0; begin < steps.count;) {
    const int end = storage.steps_a_restart > 0 ? std::min(steps.count, begin + storage.steps_a_restart) : steps.count;
    products.gram(s / (scale * scale), x.x(), r);
    for (int i = begin; i < end; ++i) {
      const auto& [a, b, c] = steps.step[i];
      if (end - begin == 1) {
        products.product(c / (s * s), r, r, b / s, r, a, h);  // Q = a I + b R + c R^2
        break;
      }
      products.product(c / s, r, r, b, r, 0, z);  // Z = b R + c R^2
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
