#include "rowan/ops/elementwise.h"

#include <cmath>
#include <limits>
#include <vector>

#include "catch.h"
#include "rowan/core/error.h"
#include "support/device.h"
#include "support/matrix.h"

using namespace rowan;
using namespace rowan::test;

namespace {

const std::vector<DType> kAll = {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16};
const std::vector<DType> kCuda = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

double round_to(DType dtype, double x) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<float>(x);
    case DType::kBFloat16:
      return static_cast<double>(BFloat16(x));
    case DType::kFloat16:
      return static_cast<double>(Float16(x));
    default:
      return x;
  }
}

/// A value that an operation computes and stores: CUDA computes in float32.
double computed(DType dtype, double x, StreamRef stream) {
  return round_to(dtype, stream.device().is_cuda() ? round_to(DType::kFloat32, x) : x);
}

Tensor make(const Shape& shape, const std::vector<double>& v, DType dtype, StreamRef stream) {
  return convert(Tensor::from_host(shape, v, StreamRef()), dtype, StreamRef(), stream);
}

/// Contiguous, with gaps and a misaligned base, and transposed.
std::vector<Tensor> layouts(const Tensor& t, StreamRef stream) {
  return {t, with_gaps(t, 3, 1, stream), stored_transposed(t, stream)};
}

void check_cast(DType from, DType to, StreamRef stream) {
  const double infinity = std::numeric_limits<double>::infinity();
  std::vector<double> numbers = {
      0,      -0.0,     1,         -2.5, 1.00390625, 1 + 0x1p-8 + 0x1p-20, 65504, 65519, 65520, 1e-7, 3e-8, 6e-8, 1e-40,
      3.4e38, infinity, -infinity, 1e30, 0x1p-14,    0x1.ffcp-15,          7,     -1e-3};
  const Tensor source = make({3, 7}, numbers, from, stream);
  for (double& x : numbers) x = round_to(to, round_to(from, x));
  for (const Tensor& in : layouts(source, stream)) {
    for (Tensor out : layouts(make({3, 7}, std::vector<double>(21, 5), to, stream), stream)) {
      cast(in, out, stream);
      CAPTURE(from, to);
      CHECK(values(out, stream) == numbers);
    }
  }
  Tensor nan = make({1}, {5}, to, stream);
  cast(make({1}, {std::nan("")}, from, stream), nan, stream);
  CHECK(std::isnan(values(nan, stream)[0]));
}

void check_fill_and_scale(DType dtype, StreamRef stream) {
  const Tensor source = random_normal({5, 12}, dtype, 1, stream);
  const std::vector<double> before = values(source, stream);
  std::vector<double> tripled = before;
  for (double& x : tripled) x = computed(dtype, 3 * x, stream);
  for (Tensor t : layouts(source, stream)) {
    scale(t, 3, stream);
    CHECK(values(t, stream) == tripled);
    fill(t, 0.1, stream);
    CHECK(values(t, stream) == std::vector<double>(60, computed(dtype, 0.1, stream)));
    fill(t, std::nan(""), stream);
    scale(t, 0, stream);
    CHECK(values(t, stream) == std::vector<double>(60, 0));
  }
}

void check_add(DType dtype, StreamRef stream) {
  for (const std::int64_t cols : {1, 4, 7, 64}) {
    const Tensor a = random_normal({9, cols}, dtype, 1, stream), b = random_normal({9, cols}, dtype, 2, stream);
    std::vector<double> exact = values(a, stream);
    const std::vector<double> other = values(b, stream);
    for (std::size_t i = 0; i < exact.size(); ++i) exact[i] = computed(dtype, exact[i] + other[i], stream);
    for (const Tensor& left : layouts(a, stream)) {
      for (const Tensor& right : layouts(b, stream)) {
        Tensor out = Tensor::empty({9, cols}, dtype, stream), in_place = left;
        add(left, right, out, stream);
        CHECK(values(out, stream) == exact);
        Tensor copy = with_gaps(left, 2, 4, stream);
        add(copy, right, copy, stream);
        CHECK(values(copy, stream) == exact);
      }
    }
  }
}

void check_rank_three(DType dtype, StreamRef stream) {
  const Tensor whole = random_normal({3, 5, 8}, dtype, 1, stream);
  const Tensor part = whole.slice(2, 1, 6);  // leading dimensions step evenly
  Tensor dense = Tensor::empty({3, 5, 5}, dtype, stream);
  cast(part, dense, stream);
  CHECK(values(dense, stream) == values(part, stream));
  add(part, dense, dense, stream);
  std::vector<double> twice = values(part, stream);
  for (double& x : twice) x *= 2;
  CHECK(values(dense, stream) == twice);
}

void check_row_vector(DType dtype, StreamRef stream) {
  const Tensor y = random_normal({6, 37}, dtype, 1, stream), bias = random_normal({37}, dtype, 2, stream);
  const std::vector<double> before = values(y, stream), vector = values(bias, stream);
  std::vector<double> added = before, repeated = before;
  for (std::size_t i = 0; i < added.size(); ++i) {
    added[i] = computed(dtype, before[i] + vector[i % 37], stream);
    repeated[i] = vector[i % 37];
  }
  for (Tensor t : layouts(y, stream)) {
    add_row_vector(t, bias, stream);
    CHECK(values(t, stream) == added);
    broadcast_row(bias, t, stream);
    CHECK(values(t, stream) == repeated);
  }
}

void check_sum_rows(DType dtype, StreamRef stream) {
  for (const std::int64_t rows : {0, 1, 2, 31, 257, 1000}) {
    for (const std::int64_t cols : {1, 33, 200}) {
      const Tensor x = random_normal({rows, cols}, dtype, 1, stream);
      const Matrix m = host(x, stream);
      for (const Tensor& in : layouts(x, stream)) {
        Tensor out =
            make({cols}, std::vector<double>(static_cast<std::size_t>(cols), std::nan("")), accumulator(dtype), stream);
        sum_rows(in, out, stream);
        const std::vector<double> once = values(out, stream);
        std::vector<double> exact(static_cast<std::size_t>(cols)), bound = exact;
        for (std::int64_t j = 0; j < cols; ++j) {
          double magnitude = 0;
          for (std::int64_t i = 0; i < rows; ++i) {
            exact[static_cast<std::size_t>(j)] += m.at(i, j);
            magnitude += std::abs(m.at(i, j));
          }
          bound[static_cast<std::size_t>(j)] = sum_error(accumulator(dtype), rows, magnitude);
        }
        CAPTURE(dtype, rows, cols);
        CHECK(within(once, exact, bound));
        sum_rows(in, out, stream, 1);
        for (std::size_t j = 0; j < exact.size(); ++j) {
          exact[j] *= 2;
          bound[j] = 2 * bound[j] + 2 * ulp(accumulator(dtype), exact[j]);
        }
        CHECK(within(values(out, stream), exact, bound));
      }
    }
  }
}

void check_sum(DType dtype, StreamRef stream) {
  for (const std::int64_t cols : {1, 7, 5000}) {
    const Tensor x = random_normal({11, cols}, dtype, 1, stream);
    double exact = 0, magnitude = 0;
    for (const double v : values(x, stream)) {
      exact += v;
      magnitude += std::abs(v);
    }
    for (const Tensor& in : layouts(x, stream)) {
      Tensor out = Tensor::empty({1}, DType::kFloat64, stream);
      sum(in, out, stream);
      CHECK(std::abs(values(out, stream)[0] - exact) <= sum_error(DType::kFloat64, 11 * cols, magnitude));
    }
  }
  Tensor none = Tensor::empty({1}, DType::kFloat64, stream);
  sum(Tensor::empty({0, 4}, dtype, stream), none, stream);
  CHECK(values(none, stream)[0] == 0);
}

void check_empty(DType dtype, StreamRef stream) {
  Tensor none = Tensor::empty({0, 4}, dtype, stream), other = Tensor::empty({0, 4}, dtype, stream);
  cast(none, other, stream);
  fill(none, 1, stream);
  scale(none, 2, stream);
  add(none, none, other, stream);
  const Tensor bias = random_normal({4}, dtype, 1, stream);
  add_row_vector(none, bias, stream);
  broadcast_row(bias, none, stream);
}

void check_all(DType dtype, StreamRef stream) {
  check_fill_and_scale(dtype, stream);
  check_add(dtype, stream);
  check_rank_three(dtype, stream);
  check_row_vector(dtype, stream);
  check_sum_rows(dtype, stream);
  check_sum(dtype, stream);
  check_empty(dtype, stream);
}

}  // namespace

TEST_CASE("cast rounds to nearest even once between any two floating dtypes, for any strides") {
  for (const DType from : kAll) {
    for (const DType to : kAll) check_cast(from, to, {});
  }
}

TEST_CASE("fill and scale write every element of any matrix, and scale by zero does not read") {
  for (const DType dtype : kAll) check_fill_and_scale(dtype, {});
}

TEST_CASE("add takes any strides and may write over an operand") {
  for (const DType dtype : kAll) check_add(dtype, {});
}

TEST_CASE("elementwise operations take rank three with gaps behind rows") {
  for (const DType dtype : kAll) check_rank_three(dtype, {});
}

TEST_CASE("a row vector is added to every row or copied to every row") {
  for (const DType dtype : kAll) check_row_vector(dtype, {});
}

TEST_CASE("sum_rows is the column sum, zero without rows, and adds with beta 1") {
  for (const DType dtype : kAll) check_sum_rows(dtype, {});
}

TEST_CASE("sum adds all elements in float64") {
  for (const DType dtype : kAll) check_sum(dtype, {});
}

TEST_CASE("elementwise operations take tensors without elements") {
  for (const DType dtype : kAll) check_empty(dtype, {});
}

TEST_CASE("elementwise operations refuse arguments that do not fit and leave outputs untouched") {
  const StreamRef cpu;
  const Tensor a = random_normal({4, 6}, DType::kFloat32, 1, cpu), b = random_normal({4, 5}, DType::kFloat32, 2, cpu);
  Tensor out = random_normal({4, 6}, DType::kFloat32, 3, cpu);
  const std::vector<double> before = values(out, cpu);
  CHECK_THROWS_AS(add(a, b, out, cpu), Error);
  CHECK_THROWS_AS(add(a, random_normal({4, 6}, DType::kBFloat16, 2, cpu), out, cpu), Error);
  CHECK_THROWS_AS(add(Tensor(), a, out, cpu), Error);
  CHECK_THROWS_AS(cast(b, out, cpu), Error);
  CHECK_THROWS_AS(cast(Tensor::zeros({4, 6}, DType::kInt32, cpu), out, cpu), Error);
  CHECK_THROWS_AS(add_row_vector(out, random_normal({5}, DType::kFloat32, 1, cpu), cpu), Error);
  CHECK_THROWS_AS(scale(out, std::nan(""), cpu), Error);
  Tensor sums = Tensor::empty({6}, DType::kBFloat16, cpu);
  CHECK_THROWS_AS(sum_rows(a, sums, cpu), Error);
  CHECK(values(out, cpu) == before);
  // Shifted views of one buffer: each write would change what is read next.
  const Tensor line = random_normal({10}, DType::kFloat32, 1, cpu);
  Tensor shifted = line.slice(0, 1, 10);
  const std::vector<double> line_before = values(line, cpu);
  CHECK_THROWS_AS(add(line.slice(0, 0, 9), line.slice(0, 0, 9), shifted, cpu), Error);
  CHECK(values(line, cpu) == line_before);
}

TEST_CASE("cast on CUDA rounds to nearest even once, for any strides", "[gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType from : kCuda) {
    for (const DType to : kCuda) check_cast(from, to, stream);
  }
}

TEST_CASE("elementwise operations on CUDA agree with float64", "[gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType dtype : kCuda) check_all(dtype, stream);
}
