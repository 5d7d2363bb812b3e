#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/blas.h"
#include "ops/newton_schulz_backend.h"

namespace rowan::cpu {

namespace {

using detail::convert;

template <class T>
T* row_of(const NewtonSchulzMatrix& m, std::int64_t batch, std::int64_t row) {
  return static_cast<T*>(m.data) + batch * m.batch_stride + row * m.row_stride;
}

/// Calls f(batch, row) for every row of every matrix.
template <class F>
void for_each_row(const NewtonSchulzMatrix& m, F&& f) {
  constexpr std::int64_t kElements = 16384;
  detail::parallel_for(m.batches * m.rows, std::max<std::int64_t>(1, kElements / std::max<std::int64_t>(m.cols, 1)),
                       [&](std::int64_t begin, std::int64_t end) {
                         for (std::int64_t row = begin; row < end; ++row) f(row / m.rows, row % m.rows);
                       });
}

/// scale times a row of any dtype as T.
template <class T>
void copy_row(const NewtonSchulzMatrix& from, std::int64_t batch, std::int64_t row, double scale, T* to) {
  detail::dispatch_floating(from.dtype, [&](auto tag) {
    using From = typename decltype(tag)::type;
    const From* const source = row_of<const From>(from, batch, row);
    for (std::int64_t j = 0; j < from.cols; ++j) to[j] = convert<T>(convert<double>(source[j]) * scale);
  });
}

/// scale times a column of any dtype as T.
template <class T>
void copy_column(const NewtonSchulzMatrix& from, std::int64_t batch, std::int64_t col, double scale, T* to) {
  detail::dispatch_floating(from.dtype, [&](auto tag) {
    using From = typename decltype(tag)::type;
    const From* const source = row_of<const From>(from, batch, 0) + col;
    for (std::int64_t i = 0; i < from.rows; ++i)
      to[i] = convert<T>(convert<double>(source[i * from.row_stride]) * scale);
  });
}

double square_sum(const NewtonSchulzMatrix& u, std::int64_t batch) {
  std::vector<double> row(static_cast<std::size_t>(u.cols));
  double total = 0;
  for (std::int64_t i = 0; i < u.rows; ++i) {
    copy_row(u, batch, i, 1.0, row.data());
    total += std::inner_product(row.begin(), row.end(), row.begin(), 0.0);
  }
  return total;
}

using Square = std::vector<float>;

/// The iteration for one matrix.
class GramIteration {
 public:
  GramIteration(const GramFloatArguments& arguments, std::int64_t batch)
      : a_(arguments),
        batch_(batch),
        wide_(a_.u.is_wide()),
        p_(a_.u.short_side()),
        q_(a_.u.long_side()),
        x_(static_cast<std::size_t>(p_ * q_)),
        r_(static_cast<std::size_t>(p_ * p_)),
        h_(r_),
        t_(r_),
        polynomial_(r_),
        next_(r_) {}

  void run() {
    const NewtonSchulzMatrix& u = a_.u;
    detail::parallel_for(u.rows, kPanel, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) copy_row(u, batch_, i, a_.inverse[batch_], x_.data() + i * u.cols);
    });
    gram();
    for (int i = 0; i < a_.steps.count; ++i) {
      make_factor(a_.steps.step[i]);
      if (i == 0) {
        polynomial_ = h_;
      } else {
        product(1, polynomial_, h_, 0, next_);
        std::swap(polynomial_, next_);
      }
      if (i + 1 < a_.steps.count) {
        product(1, r_, h_, 0, t_);
        product(1, t_, h_, 0, r_);
      }
    }
    apply();
  }

 private:
  static constexpr std::int64_t kPanel = 64;

  /// Calls f(first row, rows, columns) for panels of rows that together cover the lower triangle of a p x p matrix,
  /// then mirrors it.
  template <class F>
  void lower_triangle(Square& matrix, F&& f) {
    const std::int64_t panels = (p_ + kPanel - 1) / kPanel;
    detail::parallel_for(panels, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t panel = begin; panel < end; ++panel) {
        const std::int64_t i = (panels - 1 - panel) * kPanel;  // the longest first
        const std::int64_t rows = std::min(kPanel, p_ - i);
        f(i, rows, i + rows);
      }
    });
    constexpr std::int64_t kTile = 16;
    for (std::int64_t i0 = 0; i0 < p_; i0 += kTile) {
      for (std::int64_t j0 = 0; j0 <= i0; j0 += kTile) {
        for (std::int64_t j = j0; j < std::min(j0 + kTile, p_); ++j) {
          for (std::int64_t i = std::max(i0, j + 1); i < std::min(i0 + kTile, p_); ++i)
            matrix[index(j, i)] = matrix[index(i, j)];
        }
      }
    }
  }

  std::size_t index(std::int64_t i, std::int64_t j) const { return static_cast<std::size_t>(i * p_ + j); }

  /// out = alpha a b + beta out for symmetric matrices that commute.
  void product(double alpha, const Square& a, const Square& b, double beta, Square& out) {
    lower_triangle(out, [&](std::int64_t i, std::int64_t rows, std::int64_t cols) {
      detail::sgemm(false, false, rows, cols, p_, static_cast<float>(alpha), a.data() + i * p_, p_, b.data(), p_,
                    static_cast<float>(beta), out.data() + i * p_, p_);
    });
  }

  /// R = X X^T.
  void gram() {
    const std::int64_t ld = a_.u.cols, step = wide_ ? ld : 1;
    lower_triangle(r_, [&](std::int64_t i, std::int64_t rows, std::int64_t cols) {
      detail::sgemm(!wide_, wide_, rows, cols, q_, 1.0f, x_.data() + i * step, ld, x_.data(), ld, 0.0f,
                    r_.data() + i * p_, p_);
    });
  }

  /// H = a I + b R + c R^2.
  void make_factor(const NewtonSchulzCoefficients& step) {
    h_ = r_;
    product(step.c, r_, r_, step.b, h_);
    for (std::int64_t i = 0; i < p_; ++i) h_[index(i, i)] += static_cast<float>(step.a);
  }

  /// out = Q X (X Q where X is tall), by blocks of rows.
  void apply() {
    const NewtonSchulzMatrix& out = a_.out;
    detail::parallel_for(out.rows, kPanel, [&](std::int64_t begin, std::int64_t end) {
      const std::int64_t rows = end - begin;
      std::vector<float> block(static_cast<std::size_t>(rows * out.cols));
      const float* const left = wide_ ? polynomial_.data() : x_.data();
      const float* const right = wide_ ? x_.data() : polynomial_.data();
      detail::sgemm(false, false, rows, out.cols, p_, 1.0f, left + begin * p_, p_, right, out.cols, 0.0f, block.data(),
                    out.cols);
      detail::dispatch_floating(out.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        for (std::int64_t i = 0; i < rows; ++i) {
          const float* const from = block.data() + i * out.cols;
          std::transform(from, from + out.cols, row_of<T>(out, batch_, begin + i),
                         [](float v) { return convert<T>(v); });
        }
      });
    });
  }

  const GramFloatArguments& a_;
  const std::int64_t batch_;
  const bool wide_;
  const std::int64_t p_, q_;
  Square x_, r_, h_, t_, polynomial_, next_;
};

/// Rows are rotated in pairs until all are orthogonal: J A = diag(sigma) W, hence the polar factor is J^T W.
class JacobiPolar {
 public:
  JacobiPolar(const NewtonSchulzMatrix& u, std::int64_t batch)
      : wide_(u.is_wide()),
        p_(u.short_side()),
        q_(u.long_side()),
        a_(static_cast<std::size_t>(p_ * q_)),
        j_(static_cast<std::size_t>(p_ * p_)) {
    std::vector<double> row(static_cast<std::size_t>(u.cols));
    double largest = 0;
    for (std::int64_t i = 0; i < u.rows; ++i) {
      copy_row(u, batch, i, 1.0, row.data());
      for (std::int64_t k = 0; k < u.cols; ++k) {
        const double value = row[static_cast<std::size_t>(k)];
        (wide_ ? a(i)[k] : a(k)[i]) = value;
        largest = std::isnan(value) ? value : std::max(largest, std::abs(value));
      }
    }
    // Only directions count: squares shall neither overflow nor underflow.
    if (largest > 0) {
      for (double& value : a_) value /= largest;
    }
    for (std::int64_t i = 0; i < p_; ++i) j(i)[i] = 1;
  }

  void store(const NewtonSchulzMatrix& out, std::int64_t batch) {
    orthogonalise();
    normalise();
    std::vector<double> polar(static_cast<std::size_t>(p_ * q_));
    for (std::int64_t k = 0; k < p_; ++k) {
      for (std::int64_t i = 0; i < p_; ++i) {
        const double factor = j(k)[i];
        for (std::int64_t l = 0; l < q_; ++l) polar[static_cast<std::size_t>(i * q_ + l)] += factor * a(k)[l];
      }
    }
    detail::dispatch_floating(out.dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (std::int64_t i = 0; i < out.rows; ++i) {
        T* const row = row_of<T>(out, batch, i);
        for (std::int64_t k = 0; k < out.cols; ++k)
          row[k] = convert<T>(polar[static_cast<std::size_t>(wide_ ? i * q_ + k : k * q_ + i)]);
      }
    });
  }

 private:
  double* a(std::int64_t i) { return a_.data() + i * q_; }
  double* j(std::int64_t i) { return j_.data() + i * p_; }
  double dot(std::int64_t i, std::int64_t k) { return std::inner_product(a(i), a(i) + q_, a(k), 0.0); }

  static void rotate(double* x, double* y, std::int64_t n, double c, double s) {
    for (std::int64_t l = 0; l < n; ++l) {
      const double left = c * x[l] - s * y[l];
      y[l] = s * x[l] + c * y[l];
      x[l] = left;
    }
  }

  void orthogonalise() {
    constexpr int kMostSweeps = 60;
    constexpr double kTiny = 1e-15;
    for (int sweep = 0; sweep < kMostSweeps; ++sweep) {
      bool rotated = false;
      for (std::int64_t i = 0; i + 1 < p_; ++i) {
        for (std::int64_t k = i + 1; k < p_; ++k) {
          const double xx = dot(i, i), yy = dot(k, k), xy = dot(i, k);
          if (!(std::abs(xy) > kTiny * std::sqrt(xx * yy)) || xx == 0 || yy == 0) continue;
          rotated = true;
          const double zeta = (yy - xx) / (2 * xy);
          const double t = std::copysign(1.0, zeta) / (std::abs(zeta) + std::hypot(1.0, zeta));
          const double c = 1 / std::hypot(1.0, t);
          rotate(a(i), a(k), q_, c, c * t);
          rotate(j(i), j(k), p_, c, c * t);
        }
      }
      if (!rotated) return;
    }
  }

  /// Rows of length one; those that are zero to rounding become zero.
  void normalise() {
    std::vector<double> sigma(static_cast<std::size_t>(p_));
    for (std::int64_t i = 0; i < p_; ++i) sigma[static_cast<std::size_t>(i)] = std::sqrt(dot(i, i));
    const double floor = *std::max_element(sigma.begin(), sigma.end()) * static_cast<double>(q_) * 0x1p-53;
    for (std::int64_t i = 0; i < p_; ++i) {
      const double length = sigma[static_cast<std::size_t>(i)];
      for (std::int64_t l = 0; l < q_; ++l) a(i)[l] = length <= floor ? 0.0 : a(i)[l] / length;
    }
  }

  bool wide_;
  std::int64_t p_, q_;
  std::vector<double> a_, j_;  // A [p, q], J [p, p]
};

}  // namespace

void inverse_norms(const InverseNormArguments& n) {
  detail::parallel_for(n.u.batches, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      const double* const sums = n.square_sums + b * n.square_sum_stride;
      const double total = n.square_sums ? std::accumulate(sums, sums + n.square_sum_count, 0.0) : square_sum(n.u, b);
      n.inverse[b] = detail::inverse_norm(total, n.factor, n.epsilon, n.round_to_bfloat16);
    }
  });
}

void newton_schulz_load(const NewtonSchulzMatrix& u, const double* inverse, double scale, const NewtonSchulzMatrix& x) {
  detail::dispatch_floating(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_row(x, [&](std::int64_t b, std::int64_t i) {
      T* const to = row_of<T>(x, b, i);
      std::fill(to, to + x.cols, T{});
      if (i >= u.short_side()) return;
      u.is_wide() ? copy_row(u, b, i, inverse[b] * scale, to) : copy_column(u, b, i, inverse[b] * scale, to);
    });
  });
}

void newton_schulz_add_identity(const NewtonSchulzMatrix& q, double factor) {
  detail::dispatch_floating(q.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each_row(q, [&](std::int64_t b, std::int64_t i) {
      T& diagonal = row_of<T>(q, b, i)[i];
      diagonal = convert<T>(convert<double>(diagonal) + factor);
    });
  });
}

void newton_schulz_store(const NewtonSchulzMatrix& x, double scale, const NewtonSchulzMatrix& out) {
  detail::dispatch_floating(out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    NewtonSchulzMatrix corner = x;
    corner.rows = out.short_side();
    corner.cols = out.long_side();
    for_each_row(out, [&](std::int64_t b, std::int64_t i) {
      T* const to = row_of<T>(out, b, i);
      out.is_wide() ? copy_row(corner, b, i, scale, to) : copy_column(corner, b, i, scale, to);
    });
  });
}

void newton_schulz_gram_float(const GramFloatArguments& arguments) {
  const auto run = [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) GramIteration(arguments, b).run();
  };
  // Many matrices: one a thread. One matrix: threads share its panels.
  if (arguments.u.batches > 1) {
    detail::parallel_for(arguments.u.batches, 1, run);
  } else {
    run(0, arguments.u.batches);
  }
}

void polar_factor(const NewtonSchulzMatrix& u, const NewtonSchulzMatrix& out) {
  detail::parallel_for(u.batches, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) JacobiPolar(u, b).store(out, b);
  });
}

}  // namespace rowan::cpu
