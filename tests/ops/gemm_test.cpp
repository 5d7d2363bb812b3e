#include "rowan/ops/gemm.h"

#include <cmath>
#include <limits>
#include <vector>

#include "catch.h"
#include "rowan/core/error.h"
#include "rowan_build_config.h"
#include "support/device.h"
#include "support/matrix.h"

#if ROWAN_HAVE_BLAS
#include <cblas.h>
#endif

extern "C" void omp_set_num_threads(int);
extern "C" int omp_get_max_threads();

using namespace rowan;
using namespace rowan::test;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// alpha a b + beta c and what each element may be off by.
void check_product(const Matrix& a, const Matrix& b, const Matrix& c_before, const Tensor& c, DType dtype, double alpha,
                   double beta, StreamRef stream) {
  const Matrix exact = sum(scaled(times(a, b), alpha), scaled(c_before, beta));
  const Matrix magnitude =
      sum(scaled(times(absolute(a), absolute(b)), std::abs(alpha)), scaled(absolute(c_before), std::abs(beta)));
  std::vector<double> bound(exact.v.size());
  for (std::size_t i = 0; i < bound.size(); ++i) {
    bound[i] = rounded_error(c.dtype(), exact.v[i], sum_error(accumulator(dtype), a.cols, magnitude.v[i]));
  }
  std::string message;
  const bool good = within(values(c, stream), exact.v, bound, &message);
  INFO(message);
  CHECK(good);
}

struct Sizes {
  std::int64_t m, n, k;
};
const std::vector<Sizes> kSizes = {{1, 1, 1},     {1, 7, 3},     {2, 1, 33},    {3, 2, 1},      {7, 31, 65},
                                   {31, 33, 7},   {33, 63, 129}, {63, 65, 31},  {65, 127, 63},  {127, 3, 1000},
                                   {129, 129, 2}, {1, 1000, 33}, {1000, 1, 65}, {300, 600, 40}, {5, 6, 5000}};

void check_orientations(DType dtype, DType c_dtype, StreamRef stream) {
  for (const Sizes s : kSizes) {
    CAPTURE(dtype, c_dtype, s.m, s.n, s.k);
    const Tensor a = random_normal({s.m, s.k}, dtype, 1, stream), b = random_normal({s.k, s.n}, dtype, 2, stream);
    const Matrix a_host = host(a, stream), b_host = host(b, stream);
    for (const bool a_transposed : {false, true}) {
      for (const bool b_transposed : {false, true}) {
        // Rows apart, the base off by one element, NaN all around.
        const Tensor a_view = a_transposed ? with_gaps(a.transpose(0, 1).clone(stream), 5, 1, stream).transpose(0, 1)
                                           : with_gaps(a, 3, 1, stream);
        const Tensor b_view = b_transposed ? with_gaps(b.transpose(0, 1).clone(stream), 2, 3, stream).transpose(0, 1)
                                           : with_gaps(b, 1, 1, stream);
        Tensor c = with_gaps(random_normal({s.m, s.n}, c_dtype, 3, stream), 7, 1, stream);
        const Matrix c_before = host(c, stream);
        gemm(a_view, b_view, c, stream, {.alpha = -0.5, .beta = 2});
        check_product(a_host, b_host, c_before, c, dtype, -0.5, 2, stream);
      }
    }
  }
}

void check_beta_zero_does_not_read(DType dtype, StreamRef stream) {
  const Tensor a = random_normal({33, 40}, dtype, 1, stream), b = random_normal({40, 65}, dtype, 2, stream);
  const Matrix nothing(33, 65);
  Tensor c =
      convert(Tensor::from_host({33, 65}, std::vector<double>(33 * 65, kNan), StreamRef()), dtype, StreamRef(), stream);
  gemm(a, b, c, stream);
  check_product(host(a, stream), host(b, stream), nothing, c, dtype, 1, 0, stream);
}

void check_writes_only_c(DType dtype, StreamRef stream) {
  const Tensor wide =
      convert(Tensor::from_host({5, 12}, std::vector<double>(60, 7), StreamRef()), dtype, StreamRef(), stream);
  Tensor c = wide.slice(1, 2, 9);
  gemm(random_normal({5, 4}, dtype, 1, stream), random_normal({4, 7}, dtype, 2, stream), c, stream);
  const Matrix after = host(wide, stream);
  for (std::int64_t i = 0; i < 5; ++i) {
    for (const std::int64_t j : {0, 1, 9, 10, 11}) CHECK(after.at(i, j) == 7);
  }
}

void check_batches(DType dtype, StreamRef stream) {
  const Tensor a = random_normal({3, 9, 20}, dtype, 1, stream), b = random_normal({3, 17, 20}, dtype, 2, stream);
  Tensor c = Tensor::empty({3, 9, 17}, dtype, stream);
  gemm(a, b.transpose(1, 2), c, stream);
  for (std::int64_t i = 0; i < 3; ++i) {
    check_product(host(a.select(0, i), stream), transposed(host(b.select(0, i), stream)), Matrix(9, 17), c.select(0, i),
                  dtype, 1, 0, stream);
  }
  // Heads side by side: the batch is the middle dimension of the storage.
  Tensor heads = Tensor::empty({9, 3, 17}, dtype, stream);
  Tensor by_head = heads.transpose(0, 1);
  gemm(a, b.transpose(1, 2), by_head, stream);
  CHECK(values(by_head, stream) == values(c, stream));
}

void check_addend(DType dtype, StreamRef stream) {
  const Tensor a = random_normal({2, 33, 33}, dtype, 1, stream), b = random_normal({2, 33, 33}, dtype, 2, stream),
               other = random_normal({2, 33, 33}, dtype, 3, stream);
  for (const Tensor& addend : {other, a, b}) {
    Tensor c = convert(Tensor::from_host({2, 33, 33}, std::vector<double>(2 * 33 * 33, kNan), StreamRef()), dtype,
                       StreamRef(), stream);
    const std::vector<double> before = values(addend, stream);
    gemm(a, b, c, stream, {.alpha = 0.5, .beta = -2, .addend = &addend});
    for (std::int64_t i = 0; i < 2; ++i) {
      check_product(host(a.select(0, i), stream), host(b.select(0, i), stream), host(addend.select(0, i), stream),
                    c.select(0, i), dtype, 0.5, -2, stream);
    }
    CHECK(values(addend, stream) == before);
  }
  Tensor c = random_normal({2, 4, 5}, dtype, 4, stream);
  const Tensor addend = random_normal({2, 4, 5}, dtype, 5, stream);
  gemm(Tensor::empty({2, 4, 0}, dtype, stream), Tensor::empty({2, 0, 5}, dtype, stream), c, stream,
       {.beta = 1, .addend = &addend});
  CHECK(values(c, stream) == values(addend, stream));
}

void check_empty(DType dtype, StreamRef stream) {
  Tensor c = random_normal({4, 5}, dtype, 1, stream);
  const Matrix before = host(c, stream);
  const Tensor a = Tensor::empty({4, 0}, dtype, stream), b = Tensor::empty({0, 5}, dtype, stream);
  gemm(a, b, c, stream, {.beta = 1});
  CHECK(values(c, stream) == before.v);
  gemm(a, b, c, stream, {.beta = -2});
  CHECK(values(c, stream) == scaled(before, -2).v);
  gemm(a, b, c, stream);
  CHECK(values(c, stream) == std::vector<double>(20, 0));
  for (const Sizes s : {Sizes{0, 5, 3}, Sizes{4, 0, 3}, Sizes{0, 0, 0}}) {
    Tensor none = Tensor::empty({s.m, s.n}, dtype, stream);
    gemm(Tensor::empty({s.m, s.k}, dtype, stream), Tensor::empty({s.k, s.n}, dtype, stream), none, stream);
    CHECK(none.elements() == 0);
  }
  Tensor no_batch = Tensor::empty({0, 2, 2}, dtype, stream);
  gemm(Tensor::empty({0, 2, 3}, dtype, stream), Tensor::empty({0, 3, 2}, dtype, stream), no_batch, stream);
}

void check_repeats(DType dtype, StreamRef stream) {
  const Tensor a = random_normal({40, 3000}, dtype, 1, stream), b = random_normal({3000, 24}, dtype, 2, stream);
  Tensor first = Tensor::empty({40, 24}, dtype, stream), again = Tensor::empty({40, 24}, dtype, stream);
  gemm(a, b, first, stream);
  for (int i = 0; i < 3; ++i) {
    gemm(a, b, again, stream);
    CHECK(values(again, stream) == values(first, stream));
  }
}

void check_non_finite(DType dtype, StreamRef stream) {
  const double infinity = std::numeric_limits<double>::infinity();
  const Tensor a = convert(Tensor::from_host({3, 2}, std::vector<double>{kNan, 1, infinity, 1, 2, 1}, StreamRef()),
                           dtype, StreamRef(), stream);
  const Tensor b =
      convert(Tensor::from_host({2, 1}, std::vector<double>{1, 3}, StreamRef()), dtype, StreamRef(), stream);
  Tensor c = Tensor::empty({3, 1}, dtype, stream);
  gemm(a, b, c, stream);
  const std::vector<double> got = values(c, stream);
  CHECK(std::isnan(got[0]));
  CHECK(got[1] == infinity);
  CHECK(got[2] == 5);
}

const std::vector<DType> kAll = {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16};
const std::vector<DType> kCuda = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

}  // namespace

TEST_CASE("gemm is the float64 product for every orientation, odd sizes, strides and misaligned bases") {
  for (const DType dtype : kAll) {
    check_orientations(dtype, dtype, {});
    if (dtype == DType::kBFloat16 || dtype == DType::kFloat16) check_orientations(dtype, DType::kFloat32, {});
  }
}

TEST_CASE("gemm with beta 0 does not read c") {
  for (const DType dtype : kAll) check_beta_zero_does_not_read(dtype, {});
}

TEST_CASE("gemm adds another matrix than c, also one of its operands") {
  for (const DType dtype : kAll) check_addend(dtype, {});
}

TEST_CASE("gemm writes c and nothing beside its columns") {
  for (const DType dtype : kAll) check_writes_only_c(dtype, {});
}

TEST_CASE("gemm multiplies batches, also where the batch is an inner dimension of c") {
  for (const DType dtype : kAll) check_batches(dtype, {});
}

TEST_CASE("gemm takes matrices without rows, columns or terms") {
  for (const DType dtype : kAll) check_empty(dtype, {});
}

TEST_CASE("gemm passes infinity and NaN on") {
  for (const DType dtype : kAll) check_non_finite(dtype, {});
}

TEST_CASE("gemm of 16-bit inputs into float32 is not rounded to 16 bits") {
  const Tensor a = random_normal({8, 64}, DType::kBFloat16, 1, {}), b = random_normal({64, 8}, DType::kBFloat16, 2, {});
  Tensor c = Tensor::empty({8, 8}, DType::kFloat32, {});
  gemm(a, b, c, {});
  check_product(host(a, {}), host(b, {}), Matrix(8, 8), c, DType::kBFloat16, 1, 0, {});
  CHECK(values(c, {}) != values(convert(c, DType::kBFloat16, {}, {}), {}));
}

TEST_CASE("gemm on the CPU gives the same bits with any number of threads") {
  const int threads = omp_get_max_threads();
  for (const DType dtype : kAll) {
    const Tensor a = random_normal({300, 700}, dtype, 1, {}), b = random_normal({700, 260}, dtype, 2, {});
    Tensor one = Tensor::empty({300, 260}, dtype, {}), many = Tensor::empty({300, 260}, dtype, {});
    omp_set_num_threads(1);
    gemm(a, b, one, {});
    omp_set_num_threads(5);
    gemm(a, b, many, {});
    omp_set_num_threads(threads);
    CHECK(values(one, {}) == values(many, {}));
  }
}

#if ROWAN_HAVE_BLAS
TEST_CASE("gemm on the CPU leaves threads to OpenMP, whichever variant of OpenBLAS the system loads") {
  const Tensor a = random_normal({8, 8}, DType::kFloat32, 1, {});
  Tensor c = Tensor::empty({8, 8}, DType::kFloat32, {});
  gemm(a, a, c, {});
  const bool has_own_threads = openblas_get_parallel() == OPENBLAS_THREAD;
  CHECK((!has_own_threads || openblas_get_num_threads() == 1));
}
#endif

TEST_CASE("gemm refuses arguments that do not fit and leaves c untouched") {
  const StreamRef cpu;
  const Tensor a = random_normal({4, 6}, DType::kFloat32, 1, cpu), b = random_normal({6, 5}, DType::kFloat32, 2, cpu);
  Tensor c = random_normal({4, 5}, DType::kFloat32, 3, cpu);
  const std::vector<double> before = values(c, cpu);
  CHECK_THROWS_AS(gemm(a, a, c, cpu), Error);
  CHECK_THROWS_AS(gemm(a, b.slice(1, 0, 4), c, cpu), Error);
  CHECK_THROWS_AS(gemm(a, random_normal({6, 5}, DType::kBFloat16, 2, cpu), c, cpu), Error);
  CHECK_THROWS_AS(gemm(Tensor(), b, c, cpu), Error);
  CHECK_THROWS_AS(gemm(a, b, c, cpu, {.alpha = kNan}), Error);
  CHECK_THROWS_AS(gemm(random_normal({4, 6, 2}, DType::kFloat32, 1, cpu).select(2, 0), b, c, cpu),
                  Error);  // no unit stride
  Tensor narrow = Tensor::empty({4, 5}, DType::kFloat16, cpu),
         transposed_c = Tensor::empty({5, 4}, DType::kFloat32, cpu).transpose(0, 1);
  CHECK_THROWS_AS(gemm(a, b, narrow, cpu), Error);
  CHECK_THROWS_AS(gemm(a, b, transposed_c, cpu), Error);
  Tensor square = random_normal({5, 5}, DType::kFloat32, 1, cpu);
  CHECK_THROWS_AS(gemm(square, b.slice(0, 0, 5), square, cpu), Error);
  const Tensor short_addend = random_normal({3, 5}, DType::kFloat32, 1, cpu),
               gaps = random_normal({4, 6}, DType::kFloat32, 1, cpu).slice(1, 0, 5);
  CHECK_THROWS_AS(gemm(a, b, c, cpu, {.beta = 1, .addend = &short_addend}), Error);
  CHECK_THROWS_AS(gemm(a, b, c, cpu, {.beta = 1, .addend = &gaps}), Error);
  CHECK_THROWS_AS(gemm(a, b, c, cpu, {.beta = 1, .addend = &narrow}), Error);
  CHECK(values(c, cpu) == before);
}

TEST_CASE("gemm on CUDA is the float64 product for every orientation, odd sizes, strides and misaligned bases",
          "[gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType dtype : kCuda) {
    check_orientations(dtype, dtype, stream);
    if (dtype != DType::kFloat32) check_orientations(dtype, DType::kFloat32, stream);
  }
}

TEST_CASE("gemm on CUDA handles beta 0, batches, empty matrices and non-finite values", "[gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType dtype : kCuda) {
    check_beta_zero_does_not_read(dtype, stream);
    check_addend(dtype, stream);
    check_writes_only_c(dtype, stream);
    check_batches(dtype, stream);
    check_empty(dtype, stream);
    check_non_finite(dtype, stream);
  }
}

TEST_CASE("gemm on CUDA gives the same bits twice", "[gpu]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType dtype : kCuda) check_repeats(dtype, stream);
}

TEST_CASE("gemm on CUDA keeps float32 at full precision unless TF32 is allowed", "[gpu]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  // 1 + 2^-12 is lost in TF32's 10 bits of fraction.
  const std::vector<float> ones(256 * 256, 1.0f + 0x1p-12f);
  const Tensor a = Tensor::from_host({256, 256}, ones, stream);
  Tensor c = Tensor::empty({256, 256}, DType::kFloat32, stream);
  gemm(a, a, c, stream);
  const double exact = 256 * (1 + 0x1p-12) * (1 + 0x1p-12);
  for (const double value : values(c, stream)) REQUIRE(std::abs(value - exact) < 1e-3);
}

TEST_CASE("gemm on CUDA reaches beyond 32-bit offsets", "[gpu][slow]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  const std::int64_t rows = 70000, stride = 32768, k = 64;  // rows * stride > 2^31
  const Tensor storage = Tensor::zeros({rows, stride}, DType::kBFloat16, stream);
  const Tensor a = storage.slice(1, 0, k), b = random_normal({k, 16}, DType::kBFloat16, 2, stream);
  const Tensor last = random_normal({3, k}, DType::kBFloat16, 1, stream);
  a.slice(0, rows - 3, rows).copy_from(last, stream);
  Tensor c = storage.slice(1, stride - 16, stride);
  gemm(a, b, c, stream);
  check_product(host(last, stream), host(b, stream), Matrix(3, 16), c.slice(0, rows - 3, rows), DType::kBFloat16, 1, 0,
                stream);
}
