#include "rowan/ops/newton_schulz.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "catch.h"
#include "ops/newton_schulz_products.h"
#include "rowan/core/error.h"
#include "rowan/ops/gemm.h"
#include "support/compare.h"
#include "support/device.h"

namespace rowan {
namespace {

using test::values;
using Values = std::vector<double>;

const StreamRef kCpu;

// ---- the exact polynomial and the reference's roundings, in plain loops
// ---------------------------------------------------

struct Matrix {
  std::int64_t rows = 0, cols = 0;
  Values x;

  Matrix() = default;
  Matrix(std::int64_t r, std::int64_t c) : rows(r), cols(c), x(static_cast<std::size_t>(r * c)) {}
  double& at(std::int64_t i, std::int64_t j) { return x[static_cast<std::size_t>(i * cols + j)]; }
  double at(std::int64_t i, std::int64_t j) const { return x[static_cast<std::size_t>(i * cols + j)]; }
};

Matrix transposed(const Matrix& a) {
  Matrix out(a.cols, a.rows);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t j = 0; j < a.cols; ++j) out.at(j, i) = a.at(i, j);
  }
  return out;
}

Matrix multiplied(const Matrix& a, const Matrix& b) {
  Matrix out(a.rows, b.cols);
  for (std::int64_t i = 0; i < a.rows; ++i) {
    for (std::int64_t k = 0; k < a.cols; ++k) {
      const double factor = a.at(i, k);
      for (std::int64_t j = 0; j < b.cols; ++j) out.at(i, j) += factor * b.at(k, j);
    }
  }
  return out;
}

/// alpha a + beta b, then `round` on each element.
Matrix combined(double alpha, const Matrix& a, double beta, const Matrix& b,
                const std::function<double(double)>& round = {}) {
  Matrix out(a.rows, a.cols);
  for (std::size_t i = 0; i < a.x.size(); ++i) {
    out.x[i] = alpha * a.x[i] + beta * b.x[i];
    if (round) out.x[i] = round(out.x[i]);
  }
  return out;
}

double frobenius(const Matrix& a) {
  double largest = 0, sum = 0;
  for (const double v : a.x) largest = std::max(largest, std::abs(v));
  if (largest == 0) return 0;
  for (const double v : a.x) sum += v / largest * (v / largest);
  return largest * std::sqrt(sum);
}

/// X <- a X + (b G + c G G) X from U / (factor ||U|| + eps), on the short side.
Matrix exact_polynomial(const Matrix& u, const NewtonSchulzOptions& options) {
  Matrix x = u.rows <= u.cols ? u : transposed(u);
  const double divisor = options.schedule.norm_factor * frobenius(u) + options.epsilon;
  for (double& v : x.x) v = divisor == 0 ? 0 : v / divisor;
  for (int i = 0; i < options.steps; ++i) {
    const auto& all = options.schedule.coefficients;
    const auto& [a, b, c] = all[std::min(static_cast<std::size_t>(i), all.size() - 1)];
    const Matrix gram = multiplied(x, transposed(x));
    x = combined(a, x, 1, multiplied(combined(b, gram, c, multiplied(gram, gram)), x));
  }
  return u.rows <= u.cols ? x : transposed(x);
}

double to_bfloat16(double x) { return static_cast<double>(BFloat16(x)); }

/// The public implementation's bfloat16 arithmetic: every operation rounds.
Matrix reference_bfloat16(const Matrix& u) {
  const NewtonSchulzCoefficients k;
  const auto rounded = [](Matrix m) {
    for (double& v : m.x) v = to_bfloat16(v);
    return m;
  };
  Matrix x = rounded(u.rows <= u.cols ? u : transposed(u));
  const double divisor = to_bfloat16(to_bfloat16(frobenius(x)) + 1e-7);
  for (double& v : x.x) v = to_bfloat16(v / divisor);
  for (int i = 0; i < 5; ++i) {
    const Matrix gram = rounded(multiplied(x, transposed(x)));
    const Matrix scaled = combined(k.c, gram, 0, gram, to_bfloat16);
    const Matrix linear = combined(k.b, gram, 0, gram, to_bfloat16);
    const Matrix polynomial = combined(1, linear, 1, rounded(multiplied(scaled, gram)), to_bfloat16);
    x = combined(1, combined(k.a, x, 0, x, to_bfloat16), 1, rounded(multiplied(polynomial, x)), to_bfloat16);
  }
  return u.rows <= u.cols ? x : transposed(x);
}

// ---- matrices
// ---------------------------------------------------------------------------------------------------------

Matrix gaussian(std::int64_t rows, std::int64_t cols, std::uint64_t seed) {
  Matrix out(rows, cols);
  Rng rng(seed);
  for (double& v : out.x) v = rng.normal();
  return out;
}

/// Rows of a Gaussian matrix made orthonormal.
Matrix orthonormal_rows(std::int64_t rows, std::int64_t cols, std::uint64_t seed) {
  Matrix q = gaussian(rows, cols, seed);
  const auto row = [&](std::int64_t i) { return q.x.data() + i * cols; };
  for (std::int64_t i = 0; i < rows; ++i) {
    for (int pass = 0; pass < 2; ++pass) {
      for (std::int64_t k = 0; k < i; ++k) {
        double dot = 0;
        for (std::int64_t j = 0; j < cols; ++j) dot += row(i)[j] * row(k)[j];
        for (std::int64_t j = 0; j < cols; ++j) row(i)[j] -= dot * row(k)[j];
      }
    }
    double square = 0;
    for (std::int64_t j = 0; j < cols; ++j) square += row(i)[j] * row(i)[j];
    for (std::int64_t j = 0; j < cols; ++j) row(i)[j] /= std::sqrt(square);
  }
  return q;
}

/// Singular values 10^(-decades i / (p - 1)).
Matrix with_spectrum(std::int64_t p, std::int64_t q, double decades) {
  Matrix left = orthonormal_rows(p, p, 71);
  for (std::int64_t i = 0; i < p; ++i) {
    for (std::int64_t j = 0; j < p; ++j)
      left.at(i, j) *= std::pow(10.0, -decades * static_cast<double>(j) / static_cast<double>(p - 1));
  }
  return multiplied(left, orthonormal_rows(p, q, 72));
}

Matrix of_rank(std::int64_t p, std::int64_t q, std::int64_t rank) {
  return multiplied(gaussian(p, rank, 73), gaussian(rank, q, 74));
}

struct MatrixClass {
  const char* name;
  Matrix matrix;
};

/// The table of classes by which a path's accuracy is judged.
std::vector<MatrixClass> accuracy_classes(std::int64_t p, std::int64_t q) {
  return {{"Gaussian, square", gaussian(p, p, 75)},
          {"Gaussian", gaussian(p, q, 76)},
          {"spectrum 1..1e-4", with_spectrum(p, q, 4)},
          {"spectrum 1..1e-8", with_spectrum(p, q, 8)},
          {"rank 16", of_rank(p, q, 16)},
          {"rank 1 + noise", combined(1, of_rank(p, q, 1), 1e-3, gaussian(p, q, 77))}};
}

Tensor to_tensor(const Matrix& m, DType dtype, StreamRef stream) {
  return test::convert(Tensor::from_host({m.rows, m.cols}, m.x, kCpu), dtype, kCpu, stream);
}
Matrix to_matrix(const Tensor& t, StreamRef stream) {
  Matrix out(t.size(0), t.size(1));
  out.x = values(t, stream);
  return out;
}

Tensor run(const Tensor& u, NewtonSchulzOptions options, NewtonSchulzPath path, StreamRef stream,
           DType dtype = DType::kFloat32, const Tensor* row_square_sum = nullptr) {
  options.path = path;
  Tensor out = Tensor::empty(u.shape(), dtype, stream);
  newton_schulz(u, out, options, stream, row_square_sum);
  return out;
}

double error(const Tensor& got, const Matrix& expected, StreamRef stream) {
  return test::difference(values(got, stream), expected.x).relative_frobenius;
}

std::vector<NewtonSchulzPath> paths_for(std::int64_t shorter) {
  std::vector<NewtonSchulzPath> paths{NewtonSchulzPath::kStandard, NewtonSchulzPath::kGram,
                                      NewtonSchulzPath::kGramFp32};
  if (shorter <= 64) paths.push_back(NewtonSchulzPath::kSkinny);
  return paths;
}

/// What one path may differ from the exact polynomial on a well-conditioned matrix: roundings grow by at most a per
/// step.
double gaussian_bound(NewtonSchulzPath path, StreamRef stream) {
  if (path == NewtonSchulzPath::kStandard) return 4e-2;
  const bool half = path == NewtonSchulzPath::kGram && stream.device().is_cuda();
  const bool tf32 = path == NewtonSchulzPath::kGramFp32 && stream.device().is_cuda();
  return half || tf32 ? 2e-2 : 1e-4;
}

/// CUDA's storage of the path gram, on either device.
Tensor run_gram_float16(const Tensor& u, StreamRef stream) {
  const auto matrix = [](const Tensor& t) {
    return NewtonSchulzMatrix{t.raw(), t.dtype(), 1, t.size(0), t.size(1), 0, t.stride(0)};
  };
  double square_sum = 0;
  for (const double v : values(u, stream)) square_sum += v * v;
  const Tensor inverse = Tensor::from_host({1}, Values{1 / (std::sqrt(square_sum) + 1e-7)}, stream);
  NewtonSchulzSteps steps;
  for (steps.count = 0; steps.count < 5; ++steps.count) steps.step[steps.count] = {};
  Tensor out = Tensor::empty(u.shape(), DType::kFloat32, stream);
  detail::newton_schulz_gram(matrix(u), matrix(out), inverse, steps, 3, stream);
  return out;
}

// ---- behaviours, on either device
// ---------------------------------------------------------------------------------------

/// `exact` of each matrix is computed by `oracle`.
void check_accuracy_rule(std::int64_t p, std::int64_t q, StreamRef stream,
                         const std::function<Matrix(const Matrix&)>& oracle) {
  for (const auto& [name, matrix] : accuracy_classes(p, q)) {
    const Tensor u = to_tensor(matrix, DType::kBFloat16, stream);
    const Matrix exact = oracle(to_matrix(u, stream));
    const double standard = error(run(u, {}, NewtonSchulzPath::kStandard, stream), exact, stream);
    for (const NewtonSchulzPath path : {NewtonSchulzPath::kGram, NewtonSchulzPath::kGramFp32}) {
      CAPTURE(name, to_string(path));
      CHECK(error(run(u, {}, path, stream), exact, stream) <= standard);
      CHECK(error(run(u, {}, path, stream, DType::kBFloat16), exact, stream) <= standard);
    }
    CAPTURE(name);
    CHECK(error(run_gram_float16(u, stream), exact, stream) <= standard);
  }
}

void check_skinny_accuracy(StreamRef stream) {
  for (const std::int64_t p : {16, 64}) {
    for (const auto& [name, matrix] : accuracy_classes(p, 700)) {
      for (const bool tall : {false, true}) {
        const Tensor u = to_tensor(tall ? transposed(matrix) : matrix, DType::kBFloat16, stream);
        const Matrix exact = exact_polynomial(to_matrix(u, stream), {});
        CAPTURE(name, p, tall);
        CHECK(error(run(u, {}, NewtonSchulzPath::kSkinny, stream), exact, stream) <=
              error(run(u, {}, NewtonSchulzPath::kStandard, stream), exact, stream));
      }
    }
  }
}

void check_sizes(StreamRef stream) {
  const std::int64_t sizes[][2] = {{33, 65},  {67, 89}, {1, 7},     {7, 1},     {1, 1},   {2, 3},    {64, 64},
                                   {65, 130}, {200, 3}, {16, 1000}, {1000, 16}, {17, 31}, {130, 129}};
  for (const auto& [rows, cols] : sizes) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      const Tensor u = to_tensor(gaussian(rows, cols, 81), dtype, stream);
      const Matrix exact = exact_polynomial(to_matrix(u, stream), {});
      for (const NewtonSchulzPath path : paths_for(std::min(rows, cols))) {
        CAPTURE(rows, cols, to_string(dtype), to_string(path));
        CHECK(error(run(u, {}, path, stream), exact, stream) <= gaussian_bound(path, stream));
      }
    }
  }
}

void check_zero(StreamRef stream) {
  for (const std::int64_t rows : {5, 70}) {
    const Tensor u = Tensor::zeros({rows, 80}, DType::kBFloat16, stream);
    NewtonSchulzOptions options;
    for (const double epsilon : {1e-7, 0.0}) {
      options.epsilon = epsilon;
      for (const NewtonSchulzPath path : paths_for(rows)) {
        for (const double x : values(run(u, options, path, stream), stream)) CHECK(x == 0);
      }
    }
  }
}

void check_magnitudes(StreamRef stream) {
  for (const std::int64_t side : {40, 100}) {
    const Matrix base = gaussian(side, 120, 82);
    for (const double scale : {1e-30, 1e-23, 1e-12, 1e15, 1e30}) {
      Matrix scaled = base;
      for (double& v : scaled.x) v *= scale;
      const Tensor u = to_tensor(scaled, DType::kFloat32, stream);
      for (const double epsilon : {1e-7, 0.0}) {
        NewtonSchulzOptions options;
        options.epsilon = epsilon;
        const Matrix exact = exact_polynomial(to_matrix(u, stream), options);
        for (const NewtonSchulzPath path : paths_for(side)) {
          CAPTURE(side, scale, epsilon, to_string(path));
          const Tensor got = run(u, options, path, stream);
          // Far below eps the result leaves float32's and float16's normal numbers: then only finite and tiny.
          if (epsilon > 0 && scale < 1e-20) {
            for (const double x : values(got, stream)) CHECK(std::abs(x) < 1e-9);
          } else {
            CHECK(error(got, exact, stream) <= gaussian_bound(path, stream));
          }
        }
      }
    }
  }
}

/// norm 1e-9 beside eps 1e-7: the output is the polynomial of U / (1e-9 + 1e-7), about 0.01 long.
void check_norm_floor(StreamRef stream) {
  Matrix u = gaussian(128, 128, 83);
  const double norm = frobenius(u);
  for (double& v : u.x) v *= 1e-9 / norm;
  const Tensor tensor = to_tensor(u, DType::kFloat32, stream);
  const Matrix exact = exact_polynomial(to_matrix(tensor, stream), {});
  for (const NewtonSchulzPath path : paths_for(128)) {
    CAPTURE(to_string(path));
    CHECK(error(run(tensor, {}, path, stream), exact, stream) <= gaussian_bound(path, stream));
  }
}

void check_scale_invariance(StreamRef stream) {
  NewtonSchulzOptions options;
  options.epsilon = 0;
  for (const std::int64_t side : {24, 80}) {
    Matrix u = gaussian(side, 96, 84);
    const Tensor plain = to_tensor(u, DType::kFloat32, stream);
    for (double& v : u.x) v *= 0x1p-60;
    const Tensor small = to_tensor(u, DType::kFloat32, stream);
    for (const NewtonSchulzPath path : paths_for(side)) {
      CAPTURE(to_string(path));
      CHECK((values(run(plain, options, path, stream), stream) == values(run(small, options, path, stream), stream)));
    }
  }
}

void check_row_square_sums(StreamRef stream) {
  constexpr std::int64_t kRows = 30;
  const Tensor u = test::random_normal({2, kRows, 50}, DType::kFloat32, 85, stream);
  const Values x = values(u, stream);
  Values sums(2 * kRows), doubled(2 * kRows);
  for (std::size_t i = 0; i < x.size(); ++i) sums[i / 50] += x[i] * x[i];
  for (std::size_t i = 0; i < sums.size(); ++i) doubled[i] = 4 * sums[i];
  const Tensor given = Tensor::from_host({2, kRows}, sums, stream),
               larger = Tensor::from_host({2, kRows}, doubled, stream);
  for (const NewtonSchulzPath path : paths_for(kRows)) {
    CAPTURE(to_string(path));
    const Values own = values(run(u, {}, path, stream), stream);
    CHECK(test::difference(values(run(u, {}, path, stream, DType::kFloat32, &given), stream), own).relative_frobenius <=
          1e-6);
    CHECK(
        test::difference(values(run(u, {}, path, stream, DType::kFloat32, &larger), stream), own).relative_frobenius >=
        1e-2);
  }
}

void check_symmetries(StreamRef stream) {
  for (const std::int64_t rows : {48, 90}) {
    const Matrix u = gaussian(rows, 100, 86);
    Matrix shuffled(rows, 100);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < 100; ++j) shuffled.at(i * 7 % rows, j) = u.at(i, j);
    }
    for (const NewtonSchulzPath path : paths_for(rows)) {
      CAPTURE(rows, to_string(path));
      const double bound = 2 * gaussian_bound(path, stream);
      const Matrix plain = to_matrix(run(to_tensor(u, DType::kBFloat16, stream), {}, path, stream), stream);
      CHECK(error(run(to_tensor(transposed(u), DType::kBFloat16, stream), {}, path, stream), transposed(plain),
                  stream) <= bound);
      if (rows % 7 == 0) continue;
      Matrix expected(rows, 100);
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < 100; ++j) expected.at(i * 7 % rows, j) = plain.at(i, j);
      }
      CHECK(error(run(to_tensor(shuffled, DType::kBFloat16, stream), {}, path, stream), expected, stream) <= bound);
    }
  }
}

/// Batches, slices of rows and of columns give what each matrix gives alone: to the bit, but where cuBLAS may choose
/// another algorithm for another batch.
void check_batches(StreamRef stream) {
  for (const std::int64_t rows : {20, 72}) {
    const Tensor wide = test::random_normal({2, 3, rows + 5, 90}, DType::kBFloat16, 87, stream);
    const Tensor u = wide.slice(2, 2, 2 + rows).slice(3, 4, 84);
    for (const NewtonSchulzPath path : paths_for(rows)) {
      CAPTURE(rows, to_string(path));
      NewtonSchulzOptions options;
      options.path = path;
      const Tensor out_wide = Tensor::zeros({2, 3, rows, 83}, DType::kBFloat16, stream);
      // One stride must walk the leading dimensions, which [.., rows + 5, 90] allows and so does this view.
      Tensor out = out_wide.slice(3, 1, 81);
      newton_schulz(u, out, options, stream);
      for (std::int64_t b = 0; b < 6; ++b) {
        const Tensor alone = u.select(0, b / 3).select(0, b % 3).clone(stream);
        const Values expected = values(run(alone, {}, path, stream, DType::kBFloat16), stream);
        const Values got = values(out.select(0, b / 3).select(0, b % 3), stream);
        if (stream.device().is_cpu() || path == NewtonSchulzPath::kSkinny) {
          CHECK((got == expected));
        } else {
          CHECK(test::difference(got, expected).relative_frobenius <= gaussian_bound(path, stream));
        }
      }
      const Values frame = values(out_wide.slice(3, 0, 1), stream);
      CHECK(std::all_of(frame.begin(), frame.end(), [](double x) { return x == 0; }));
    }
  }
}

void check_rank_one(StreamRef stream) {
  for (const std::int64_t rows : {10, 100}) {
    const Matrix a = gaussian(rows, 1, 88), b = gaussian(1, 130, 89);
    const Matrix product = multiplied(a, b);
    const Tensor u = to_tensor(product, DType::kFloat32, stream);
    const double length = frobenius(product);
    // Rounding X to storage leaves a rest of relative size about its unit roundoff, and the 17 products of the
    // recursion one of float32's; five steps make it 3.4445^5 times as large.
    const auto check = [&](const Tensor& out, double roundoff) {
      const Matrix got = to_matrix(out, stream);
      double sigma = 0, rest = 0;
      for (std::size_t i = 0; i < got.x.size(); ++i) sigma += got.x[i] * product.x[i] / length;
      for (std::size_t i = 0; i < got.x.size(); ++i) rest += std::pow(got.x[i] - sigma * product.x[i] / length, 2);
      CHECK(sigma > 0.68);
      CHECK(sigma < 0.72);
      CHECK(std::sqrt(rest) <= std::pow(3.4445, 5) * (roundoff + 17 * 0x1p-24));
    };
    for (const NewtonSchulzPath path : paths_for(rows)) {
      CAPTURE(rows, to_string(path));
      const bool half = path == NewtonSchulzPath::kGram && stream.device().is_cuda();
      const DType storage = path == NewtonSchulzPath::kStandard ? DType::kBFloat16
                            : half                              ? DType::kFloat16
                                                                : DType::kFloat32;
      check(run(u, {}, path, stream), unit_roundoff(storage));
    }
    CAPTURE(rows);
    check(run_gram_float16(u, stream), unit_roundoff(DType::kFloat16));
  }
}

void check_schedules(StreamRef stream) {
  for (const char* name : {"jordan", "quintic", "polar_express"}) {
    for (const int steps : {1, 2, 5, 7}) {
      for (const std::int64_t rows : {30, 80}) {
        NewtonSchulzOptions options;
        options.schedule = newton_schulz_schedule(name);
        options.steps = steps;
        const Tensor u = to_tensor(gaussian(rows, 90, 90), DType::kBFloat16, stream);
        const Matrix exact = exact_polynomial(to_matrix(u, stream), options);
        for (const NewtonSchulzPath path : paths_for(rows)) {
          CAPTURE(name, steps, rows, to_string(path));
          // Two more steps than five magnify roundings by a^2; so do steeper coefficients.
          CHECK(error(run(u, options, path, stream), exact, stream) <= 4 * gaussian_bound(path, stream));
        }
      }
    }
  }
}

void check_nan(StreamRef stream) {
  for (const std::int64_t rows : {12, 70}) {
    for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      Values x = values(test::random_normal({2, rows, 80}, DType::kFloat32, 91, stream), stream);
      x[static_cast<std::size_t>(rows * 80 + 81)] = bad;
      const Tensor u = test::convert(Tensor::from_host({2, rows, 80}, x, kCpu), DType::kFloat32, kCpu, stream);
      for (const NewtonSchulzPath path : paths_for(rows)) {
        CAPTURE(rows, bad, to_string(path));
        const Values out = values(run(u, {}, path, stream), stream);
        const auto half = out.begin() + rows * 80;
        CHECK(std::all_of(out.begin(), half, [](double v) { return std::isfinite(v); }));
        CHECK(std::any_of(half, out.end(), [](double v) { return std::isnan(v); }));
      }
    }
  }
}

void check_many_matrices(StreamRef stream) {
  const Tensor u = test::random_normal({70000, 2, 3}, DType::kBFloat16, 92, stream);
  const Tensor out = run(u, {}, NewtonSchulzPath::kAuto, stream);
  for (const std::int64_t b : {0, 65535, 65536, 69999}) {
    const Matrix exact = exact_polynomial(to_matrix(u.select(0, b), stream), {});
    CHECK(error(out.select(0, b), exact, stream) <= 1e-4);
  }
}

void check_same_bits(StreamRef stream) {
  for (const std::int64_t rows : {40, 200}) {
    const Tensor u = test::random_normal({rows, 300}, DType::kBFloat16, 93, stream);
    for (const NewtonSchulzPath path : paths_for(rows)) {
      CHECK((values(run(u, {}, path, stream), stream) == values(run(u, {}, path, stream), stream)));
    }
  }
}

void check_empty(StreamRef stream) {
  for (const Shape& shape : {Shape{0, 5}, Shape{5, 0}, Shape{0, 3, 3}, Shape{2, 0, 4}}) {
    for (const NewtonSchulzPath path :
         {NewtonSchulzPath::kAuto, NewtonSchulzPath::kStandard, NewtonSchulzPath::kGram}) {
      CHECK(values(run(Tensor::zeros(shape, DType::kBFloat16, stream), {}, path, stream), stream).empty());
    }
  }
}

ErrorKind kind_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.kind();
  }
  FAIL("nothing was thrown");
  return ErrorKind::kIo;
}

/// exact_polynomial for large matrices: the same iteration with the float64 product of the library.
Matrix exact_polynomial_by_gemm(const Matrix& u) {
  Tensor x = Tensor::from_host({u.rows, u.cols}, u.x, kCpu);
  const double divisor = frobenius(u) + 1e-7;
  Values scaled = u.x;
  for (double& v : scaled) v /= divisor;
  x = Tensor::from_host({u.rows, u.cols}, scaled, kCpu);
  Tensor gram = Tensor::empty({u.rows, u.rows}, DType::kFloat64, kCpu);
  const NewtonSchulzCoefficients k;
  for (int i = 0; i < 5; ++i) {
    gemm(x, x.transpose(0, 1), gram, kCpu);
    Tensor polynomial = gram.clone(kCpu), next = x.clone(kCpu);
    gemm(gram, gram, polynomial, kCpu, {.alpha = k.c, .beta = k.b});
    gemm(polynomial, x, next, kCpu, {.alpha = 1, .beta = k.a});
    x = next;
  }
  return to_matrix(x, kCpu);
}

/// Bits of a batch in place are those of each matrix alone.
void check_skinny_batch(StreamRef stream) {
  const Shape shapes[] = {{16, 300}, {1025, 16}, {3, 5}, {2, 64, 90}, {2100, 33}, {17, 17}, {8, 0}};
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    std::vector<SkinnyItem> items;
    std::vector<Values> expected;
    for (const Shape& shape : shapes) {
      const Tensor u = test::random_normal(shape, dtype, 300 + items.size(), stream);
      const Values x = values(u, stream);
      std::vector<std::int64_t> rows(shape.extents().begin(), shape.extents().end() - 1);
      Values sums(static_cast<std::size_t>(Shape(std::span<const std::int64_t>(rows)).elements()));
      for (std::size_t e = 0; e < x.size(); ++e) sums[e / static_cast<std::size_t>(shape[shape.rank() - 1])] += x[e] * x[e];
      const Tensor square_sums = Tensor::from_host(Shape(std::span<const std::int64_t>(rows)), sums, stream);
      expected.push_back(values(run(u, {}, NewtonSchulzPath::kSkinny, stream, dtype, &square_sums), stream));
      items.push_back({u, square_sums});
    }
    SkinnyBatch(items, {}, stream).run(stream);
    for (std::size_t i = 0; i < items.size(); ++i) {
      CAPTURE(i, to_string(dtype));
      CHECK((values(items[i].matrices, stream) == expected[i]));
    }
  }
}

}  // namespace

TEST_CASE("Every Newton-Schulz path is at least as accurate as the standard one", "[ops][newton_schulz]") {
  check_accuracy_rule(128, 448, kCpu, [](const Matrix& u) { return exact_polynomial(u, {}); });
}

TEST_CASE("The skinny path is at least as accurate as the standard one", "[ops][newton_schulz]") {
  check_skinny_accuracy(kCpu);
}

TEST_CASE("The standard path rounds less than the reference", "[ops][newton_schulz]") {
  for (const auto& [name, matrix] : accuracy_classes(96, 200)) {
    const Tensor u = to_tensor(matrix, DType::kBFloat16, kCpu);
    const Matrix rounded = to_matrix(u, kCpu), exact = exact_polynomial(rounded, {});
    const double reference = test::difference(reference_bfloat16(rounded).x, exact.x).relative_frobenius;
    CAPTURE(name);
    CHECK(error(run(u, {}, NewtonSchulzPath::kStandard, kCpu), exact, kCpu) <= reference);
  }
}

TEST_CASE("The standard path's norm is rounded to bfloat16's 8 bits at any magnitude", "[ops][newton_schulz]") {
  Rng rng(98);
  for (int i = 0; i < 1000; ++i) {
    const double x = std::exp(20 * rng.normal());
    CHECK(detail::round_significand(x, 8) == to_bfloat16(x));
  }
  CHECK(detail::round_significand(0, 8) == 0);
  CHECK(detail::round_significand(0x1.018p+900, 8) == 0x1.02p+900);  // beyond bfloat16's range
  CHECK(detail::round_significand(0x1.01p-900, 8) == 0x1p-900);      // to even
  const double norm = to_bfloat16(to_bfloat16(std::sqrt(7.0)) + 0.01);
  CHECK(detail::inverse_norm(7, 1, 0.01, true) == 1 / norm);
  CHECK(detail::inverse_norm(7, 1, 0.01, false) == 1 / (std::sqrt(7.0) + 0.01));
  CHECK(detail::inverse_norm(0, 1, 0, true) == 0);
}

TEST_CASE("Newton-Schulz takes any size", "[ops][newton_schulz]") { check_sizes(kCpu); }

TEST_CASE("Newton-Schulz of zero is zero", "[ops][newton_schulz]") { check_zero(kCpu); }

TEST_CASE("The norm of Newton-Schulz is right at every magnitude", "[ops][newton_schulz]") { check_magnitudes(kCpu); }

TEST_CASE("Below its eps Newton-Schulz shrinks the output as written", "[ops][newton_schulz]") {
  check_norm_floor(kCpu);
}

TEST_CASE("Without eps Newton-Schulz is scale invariant to the bit", "[ops][newton_schulz]") {
  check_scale_invariance(kCpu);
}

TEST_CASE("Newton-Schulz takes the norm from given row sums", "[ops][newton_schulz]") { check_row_square_sums(kCpu); }

TEST_CASE("Transposing or permuting the input does so to the output of Newton-Schulz", "[ops][newton_schulz]") {
  check_symmetries(kCpu);
}

TEST_CASE("Batches and slices of Newton-Schulz give what each matrix gives alone", "[ops][newton_schulz]") {
  check_batches(kCpu);
}

TEST_CASE("A rank-1 input leaves Newton-Schulz with one singular value of 0.7", "[ops][newton_schulz]") {
  check_rank_one(kCpu);
}

TEST_CASE("Newton-Schulz follows other coefficient schedules and step counts", "[ops][newton_schulz]") {
  check_schedules(kCpu);
}

TEST_CASE("NaN and infinity stay in their matrix of a batch", "[ops][newton_schulz]") { check_nan(kCpu); }

TEST_CASE("Newton-Schulz takes more than 65535 matrices", "[ops][newton_schulz]") { check_many_matrices(kCpu); }

TEST_CASE("Newton-Schulz gives the same bits twice", "[ops][newton_schulz]") { check_same_bits(kCpu); }

TEST_CASE("Newton-Schulz takes empty matrices", "[ops][newton_schulz]") { check_empty(kCpu); }

TEST_CASE("Newton-Schulz drives singular values into its interval", "[ops][newton_schulz]") {
  // Singular values from 1 to 0.01, of which the largest after division by the norm is below 1.
  const Matrix u = with_spectrum(40, 90, 1.2);
  const Matrix out = to_matrix(run(to_tensor(u, DType::kFloat32, kCpu), {}, NewtonSchulzPath::kAuto, kCpu), kCpu);
  // u = L diag(s) R with rows of L and R orthonormal; so L^T out R^T is diagonal with the new singular values.
  const Matrix inner =
      multiplied(multiplied(transposed(orthonormal_rows(40, 40, 71)), out), transposed(orthonormal_rows(40, 90, 72)));
  for (std::int64_t i = 0; i < 40; ++i) {
    for (std::int64_t j = 0; j < 40; ++j) {
      if (i == j) {
        CHECK(inner.at(i, j) >= 0.68);
        CHECK(inner.at(i, j) <= 1.14);
      } else {
        CHECK(std::abs(inner.at(i, j)) <= 1e-4);
      }
    }
  }
}

TEST_CASE("The exact polar factor has singular values of one, or zero where the input has", "[ops][newton_schulz]") {
  for (const double scale : {1.0, 1e-200, 1e200}) {
    for (const bool tall : {false, true}) {
      const Matrix left = orthonormal_rows(5, 12, 94), right = orthonormal_rows(5, 30, 95);
      Matrix u = transposed(left), polar = multiplied(transposed(left), right);
      for (std::int64_t i = 0; i < 12; ++i) {
        for (std::int64_t j = 0; j < 5; ++j) u.at(i, j) *= scale * static_cast<double>(j + 1);
      }
      u = multiplied(u, right);
      if (tall) {
        u = transposed(u);
        polar = transposed(polar);
      }
      const Tensor out = run(to_tensor(u, DType::kFloat64, kCpu), {}, NewtonSchulzPath::kSvd, kCpu, DType::kFloat64);
      CAPTURE(scale, tall);
      CHECK(error(out, polar, kCpu) <= 1e-13);
    }
  }
  for (const double x :
       values(run(Tensor::zeros({3, 4}, DType::kFloat64, kCpu), {}, NewtonSchulzPath::kSvd, kCpu, DType::kFloat64),
              kCpu)) {
    CHECK(x == 0);
  }
}

TEST_CASE("A skinny batch gives each matrix the bits that it gets alone", "[ops][newton_schulz]") {
  check_skinny_batch(kCpu);
}

TEST_CASE("Newton-Schulz paths and schedules have names", "[ops][newton_schulz]") {
  for (const NewtonSchulzPath path : {NewtonSchulzPath::kAuto, NewtonSchulzPath::kStandard, NewtonSchulzPath::kGram,
                                      NewtonSchulzPath::kSkinny, NewtonSchulzPath::kGramFp32, NewtonSchulzPath::kSvd}) {
    CHECK(parse_newton_schulz_path(to_string(path)) == path);
  }
  CHECK(kind_of([] { parse_newton_schulz_path("fast"); }) == ErrorKind::kInvalidArgument);
  CHECK(kind_of([] { newton_schulz_schedule("cubic"); }) == ErrorKind::kInvalidArgument);
  CHECK(resolve_newton_schulz_path(NewtonSchulzPath::kAuto, 64, 4096) == NewtonSchulzPath::kSkinny);
  CHECK(resolve_newton_schulz_path(NewtonSchulzPath::kAuto, 4096, 65) == NewtonSchulzPath::kGram);
  CHECK(resolve_newton_schulz_path(NewtonSchulzPath::kStandard, 8, 8) == NewtonSchulzPath::kStandard);
}

TEST_CASE("Newton-Schulz refuses what does not fit and leaves the output untouched", "[ops][newton_schulz]") {
  const Tensor u = test::random_normal({6, 70}, DType::kFloat32, 96, kCpu);
  Tensor out = test::random_normal({6, 70}, DType::kFloat32, 97, kCpu);
  const Values before = values(out, kCpu);
  const auto refused = [&](const Tensor& input, const NewtonSchulzOptions& options, const Tensor* sums = nullptr) {
    return kind_of([&] { newton_schulz(input, out, options, kCpu, sums); }) == ErrorKind::kInvalidArgument;
  };
  const auto with = [](auto&& change) {
    NewtonSchulzOptions options;
    change(options);
    return options;
  };
  CHECK(refused(test::random_normal({6, 71}, DType::kFloat32, 1, kCpu), {}));
  CHECK(refused(test::random_normal({6, 70}, DType::kFloat16, 1, kCpu), {}));
  CHECK(refused(test::random_normal({6, 70}, DType::kFloat64, 1, kCpu), {}));
  CHECK(refused(test::random_normal({70, 6}, DType::kFloat32, 1, kCpu).transpose(0, 1), {}));
  CHECK(refused(Tensor(), {}));
  CHECK(refused(out, {}));
  CHECK(refused(u, with([](auto& o) { o.steps = 0; })));
  CHECK(refused(u, with([](auto& o) { o.steps = 65; })));
  CHECK(refused(u, with([](auto& o) { o.epsilon = -1; })));
  CHECK(refused(u, with([](auto& o) { o.schedule.coefficients.clear(); })));
  CHECK(refused(u, with([](auto& o) { o.schedule.norm_factor = 0; })));
  CHECK(refused(u, with([](auto& o) { o.schedule.coefficients[0].a = std::numeric_limits<double>::infinity(); })));
  const Tensor wrong_dtype = Tensor::zeros({6}, DType::kFloat32, kCpu),
               wrong_rank = Tensor::zeros({1, 6}, DType::kFloat64, kCpu);
  CHECK(refused(u, {}, &wrong_dtype));
  CHECK(refused(u, {}, &wrong_rank));
  CHECK((values(out, kCpu) == before));

  const Tensor large = Tensor::zeros({65, 66}, DType::kFloat32, kCpu);
  Tensor large_out = Tensor::zeros({65, 66}, DType::kFloat32, kCpu);
  CHECK(kind_of([&] {
          newton_schulz(large, large_out, with([](auto& o) { o.path = NewtonSchulzPath::kSkinny; }), kCpu);
        }) == ErrorKind::kInvalidArgument);
}

// ---- CUDA
// ------------------------------------------------------------------------------------------------------------

TEST_CASE("Newton-Schulz on CUDA behaves like the CPU", "[ops][newton_schulz][gpu][sanitize]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_sizes(stream);
  check_zero(stream);
  check_magnitudes(stream);
  check_norm_floor(stream);
  check_row_square_sums(stream);
  check_symmetries(stream);
  check_batches(stream);
  check_rank_one(stream);
  check_nan(stream);
  check_same_bits(stream);
  check_empty(stream);
  check_skinny_batch(stream);
}

TEST_CASE("Newton-Schulz on CUDA is scale invariant, follows schedules and takes many matrices",
          "[ops][newton_schulz][gpu]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_scale_invariance(stream);
  check_schedules(stream);
  check_many_matrices(stream);
}

TEST_CASE("Newton-Schulz on CUDA refuses the exact polar factor", "[ops][newton_schulz][gpu]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  const Tensor u = Tensor::zeros({3, 4}, DType::kFloat32, stream);
  Tensor out = Tensor::zeros({3, 4}, DType::kFloat32, stream);
  NewtonSchulzOptions options;
  options.path = NewtonSchulzPath::kSvd;
  CHECK(kind_of([&] { newton_schulz(u, out, options, stream); }) == ErrorKind::kUnsupported);
}

TEST_CASE("Every Newton-Schulz path on CUDA is at least as accurate as the standard one", "[ops][newton_schulz][gpu]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_accuracy_rule(128, 448, stream, [](const Matrix& u) { return exact_polynomial(u, {}); });
  check_skinny_accuracy(stream);
}

TEST_CASE("Every Newton-Schulz path on CUDA keeps the accuracy rule at side 1024", "[ops][newton_schulz][gpu][slow]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_accuracy_rule(1024, 3584, stream, exact_polynomial_by_gemm);
}

}  // namespace rowan
