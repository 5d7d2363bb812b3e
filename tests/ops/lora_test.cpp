#include "rowan/ops/lora.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "catch.h"
#include "ops/lora_backend.h"
#include "ops/lora_plan.h"
#include "ops/tile_order.h"
#include "rowan/core/error.h"
#include "rowan/ops/elementwise.h"
#include "support/device.h"
#include "support/lora_oracle.h"

extern "C" void omp_set_num_threads(int);
extern "C" int omp_get_max_threads();

using namespace rowan;
using namespace rowan::test;

namespace {

const std::vector<DType> kAll = {DType::kFloat64, DType::kFloat32, DType::kBFloat16, DType::kFloat16};
const std::vector<DType> kCuda = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
const std::vector<std::int64_t> kOdd = {0, 1, 2, 3, 7, 31, 33, 63, 65, 127, 129, 1000};
const std::vector<std::int64_t> kRanks = {1, 3, 4, 8, 12, 17, 24, 100};

struct Sizes {
  std::int64_t m, k, n, r;
};

/// Every odd size in every place and every rank, without all their combinations.
std::vector<Sizes> all_sizes() {
  std::vector<Sizes> all;
  for (std::size_t i = 0; i < kOdd.size(); ++i) {
    const auto pick = [&](std::size_t step) { return kOdd[(i * 5 + step) % kOdd.size()]; };
    for (const std::size_t shift : {0u, 3u, 7u}) {
      Sizes s{pick(shift), pick(shift + 4), pick(2 * shift + 9), kRanks[(i + shift) % kRanks.size()]};
      if (s.m * s.k > 200000 || s.m * s.n > 200000) s.m = 7;  // keeps the float64 oracle quick
      all.push_back(s);
    }
  }
  return all;
}

Tensor poisoned(const Shape& shape, DType dtype, StreamRef stream) {
  Tensor t = Tensor::empty(shape, dtype, stream);
  fill(t, std::nan(""), stream);
  return with_gaps(t, 3, 1, stream);
}

void check(const Tensor& t, const Estimate& e, StreamRef stream) {
  std::string message;
  const bool good = agrees(t, e, stream, &message);
  INFO(message);
  CHECK(good);
}

/// The layouts a factor may come in.
std::vector<Tensor> factor_layouts(const Tensor& f, StreamRef stream) {
  return {f, with_gaps(f, 5, 1, stream), with_gaps(f.transpose(0, 1).clone(stream), 2, 3, stream).transpose(0, 1)};
}

void check_primitives(const Sizes& s, DType dtype, const DropoutMask* mask, StreamRef stream) {
  CAPTURE(dtype, s.m, s.k, s.r);
  const Tensor wide = with_gaps(random_normal({s.m, s.k}, dtype, 1, stream), 5, 1, stream);
  const Tensor factor = random_normal({s.r, s.k}, dtype, 2, stream, 0.5);
  const Tensor narrow = with_gaps(random_normal({s.m, s.r}, dtype, 3, stream), 4, 2, stream);
  const Matrix wide_host = host(wide, stream), factor_host = host(factor, stream), narrow_host = host(narrow, stream);

  const std::int64_t padded = (s.r + 15) / 16 * 16;
  for (const Tensor& f : factor_layouts(factor, stream)) {
    Tensor out = poisoned({s.m, padded}, dtype, stream);
    lora_shrink(wide, f, -1.7, out, stream, mask);
    check(out.slice(1, 0, s.r), shrink_estimate(wide_host, factor_host, -1.7, dtype, mask), stream);
    CHECK(values(out.slice(1, s.r, padded), stream) ==
          std::vector<double>(static_cast<std::size_t>(s.m * (padded - s.r)), 0));

    Tensor spread = poisoned({s.m, s.k}, dtype, stream);
    lora_expand(narrow, f, spread, 0, stream, mask);
    check(spread, expand_estimate(stored(narrow_host), factor_host, dtype, dtype, nullptr, mask), stream);
    Tensor added = with_gaps(random_normal({s.m, s.k}, dtype, 4, stream), 1, 1, stream);
    const Matrix before = host(added, stream);
    lora_expand(narrow, f, added, 1, stream, mask);
    check(added, expand_estimate(stored(narrow_host), factor_host, dtype, dtype, &before, mask), stream);
  }

  for (const bool transposed : {false, true}) {  // both primitives of one wide matrix at once
    const Tensor f = transposed ? stored_transposed(factor, stream) : factor;
    Tensor out = poisoned({s.m, padded}, dtype, stream),
           grad = random_normal({s.k, s.r}, accumulator(dtype), 5, stream);
    if (transposed) grad = grad.transpose(0, 1).clone(stream).transpose(0, 1);
    Tensor rows = grad.transpose(0, 1);
    const Matrix before = host(rows, stream);
    lora_shrink_reduce(wide, f, 0.6, out, narrow, rows, 1, stream, mask);
    check(out.slice(1, 0, s.r), shrink_estimate(wide_host, factor_host, 0.6, dtype, mask), stream);
    CHECK(values(out.slice(1, s.r, padded), stream) ==
          std::vector<double>(static_cast<std::size_t>(s.m * (padded - s.r)), 0));
    check(rows, reduce_estimate(stored(narrow_host), wide_host, dtype, &before, mask), stream);
  }
  for (const bool transposed_grad : {false, true}) {
    Tensor grad = poisoned(transposed_grad ? Shape{s.k, s.r} : Shape{s.r, s.k}, accumulator(dtype), stream);
    if (transposed_grad) grad = grad.transpose(0, 1);
    lora_reduce(narrow, wide, grad, 0, stream, mask);
    check(grad, reduce_estimate(stored(narrow_host), wide_host, dtype, nullptr, mask), stream);
    const Matrix before = host(grad, stream);
    lora_reduce(narrow, wide, grad, 1, stream, mask);
    check(grad, reduce_estimate(stored(narrow_host), wide_host, dtype, &before, mask), stream);
  }
}

struct Problem {
  Tensor x, a, b, dy;
  Matrix x_host, a_host, b_host, dy_host;
};
Problem make_problem(const Sizes& s, DType dtype, DType factor_dtype, StreamRef stream) {
  Problem p;
  p.x = random_normal({s.m, s.k}, dtype, 1, stream);
  p.a = random_normal({s.r, s.k}, factor_dtype, 2, stream, 0.3);
  p.b = random_normal({s.n, s.r}, factor_dtype, 3, stream, 0.3);
  p.dy = random_normal({s.m, s.n}, dtype, 4, stream);
  p.x_host = host(p.x, stream);
  p.a_host = host(convert(p.a, dtype, stream, {}), {});
  p.b_host = host(convert(p.b, dtype, stream, {}), {});
  p.dy_host = host(p.dy, stream);
  return p;
}

/// The three operations of an adapter against float64, with factors in `factor_dtype`.
void check_adapter(const Sizes& s, DType dtype, DType factor_dtype, StreamRef stream) {
  CAPTURE(dtype, factor_dtype, s.m, s.k, s.n, s.r);
  const Problem p = make_problem(s, dtype, factor_dtype, stream);
  const double scale = 0.7;
  const Estimate u = shrink_estimate(p.x_host, p.a_host, scale, dtype),
                 t = shrink_estimate(p.dy_host, transposed(p.b_host), scale, dtype);

  Tensor y = poisoned({s.m, s.n}, dtype, stream);
  lora_forward(p.x, p.a, p.b, scale, y, 0, stream);
  check(y, expand_estimate(u, transposed(p.b_host), dtype, dtype), stream);
  CHECK(values(lora_forward(p.x, p.a, p.b, scale, stream), stream) == values(y, stream));
  const Matrix before = host(y, stream);
  lora_forward(p.x, p.a, p.b, scale, y, 1, stream);
  check(y, expand_estimate(u, transposed(p.b_host), dtype, dtype, &before), stream);

  Tensor dx = poisoned({s.m, s.k}, dtype, stream), da = poisoned({s.r, s.k}, accumulator(dtype), stream);
  lora_da_dx(p.dy, p.x, p.a, p.b, scale, dx, da, 0, stream);
  check(dx, expand_estimate(t, p.a_host, dtype, dtype), stream);
  check(da, reduce_estimate(t, p.x_host, dtype), stream);
  const LoraDaDx fresh = lora_da_dx(p.dy, p.x, p.a, p.b, scale, stream);
  CHECK(values(fresh.dx, stream) == values(dx, stream));
  CHECK(values(fresh.da, stream) == values(da, stream));

  Tensor db = poisoned({s.n, s.r}, accumulator(dtype), stream);
  lora_db(p.dy, p.x, p.a, scale, db, 0, stream);
  check(db, transposed(reduce_estimate(u, p.dy_host, dtype)), stream);
  CHECK(values(lora_db(p.dy, p.x, p.a, scale, stream), stream) == values(db, stream));
  const Matrix db_before = transposed(host(db, stream));
  lora_db(p.dy, p.x, p.a, scale, db, 1, stream);
  check(db, transposed(reduce_estimate(u, p.dy_host, dtype, &db_before)), stream);
}

void check_out_dtypes(DType dtype, StreamRef stream) {
  const Sizes s{9, 40, 21, 8};
  const Problem p = make_problem(s, dtype, dtype, stream);
  const Estimate u = shrink_estimate(p.x_host, p.a_host, 2, dtype);
  for (const DType out : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    CAPTURE(dtype, out);
    const Tensor y = lora_forward(p.x, p.a, p.b, 2, stream, out);
    CHECK(y.dtype() == out);
    check(y, expand_estimate(u, transposed(p.b_host), dtype, out), stream);
  }
}

/// dy with a row stride above N and a base off by one element against its contiguous copy.
void check_strided_dy(DType dtype, StreamRef stream) {
  const Problem p = make_problem({50, 70, 90, 12}, dtype, dtype, stream);
  const Tensor strided = with_gaps(p.dy, 13, 1, stream);
  const LoraDaDx plain = lora_da_dx(p.dy, p.x, p.a, p.b, 1.5, stream),
                 other = lora_da_dx(strided, p.x, p.a, p.b, 1.5, stream);
  CHECK(values(plain.dx, stream) == values(other.dx, stream));
  CHECK(values(plain.da, stream) == values(other.da, stream));
  CHECK(values(lora_db(p.dy, p.x, p.a, 1.5, stream), stream) ==
        values(lora_db(strided, p.x, p.a, 1.5, stream), stream));
}

void check_slack(DType dtype, StreamRef stream) {
  const std::int64_t m = 37, k = 50, r = 5, padded = 16;
  Tensor x = Tensor::empty_with_slack({m, k}, padded, dtype, stream);
  Tensor all = x.with_slack(x.slack());
  fill(all, std::nan(""), stream);
  x.copy_from(random_normal({m, k}, dtype, 1, stream), stream);
  const Tensor a = random_normal({r, k}, dtype, 2, stream);
  const Matrix x_host = host(x, stream);
  Tensor s = x.slack_view(padded);
  lora_shrink(x, a, 2, s, stream);
  CHECK(values(x, stream) == x_host.v);
  check(s.slice(1, 0, r), shrink_estimate(x_host, host(a, stream), 2, dtype), stream);
  CHECK(values(s.slice(1, r, padded), stream) == std::vector<double>(static_cast<std::size_t>(m * (padded - r)), 0));
}

void check_all_dropped(DType dtype, StreamRef stream) {
  const DropoutMask mask{1, 5, 0, {}};
  Tensor wide = random_normal({9, 20}, dtype, 1, stream);
  fill(wide, std::numeric_limits<double>::infinity(), stream);
  const Tensor factor = random_normal({4, 20}, dtype, 2, stream), narrow = random_normal({9, 4}, dtype, 3, stream);
  Tensor out = poisoned({9, 16}, dtype, stream);
  lora_shrink(wide, factor, 1, out, stream, &mask);
  CHECK(values(out, stream) == std::vector<double>(9 * 16, 0));
  Tensor spread = poisoned({9, 20}, dtype, stream), kept = random_normal({9, 20}, dtype, 4, stream);
  const std::vector<double> before = values(kept, stream);
  lora_expand(narrow, factor, spread, 0, stream, &mask);
  lora_expand(narrow, factor, kept, 1, stream, &mask);
  CHECK(values(spread, stream) == std::vector<double>(9 * 20, 0));
  CHECK(values(kept, stream) == before);
  Tensor grad = poisoned({4, 20}, accumulator(dtype), stream);
  lora_reduce(narrow, wide, grad, 0, stream, &mask);
  CHECK(values(grad, stream) == std::vector<double>(4 * 20, 0));
}

/// NaN in one row of x reaches that row of y and no other.
void check_non_finite(DType dtype, StreamRef stream) {
  const Sizes s{20, 33, 18, 3};
  const Problem p = make_problem(s, dtype, dtype, stream);
  const std::vector<double> clean = values(lora_forward(p.x, p.a, p.b, 1, stream), stream);
  Tensor bad_row = p.x.slice(0, 7, 8);
  fill(bad_row, std::nan(""), stream);
  const std::vector<double> got = values(lora_forward(p.x, p.a, p.b, 1, stream), stream);
  for (std::size_t i = 0; i < got.size(); ++i) {
    const bool nan_row = i / 18 == 7;
    REQUIRE((nan_row ? std::isnan(got[i]) : got[i] == clean[i]));
  }
}

void check_same_bits(DType dtype, StreamRef stream) {
  const Problem p = make_problem({700, 300, 200, 16}, dtype, dtype, stream);
  const DropoutMask mask{0.5, 11, 22, {}};
  const auto run = [&] {
    Tensor s = Tensor::empty({700, 16}, dtype, stream);
    lora_shrink(p.x, p.a, 1, s, stream, &mask);
    const LoraDaDx grads = lora_da_dx(p.dy, p.x, p.a, p.b, 1, stream);
    return std::vector{values(s, stream), values(lora_forward(p.x, p.a, p.b, 1, stream), stream),
                       values(grads.dx, stream), values(grads.da, stream),
                       values(lora_db(p.dy, p.x, p.a, 1, stream), stream)};
  };
  CHECK(run() == run());
}

void check_guards(StreamRef stream) {
  const auto poison = std::make_shared<PoisonAllocator>(current_allocator(stream.device()));
  {
    const ScopedAllocator scope(poison);
    for (const DType dtype : kCuda) {
      for (const Sizes s : {Sizes{1, 3, 2, 1}, Sizes{33, 65, 127, 17}, Sizes{130, 33, 7, 8}})
        check_adapter(s, dtype, dtype, stream);
    }
  }
  CHECK(poison->violations() == 0);
}

void check_many_rows(DType dtype, StreamRef stream) {
  const Sizes s{65537, 8, 9, 3};
  const Problem p = make_problem(s, dtype, dtype, stream);
  const Tensor y = lora_forward(p.x, p.a, p.b, 1, stream);
  const LoraDaDx grads = lora_da_dx(p.dy, p.x, p.a, p.b, 1, stream);
  const Estimate u = shrink_estimate(p.x_host, p.a_host, 1, dtype),
                 t = shrink_estimate(p.dy_host, transposed(p.b_host), 1, dtype);
  check(y, expand_estimate(u, transposed(p.b_host), dtype, dtype), stream);
  check(grads.dx, expand_estimate(t, p.a_host, dtype, dtype), stream);
  check(grads.da, reduce_estimate(t, p.x_host, dtype), stream);
  check(lora_db(p.dy, p.x, p.a, 1, stream), transposed(reduce_estimate(u, p.dy_host, dtype)), stream);
}

/// sum(weight o y) for the central differences below.
double loss(const Tensor& y, const Matrix& weight) {
  const std::vector<double> got = values(y, {});
  double total = 0;
  for (std::size_t i = 0; i < got.size(); ++i) total += weight.v[i] * got[i];
  return total;
}

/// Compares a gradient with central differences of f over every element of t (float64).
template <class F>
void check_gradient(const Tensor& t, const Tensor& gradient, const F& f) {
  const std::vector<double> got = values(gradient, {});
  const double step = 1e-5;
  const Matrix before = host(t, {});
  for (std::int64_t i = 0; i < t.size(0); ++i) {
    for (std::int64_t j = 0; j < t.size(1); ++j) {
      const Tensor element = t.slice(0, i, i + 1).slice(1, j, j + 1);
      const auto at = [&](double value) {
        element.copy_from(Tensor::from_host({1, 1}, std::vector<double>{value}, {}), {});
        return f();
      };
      const double x = before.at(i, j), slope = (at(x + step) - at(x - step)) / (2 * step);
      at(x);
      const double value = got[static_cast<std::size_t>(i * t.size(1) + j)];
      REQUIRE(std::abs(value - slope) <= 1e-8 * (1 + std::abs(slope)));
    }
  }
}

}  // namespace

TEST_CASE("tiles in grouped order come once each, a group of rows at a time") {
  for (const std::int64_t rows : {1, 2, 5, 8, 9, 17}) {
    for (const std::int64_t cols : {1, 3, 16}) {
      for (const std::int64_t group : {1, 2, 8}) {
        std::set<std::pair<std::int64_t, std::int64_t>> seen;
        std::int64_t last_group = 0;
        for (std::int64_t i = 0; i < rows * cols; ++i) {
          const TilePosition tile = grouped_tile_order(i, rows, cols, group);
          REQUIRE(tile.row >= 0);
          REQUIRE(tile.row < rows);
          REQUIRE(tile.col >= 0);
          REQUIRE(tile.col < cols);
          REQUIRE(tile.row / group >= last_group);
          last_group = tile.row / group;
          seen.insert({tile.row, tile.col});
        }
        CHECK(static_cast<std::int64_t>(seen.size()) == rows * cols);
      }
    }
  }
  // The order of Triton's tutorial for 5 x 3 tiles and groups of 2: the last group has one row.
  const std::vector<std::pair<int, int>> expected = {{0, 0}, {1, 0}, {0, 1}, {1, 1}, {0, 2}, {1, 2}, {2, 0}, {3, 0},
                                                     {2, 1}, {3, 1}, {2, 2}, {3, 2}, {4, 0}, {4, 1}, {4, 2}};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const TilePosition tile = grouped_tile_order(static_cast<std::int64_t>(i), 5, 3, 2);
    CHECK(tile.row == expected[i].first);
    CHECK(tile.col == expected[i].second);
  }
}

TEST_CASE("the plans of the LoRA kernels cover the whole product with clusters that fit") {
  for (const std::int64_t processors : {16, 108, 132, 148}) {
    for (const std::int64_t rows : {1, 16, 31, 128, 129, 512, 2048, 8192, 32768, 100000}) {
      for (const std::int64_t width : {1, 7, 256, 4096, 6144, 14336}) {
        for (const std::int64_t rank : {1, 16, 17, 48, 64, 65, 128}) {
          CAPTURE(processors, rows, width, rank);
          const std::int64_t rank_tiles = (rank + lora_rank_tile(rank) - 1) / lora_rank_tile(rank);
          const LoraPlan shrink = plan_shrink(rows, width, rank, processors);
          REQUIRE(shrink.parts * shrink.length >= width);
          REQUIRE(shrink.tiles == (rows + shrink.row_tile - 1) / shrink.row_tile * rank_tiles);
          REQUIRE((shrink.cluster == 1 || shrink.cluster == shrink.parts));
          const LoraPlan reduce = plan_reduce(rows, width, rank, processors);
          REQUIRE(reduce.parts * reduce.length >= rows);
          REQUIRE((reduce.cluster == 1 || reduce.cluster == reduce.parts));
          REQUIRE(std::max(shrink.cluster, reduce.cluster) <= kMostCluster);
          const LoraPlan expand = plan_expand(rows, width, processors);
          REQUIRE(expand.parts * expand.length >= rows);
          REQUIRE((expand.parts - 1) * expand.length < rows);
          if (!lora_both_fits(rank)) continue;
          const LoraPlan both = plan_both(rows, width, rank, processors);
          REQUIRE(both.tiles * kBothColumns >= width);
          REQUIRE((both.cluster == 1 || both.cluster == both.tiles));
          REQUIRE(both.length <= both_most_rows(rank));
          REQUIRE(both.parts * both.length >= rows);
          REQUIRE((both.parts - 1) * both.length < rows);
          if (rows <= 128) REQUIRE(both.parts == 1);  // no finishing launch for the gradient
        }
      }
    }
  }
}

TEST_CASE("the LoRA primitives are the float64 products for odd sizes, ranks and layouts") {
  for (const DType dtype : kAll) {
    for (const Sizes& s : all_sizes()) check_primitives(s, dtype, nullptr, {});
  }
}

TEST_CASE("the LoRA primitives apply the dropout mask to the wide matrix") {
  const DropoutMask mask{0.5, 1234, 9, {}};
  for (const DType dtype : kAll) {
    for (const Sizes& s : {Sizes{1, 1, 0, 1}, Sizes{7, 33, 0, 3}, Sizes{65, 64, 0, 16}, Sizes{33, 127, 0, 24}}) {
      check_primitives(s, dtype, &mask, {});
    }
  }
}

TEST_CASE("lora_forward, lora_da_dx and lora_db are the float64 formulas for odd sizes and ranks") {
  for (const DType dtype : kAll) {
    for (const Sizes& s : all_sizes()) check_adapter(s, dtype, dtype, {});
  }
}

TEST_CASE("float32 factors beside 16-bit activations are rounded to their dtype once") {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const Sizes& s : {Sizes{7, 33, 65, 3}, Sizes{40, 64, 16, 17}}) check_adapter(s, dtype, DType::kFloat32, {});
  }
}

TEST_CASE("lora_forward gives the caller's dtype") {
  for (const DType dtype : kCuda) check_out_dtypes(dtype, {});
}

TEST_CASE("a strided dy with a misaligned base gives what a contiguous one gives") {
  for (const DType dtype : kAll) check_strided_dy(dtype, {});
}

TEST_CASE("lora_shrink writes into the slack of its input, with zeros up to the padded rank") {
  for (const DType dtype : kAll) check_slack(dtype, {});
}

TEST_CASE("the LoRA primitives with p = 1 are exactly zero, even beside infinities") {
  for (const DType dtype : kAll) check_all_dropped(dtype, {});
}

TEST_CASE("NaN in a row of x stays in that row of y") {
  for (const DType dtype : kAll) check_non_finite(dtype, {});
}

TEST_CASE("the LoRA operations give the same bits twice and with any number of threads") {
  for (const DType dtype : kAll) check_same_bits(dtype, {});
  const int threads = omp_get_max_threads();
  const Problem p = make_problem({700, 300, 200, 8}, DType::kFloat32, DType::kFloat32, {});
  std::vector<std::vector<double>> runs;
  for (const int count : {1, 3}) {
    omp_set_num_threads(count);
    const LoraDaDx grads = lora_da_dx(p.dy, p.x, p.a, p.b, 1, StreamRef());
    runs.push_back(values(lora_forward(p.x, p.a, p.b, 1, StreamRef()), {}));
    runs.push_back(values(grads.da, {}));
    runs.push_back(values(grads.dx, {}));
  }
  omp_set_num_threads(threads);
  for (std::size_t i = 0; i < 3; ++i) CHECK(runs[i] == runs[i + 3]);
}

TEST_CASE("the LoRA operations stay inside their memory") { check_guards({}); }

TEST_CASE("the LoRA operations take more than 65535 rows") {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) check_many_rows(dtype, {});
}

TEST_CASE("the gradients of lora_forward agree with central differences") {
  const StreamRef cpu;
  const Problem p = make_problem({5, 7, 6, 3}, DType::kFloat64, DType::kFloat64, cpu);
  const double scale = -1.3;
  const auto f = [&] { return loss(lora_forward(p.x, p.a, p.b, scale, cpu), p.dy_host); };
  const LoraDaDx grads = lora_da_dx(p.dy, p.x, p.a, p.b, scale, cpu);
  check_gradient(p.x, grads.dx, f);
  check_gradient(p.a, grads.da, f);
  check_gradient(p.b, lora_db(p.dy, p.x, p.a, scale, cpu), f);
}

TEST_CASE("the LoRA operations refuse arguments that do not fit and leave outputs untouched") {
  const StreamRef cpu;
  const Problem p = make_problem({4, 6, 5, 3}, DType::kFloat32, DType::kFloat32, cpu);
  Tensor y = random_normal({4, 5}, DType::kFloat32, 7, cpu), dx = random_normal({4, 6}, DType::kFloat32, 7, cpu),
         da = random_normal({3, 6}, DType::kFloat32, 7, cpu), db = random_normal({5, 3}, DType::kFloat32, 7, cpu);
  const auto before = std::vector{values(y, cpu), values(dx, cpu), values(da, cpu), values(db, cpu)};
  const Tensor half = random_normal({4, 6}, DType::kBFloat16, 1, cpu);
  CHECK_THROWS_AS(lora_forward(p.x, p.b, p.a, 1, y, 0, cpu), Error);
  CHECK_THROWS_AS(lora_forward(p.x, p.a, p.a, 1, y, 0, cpu), Error);
  CHECK_THROWS_AS(lora_forward(half.slice(0, 0, 3), p.a, p.b, 1, y, 0, cpu), Error);
  CHECK_THROWS_AS(lora_forward(p.x, p.a, p.b, std::nan(""), y, 0, cpu), Error);
  CHECK_THROWS_AS(lora_forward(p.x, p.a, p.b, 1, y, 0.5, cpu), Error);
  CHECK_THROWS_AS(lora_forward(p.x, p.a.slice(0, 0, 0), p.b.slice(1, 0, 0), 1, y, 0, cpu), Error);  // rank 0
  CHECK_THROWS_AS(lora_forward(p.x, convert(p.a, DType::kFloat16, cpu, cpu), p.b, 1, y, 0, cpu), Error);
  CHECK_THROWS_AS(lora_da_dx(p.dy, p.x, p.a, p.b, 1, dx, db, 0, cpu), Error);
  CHECK_THROWS_AS(lora_da_dx(p.dy, p.x.slice(0, 0, 3), p.a, p.b, 1, dx, da, 0, cpu), Error);
  Tensor x = p.x;
  CHECK_THROWS_AS(lora_da_dx(p.dy, p.x, p.a, p.b, 1, x, da, 0, cpu), Error);  // dx over x
  Tensor half_grad = Tensor::empty({3, 6}, DType::kBFloat16, cpu);
  CHECK_THROWS_AS(lora_da_dx(p.dy, p.x, p.a, p.b, 1, dx, half_grad, 0, cpu), Error);
  CHECK_THROWS_AS(lora_db(p.dy, p.x, p.b, 1, db, 0, cpu), Error);
  const DropoutMask bad{2, 0, 0, {}};
  Tensor out = Tensor::empty({4, 3}, DType::kFloat32, cpu), narrow = Tensor::empty({4, 2}, DType::kFloat32, cpu);
  CHECK_THROWS_AS(lora_shrink(p.x, p.a, 1, out, cpu, &bad), Error);
  CHECK_THROWS_AS(lora_shrink(p.x, p.a, 1, narrow, cpu), Error);
  CHECK(std::vector{values(y, cpu), values(dx, cpu), values(da, cpu), values(db, cpu)} == before);
  CHECK(values(p.x, cpu) == p.x_host.v);
}

TEST_CASE("the LoRA primitives on CUDA are the float64 products for odd sizes, ranks and layouts", "[gpu]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType dtype : kCuda) {
    for (const Sizes& s : all_sizes()) check_primitives(s, dtype, nullptr, stream);
  }
}

TEST_CASE("the LoRA primitives on CUDA apply the dropout mask to the wide matrix", "[gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  const DropoutMask mask{0.5, 1234, 9, {}};
  for (const DType dtype : kCuda) {
    for (const Sizes& s :
         {Sizes{1, 1, 0, 1}, Sizes{7, 33, 0, 3}, Sizes{65, 64, 0, 16}, Sizes{33, 127, 0, 24}, Sizes{300, 1024, 0, 8}}) {
      check_primitives(s, dtype, &mask, stream);
    }
  }
}

TEST_CASE("lora_forward, lora_da_dx and lora_db on CUDA are the float64 formulas for odd sizes and ranks", "[gpu]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType dtype : kCuda) {
    for (const Sizes& s : all_sizes()) check_adapter(s, dtype, dtype, stream);
    if (dtype != DType::kFloat32) check_adapter({40, 64, 16, 17}, dtype, DType::kFloat32, stream);
    check_out_dtypes(dtype, stream);
  }
}

TEST_CASE("the LoRA operations on CUDA handle strides, slack, p = 1, NaN and guard zones", "[gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType dtype : kCuda) {
    check_strided_dy(dtype, stream);
    check_slack(dtype, stream);
    check_all_dropped(dtype, stream);
    check_non_finite(dtype, stream);
  }
  check_guards(stream);
}

TEST_CASE("the plain LoRA kernels on CUDA are the float64 products on every device", "[gpu]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  cuda::prefer_plain_lora_kernels(true);
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const Sizes& s : {Sizes{1, 1, 3, 1}, Sizes{7, 33, 65, 3}, Sizes{65, 129, 64, 16}, Sizes{130, 1000, 127, 24}}) {
      check_primitives(s, dtype, nullptr, stream);
      check_adapter(s, dtype, dtype, stream);
    }
  }
  cuda::prefer_plain_lora_kernels(false);
}

TEST_CASE("the LoRA operations on CUDA are right where rows and columns fill whole tiles", "[gpu]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType dtype : kCuda) {
    for (const Sizes& s :
         {Sizes{256, 1024, 512, 16}, Sizes{1024, 512, 1024, 32}, Sizes{160, 512, 256, 64}, Sizes{2048, 512, 0, 16}}) {
      check_primitives(s, dtype, nullptr, stream);
      if (s.n > 0) check_adapter(s, dtype, dtype, stream);
    }
  }
}

TEST_CASE("the LoRA operations on CUDA give the same bits twice", "[gpu]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType dtype : kCuda) check_same_bits(dtype, stream);
}

TEST_CASE("the LoRA operations on CUDA split long sums in a fixed order", "[gpu]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const DType dtype : kCuda) {
    // Few rows and a long row; many rows and few columns.
    for (const Sizes& s : {Sizes{1, 5000, 4097, 8}, Sizes{16, 4096, 4096, 16}, Sizes{5000, 40, 33, 24}})
      check_adapter(s, dtype, dtype, stream);
    check_many_rows(dtype, stream);
  }
}

TEST_CASE("the LoRA operations on CUDA reach beyond 32-bit offsets", "[gpu][slow]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  const std::int64_t rows = 70000, stride = 32768, k = 40, n = 24, r = 8, tail = 5;  // rows * stride > 2^31
  const Tensor storage = Tensor::zeros({rows, stride}, DType::kBFloat16, stream);
  const Tensor x = storage.slice(1, 0, k), dy = storage.slice(1, k, k + n);
  const Tensor a = random_normal({r, k}, DType::kBFloat16, 1, stream),
               b = random_normal({n, r}, DType::kBFloat16, 2, stream);
  x.slice(0, rows - tail, rows).copy_from(random_normal({tail, k}, DType::kBFloat16, 3, stream), stream);
  dy.slice(0, rows - tail, rows).copy_from(random_normal({tail, n}, DType::kBFloat16, 4, stream), stream);
  Tensor y = storage.slice(1, stride - n, stride), dx = storage.slice(1, stride - n - k, stride - n);
  Tensor da = Tensor::empty({r, k}, DType::kFloat32, stream);
  lora_forward(x, a, b, 1, y, 0, stream);
  lora_da_dx(dy, x, a, b, 1, dx, da, 0, stream);
  const auto last = [&](const Tensor& t) { return t.slice(0, rows - tail, rows); };
  const DType dtype = DType::kBFloat16;
  const Matrix a_host = host(a, stream), b_host = host(b, stream), x_host = host(last(x), stream),
               dy_host = host(last(dy), stream);
  const Estimate u = shrink_estimate(x_host, a_host, 1, dtype),
                 t = shrink_estimate(dy_host, transposed(b_host), 1, dtype);
  check(last(y), expand_estimate(u, transposed(b_host), dtype, dtype), stream);
  check(last(dx), expand_estimate(t, a_host, dtype, dtype), stream);
  check(da, reduce_estimate(t, x_host, dtype), stream);
  check(lora_db(dy, x, a, 1, stream), transposed(reduce_estimate(u, dy_host, dtype)), stream);
}
