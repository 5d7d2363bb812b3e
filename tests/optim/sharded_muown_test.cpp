// Muown and Muon on rows that are split over ranks against the optimizer of one rank.
#include <algorithm>
#include <cmath>
#include <optional>

#include "catch.h"
#include "comm/rank_checks.h"
#include "rowan/comm/thread_communicator.h"
#include "rowan/core/error.h"
#include "rowan/optim/optimizer.h"
#include "rowan/optim/shard_cost.h"
#include "support/compare.h"
#include "support/device.h"

namespace rowan::test {

namespace {

const StreamRef kCpu;

/// How a matrix is cut: evenly, or with all that is left on one rank.
enum class Cut { kEven, kUneven, kOneRank };

struct MatrixCase {
  std::string name;
  Shape shape;
  MatrixLayout layout = MatrixLayout::kOutIn;
  std::vector<std::int64_t> blocks;
  bool low_rank = false;
  Cut cut = Cut::kEven;
};

const std::vector<MatrixCase>& matrix_cases() {
  using L = MatrixLayout;
  static const std::vector<MatrixCase> cases = {{"tall", {72, 16}, L::kOutIn, {}},
                                                {"few rows", {3, 8}, L::kOutIn, {}},
                                                {"square", {32, 32}, L::kOutIn, {}},
                                                {"wide", {24, 40}, L::kOutIn, {}},
                                                {"low rank", {64, 24}, L::kOutIn, {}, true},
                                                {"batched", {3, 40, 12}, L::kOutIn, {}},
                                                {"blocks", {56, 16}, L::kOutIn, {24, 0, 23, 9}},
                                                {"transposed", {16, 70}, L::kInOut, {}},
                                                {"batched transposed", {2, 12, 30}, L::kInOut, {}},
                                                {"cut inputs first", {16, 56}, L::kInOut, {24, 0, 23, 9}},
                                                {"uneven", {50, 16}, L::kOutIn, {}, false, Cut::kUneven},
                                                {"on one rank", {20, 30}, L::kOutIn, {}, false, Cut::kOneRank}};
  return cases;
}

int row_dim(const MatrixCase& c) { return c.layout == MatrixLayout::kOutIn ? c.shape.rank() - 2 : c.shape.rank() - 1; }

/// Rows [first, second) of rank `rank`.
std::pair<std::int64_t, std::int64_t> rows_of_rank(const MatrixCase& c, int rank, int size) {
  const std::int64_t rows = c.shape[row_dim(c)];
  if (size == 1) return {0, rows};
  switch (c.cut) {
    case Cut::kEven:
      return {rows * rank / size, rows * (rank + 1) / size};
    case Cut::kUneven:  // one row a rank, all others on the last but one
      return {rank < size - 1 ? rank : rows - 1, rank < size - 2 ? rank + 1 : rank == size - 2 ? rows - 1 : rows};
    default:
      return {rank == 0 ? 0 : rows, rows};
  }
}

Tensor gradient_of(const MatrixCase& c, std::uint64_t seed, StreamRef stream) {
  if (!c.low_rank) return random_normal(c.shape, DType::kFloat32, seed, stream);
  const std::vector<double> a = values(random_normal({c.shape[0], 2}, DType::kFloat64, seed, kCpu), kCpu),
                            b = values(random_normal({2, c.shape[1]}, DType::kFloat64, seed + 50, kCpu), kCpu);
  std::vector<float> product;
  for (std::int64_t i = 0; i < c.shape[0]; ++i) {
    for (std::int64_t j = 0; j < c.shape[1]; ++j) {
      const auto at = [](const std::vector<double>& v, std::int64_t k) { return v[static_cast<std::size_t>(k)]; };
      product.push_back(static_cast<float>(at(a, 2 * i) * at(b, j) + at(a, 2 * i + 1) * at(b, c.shape[1] + j)));
    }
  }
  return Tensor::from_host(c.shape, product, stream);
}

Parameter parameter_of(const MatrixCase& c, std::uint64_t seed, double scale, StreamRef stream) {
  Parameter p;
  p.name = c.name;
  p.trainable = true;
  p.layout = c.layout;
  p.value = random_normal(c.shape, DType::kFloat32, seed, stream, scale);
  p.grad = Tensor::zeros(c.shape, DType::kFloat32, stream);
  return p;
}

/// This rank's rows of a parameter, in memory of their own.
Parameter shard_of(const Parameter& whole, const MatrixCase& c, const Communicator& communicator, StreamRef stream) {
  const auto [begin, end] = rows_of_rank(c, communicator.rank(), communicator.size());
  Parameter p = whole;
  p.value = whole.value.slice(row_dim(c), begin, end).clone(stream);
  p.grad = Tensor::zeros(p.value.shape(), DType::kFloat32, stream);
  p.shard = {c.shape[row_dim(c)], begin};
  return p;
}

/// Groups: a pattern a case with blocks, and one for all others.
OptimizerOptions options_for(Algorithm algorithm, NewtonSchulzPath path, std::optional<ShardScheme> scheme,
                             std::optional<DType> update_dtype) {
  OptimizerOptions options;
  for (const MatrixCase& c : matrix_cases()) {
    if (!c.blocks.empty()) {
      options.groups.emplace_back();
      options.groups.back().name_pattern = c.name;
      options.groups.back().row_blocks = c.blocks;
    }
  }
  options.groups.emplace_back();
  for (ParameterGroup& group : options.groups) {
    group.algorithm = algorithm;
    group.newton_schulz.path = path;
    group.shard_scheme = scheme;
    group.update_dtype = update_dtype;
  }
  return options;
}

/// What a run of both optimizers is compared by.
struct Tolerance {
  double gaussian = 0;  ///< of tall matrices with Gaussian gradients, relative in the Frobenius norm; 0: equal bits
  double other = 0;
};

/// Steps all cases, whole and split, and compares the values.
class SplitComparison {
 public:
  SplitComparison(Communicator& communicator, StreamRef stream, Faults& faults, const OptimizerOptions& options,
                  double start_scale)
      : comm_(communicator), stream_(stream), faults_(faults) {
    std::uint64_t seed = 1;
    for (const MatrixCase& c : matrix_cases()) {
      whole_.push_back(parameter_of(c, seed++, start_scale, stream));
      shards_.push_back(shard_of(whole_.back(), c, communicator, stream));
    }
    whole_optimizer_ = make_optimizer(options, whole_, stream);
    split_optimizer_ = make_optimizer(options, shards_, stream);
  }

  void step(double rate) {
    ++steps_;
    for (std::size_t i = 0; i < whole_.size(); ++i) {
      const MatrixCase& c = matrix_cases()[i];
      const Tensor gradient = gradient_of(c, 1000 * steps_ + i, stream_);
      const auto [begin, end] = rows_of_rank(c, comm_.rank(), comm_.size());
      whole_[i].grad.copy_from(gradient, stream_);
      shards_[i].grad.copy_from(gradient.slice(row_dim(c), begin, end), stream_);
    }
    SingleCommunicator single;
    whole_optimizer_->step(whole_, {rate, 1.0}, stream_, single);
    split_optimizer_->step(shards_, {rate, 1.0}, stream_, comm_);
    comm_.synchronize(stream_);
  }

  void compare(const std::string& what, const Tolerance& tolerance) {
    for (std::size_t i = 0; i < whole_.size(); ++i) {
      const MatrixCase& c = matrix_cases()[i];
      const auto [begin, end] = rows_of_rank(c, comm_.rank(), comm_.size());
      const std::vector<double> expected = values(whole_[i].value.slice(row_dim(c), begin, end), stream_),
                                got = values(shards_[i].value, stream_);
      const bool gaussian = c.name == "tall" || c.name == "uneven" || c.name == "batched";
      const double bound = gaussian ? tolerance.gaussian : tolerance.other;
      const double error = relative_error_of_all_ranks(got, expected);
      faults_.expect(error <= bound, what + ": \"" + c.name + "\" is off by " + std::to_string(error) + " on " +
                                         std::to_string(comm_.size()) + " ranks");
    }
  }

 private:
  /// ||got - expected|| / ||expected|| of the rows of all ranks together.
  double relative_error_of_all_ranks(const std::vector<double>& got, const std::vector<double>& expected) {
    std::vector<double> squares(2);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      squares[0] += (got[i] - expected[i]) * (got[i] - expected[i]);
      squares[1] += expected[i] * expected[i];
    }
    Tensor sums = Tensor::from_host({2}, squares, stream_);
    comm_.all_reduce(sums, ReduceOp::kSum, stream_);
    comm_.synchronize(stream_);
    squares = values(sums, stream_);
    return squares[0] == 0 ? 0 : std::sqrt(squares[0] / squares[1]);
  }

  Communicator& comm_;
  StreamRef stream_;
  Faults& faults_;
  std::vector<Parameter> whole_, shards_;
  std::unique_ptr<Optimizer> whole_optimizer_, split_optimizer_;
  std::uint64_t steps_ = 0;
};

}  // namespace

void check_sharded_muown(Communicator& communicator, StreamRef stream, Faults& faults) {
  using Path = NewtonSchulzPath;
  const bool cpu = stream.device().is_cpu();
  // Owners: the same bits (CUDA: products of another batch size may be taken in another order).
  for (const Algorithm algorithm : {Algorithm::kMuown, Algorithm::kMuon}) {
    for (const Path path : {Path::kAuto, Path::kStandard, Path::kGramFp32}) {
      SplitComparison run(communicator, stream, faults, options_for(algorithm, path, ShardScheme::kOwner, {}), 0.5);
      for (int i = 0; i < 3; ++i) run.step(1e-2);
      run.compare(std::string("owner, ") + to_string(algorithm) + ", " + to_string(path),
                  cpu ? Tolerance{} : Tolerance{1e-4, 1e-4});
    }
  }
  // Sums of Gram matrices. Muon from zero weights shows the update itself.
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const OptimizerOptions options = options_for(Algorithm::kMuon, Path::kGramFp32, ShardScheme::kGram, dtype);
    SplitComparison update(communicator, stream, faults, options, 0);
    update.step(1);
    update.compare(std::string("gram, update in ") + to_string(dtype),
                   dtype == DType::kFloat32 ? Tolerance{1e-5, 1e-3} : Tolerance{2e-3, 2e-3});
  }
  SplitComparison run(communicator, stream, faults,
                      options_for(Algorithm::kMuown, Path::kGramFp32, ShardScheme::kGram, DType::kFloat32), 0.5);
  run.step(1e-3);
  run.compare("gram, one step", {1e-5, 1e-5});
  for (int i = 1; i < 20; ++i) run.step(1e-3);
  run.compare("gram, 20 steps", {1e-4, 1e-4});
  // What the cost model picks.
  SplitComparison chosen(communicator, stream, faults, options_for(Algorithm::kMuown, Path::kAuto, {}, {}), 0.5);
  for (int i = 0; i < 3; ++i) chosen.step(1e-3);
  chosen.compare("chosen", {1e-4, 1e-4});
}

TEST_CASE("Muown and Muon on split rows step as on whole matrices", "[dist]") {
  for (const int size : {1, 2, 3, 4, 16}) {
    CAPTURE(size);
    check_on_threads(size, check_sharded_muown);
  }
}

TEST_CASE("Muown and Muon on split rows step as on whole matrices on CUDA", "[gpu][dist]") {
  if (!have_gpu()) return;
  check_on_threads(3, check_sharded_muown, Device::cuda());
}

TEST_CASE("matrices without a gradient leave the memory of others alone", "[dist]") {
  // Buckets alternate by the dtype of their updates; only the first and the last have gradients.
  constexpr int kMatrices = 7;
  OptimizerOptions options;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    ParameterGroup group;
    group.algorithm = Algorithm::kMuown;
    group.name_pattern = dtype == DType::kBFloat16 ? "even" : "odd";
    group.newton_schulz.path = NewtonSchulzPath::kGramFp32;
    group.shard_scheme = ShardScheme::kGram;
    group.update_dtype = dtype;
    options.groups.push_back(group);
  }
  const auto parameters = [](int rank, int size) {
    std::vector<Parameter> all;
    for (int i = 0; i < kMatrices; ++i) {
      const std::int64_t rows = 8 + 2 * i, begin = rows * rank / size, end = rows * (rank + 1) / size;
      const auto seed = static_cast<std::uint64_t>(i);
      Parameter& p = all.emplace_back();
      p.name = (i % 2 == 0 ? "even" : "odd") + std::to_string(i);
      p.trainable = true;
      p.value = random_normal({rows, 6}, DType::kFloat32, seed, kCpu).slice(0, begin, end).clone(kCpu);
      if (i == 0 || i + 1 == kMatrices)
        p.grad = random_normal({rows, 6}, DType::kFloat32, 50 + seed, kCpu).slice(0, begin, end).clone(kCpu);
      if (size > 1) p.shard = {rows, begin};
    }
    return all;
  };
  check_on_threads(2, [&](Communicator& communicator, StreamRef stream, Faults& faults) {
    std::vector<Parameter> whole = parameters(0, 1), shards = parameters(communicator.rank(), 2);
    SingleCommunicator single;
    make_optimizer(options, whole, stream)->step(whole, {0.1, 1}, stream, single);
    make_optimizer(options, shards, stream)->step(shards, {0.1, 1}, stream, communicator);
    for (std::size_t i = 0; i < kMatrices; ++i) {
      const std::int64_t rows = whole[i].value.size(0), begin = rows * communicator.rank() / 2;
      const Tensor part = whole[i].value.slice(0, begin, begin + shards[i].value.size(0));
      faults.expect(difference(values(shards[i].value, stream), values(part, stream)).relative_frobenius < 2e-3,
                    whole[i].name + " differs");
    }
  });
}

TEST_CASE("sums of Gram matrices take magnitudes that squares do not", "[dist]") {
  for (const double magnitude : {1e-30, 1e15}) {
    check_on_threads(3, [magnitude](Communicator& communicator, StreamRef stream, Faults& faults) {
      const MatrixCase& c = matrix_cases()[0];
      OptimizerOptions options = options_for(Algorithm::kMuon, NewtonSchulzPath::kGramFp32, ShardScheme::kGram, {});
      for (ParameterGroup& group : options.groups) group.newton_schulz.epsilon = 0;
      options.groups.erase(options.groups.begin(), options.groups.end() - 1);
      std::vector<std::vector<double>> results;
      for (const double scale : {1.0, magnitude}) {
        std::vector<Parameter> model{shard_of(parameter_of(c, 1, 0, stream), c, communicator, stream)};
        const auto [begin, end] = rows_of_rank(c, communicator.rank(), communicator.size());
        model[0].grad.copy_from(random_normal(c.shape, DType::kFloat32, 7, stream, scale).slice(0, begin, end), stream);
        const auto optimizer = make_optimizer(options, model, stream);
        optimizer->step(model, {1, 1}, stream, communicator);
        results.push_back(values(model[0].value, stream));
      }
      faults.expect(difference(results[1], results[0]).relative_frobenius < 1e-5,
                    "another result at another magnitude");
      faults.expect(difference(results[0], std::vector<double>(results[0].size())).max_absolute > 0.1, "no update");
    });
  }
}

TEST_CASE("ranks whose rows do not make a whole matrix are refused on all of them", "[dist]") {
  const auto outcomes = outcomes_on_threads(3, {}, [](Communicator& communicator) {
    const MatrixCase& c = matrix_cases()[0];
    std::vector<Parameter> model{shard_of(parameter_of(c, 1, 1, kCpu), c, communicator, kCpu)};
    if (communicator.rank() == 1) model[0].shard.first_row += 1;
    OptimizerOptions options;
    options.groups = default_groups(Algorithm::kMuown);
    make_optimizer(options, model, kCpu)->step(model, {1e-3, 1}, kCpu, communicator);
  });
  for (const std::string& outcome : outcomes) {
    CAPTURE(outcome);
    CHECK(outcome.find("\"tall\" on rank 1 to begin at 24, got 25") != std::string::npos);
  }
}

TEST_CASE("a sum of Gram matrices is refused for a path that is another") {
  std::vector<Parameter> model{parameter_of(matrix_cases()[0], 1, 1, kCpu)};
  model[0].shard.global_rows = 72;
  OptimizerOptions options = options_for(Algorithm::kMuown, NewtonSchulzPath::kStandard, ShardScheme::kGram, {});
  options.groups.erase(options.groups.begin());
  CHECK_THROWS_AS(make_optimizer(options, model, kCpu), Error);
}

// The cost model

TEST_CASE("the cost of a scheme is what its formula says") {
  const SplitMatrices b{14336, 16, 1, 2};
  CHECK(scheme_cost(ShardScheme::kGram, b, 8).bytes == 8.0 * 16 * 16 * 7 / 8);
  CHECK(scheme_cost(ShardScheme::kOwner, b, 8).bytes == 4.0 * 14336 * 16 * 7 / 64);
  CHECK(scheme_cost(ShardScheme::kGram, b, 8).messages == 12);
  CHECK(scheme_cost(ShardScheme::kOwner, b, 8).messages == 14);
  CHECK(scheme_cost(ShardScheme::kGram, b, 8).flops == 4.0 * 14336 / 8 * 16 * 16 + 34.0 * 16 * 16 * 16);
  const SplitMatrices wide{1000, 4000, 5, 4};
  CHECK(scheme_cost(ShardScheme::kOwner, wide, 4).flops == 2 * (4.0 * 1000 * 1000 * 4000 + 34e9));
  const RankSpeed speed{1e9, 1e-6, 1e12, 2e12};
  const SchemeCost cost = scheme_cost(ShardScheme::kGram, wide, 2, speed);
  CHECK(std::abs(cost.seconds - (cost.bytes / 1e9 + cost.messages * 1e-6 + cost.flops / 2e12)) < 1e-12 * cost.seconds);
  CHECK(scheme_cost(ShardScheme::kGram, b, 1).bytes == 0);
  CHECK(scheme_cost(ShardScheme::kOwner, b, 1).messages == 0);
}

TEST_CASE("the cost model sums Gram matrices of LoRA's B, and gives dense weights owners") {
  CHECK(cheaper_scheme({14336, 16, 224, 2}, 8) == ShardScheme::kGram);
  CHECK(cheaper_scheme({4096, 16, 224, 2}, 2) == ShardScheme::kGram);
  CHECK(cheaper_scheme({4096, 4096, 64, 2}, 8) == ShardScheme::kOwner);
  CHECK(cheaper_scheme({4096, 14336, 32, 2}, 8) == ShardScheme::kOwner);
  CHECK(cheaper_scheme({151936, 1024, 1, 2}, 8) == ShardScheme::kGram);  // one tall matrix
}

TEST_CASE("costs of nothing are refused") {
  CHECK_THROWS_AS(scheme_cost(ShardScheme::kGram, {0, 16, 1, 2}, 8), Error);
  CHECK_THROWS_AS(scheme_cost(ShardScheme::kGram, {16, 16, 1, 2}, 0), Error);
  CHECK_THROWS_AS(scheme_cost(ShardScheme::kGram, {16, 16, 1, 2}, 2, {0, 0, 1, 1}), Error);
}

}  // namespace rowan::test
