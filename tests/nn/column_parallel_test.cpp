// A layer whose output neurons are split over ranks against the whole layer on one.
#include "rowan/nn/column_parallel.h"

#include <algorithm>

#include "catch.h"
#include "comm/rank_checks.h"
#include "rowan/comm/thread_communicator.h"
#include "rowan/core/error.h"
#include "rowan/optim/optimizer.h"
#include "support/compare.h"
#include "support/device.h"

namespace rowan::test {

namespace {

constexpr std::int64_t kIn = 40, kTokens = 17;

LoraConfig lora(std::int64_t rank, double dropout) {
  LoraConfig config;
  config.rank = rank;
  config.alpha = 2.0 * static_cast<double>(rank);
  config.dropout = dropout;
  return config;
}

std::vector<LinearPart> parts(double dropout) {
  return {{"q", 26, true, lora(4, dropout)}, {"k", 9, false, std::nullopt}, {"v", 10, false, lora(3, dropout)}};
}

/// This rank's rows of a whole parameter.
Tensor own_rows(const Tensor& whole, const Parameter& local) {
  if (local.shard.global_rows == 0) return whole;
  return whole.slice(0, local.shard.first_row, local.shard.first_row + local.value.size(0));
}

/// This rank's columns of each part in [M, all out features].
std::vector<Tensor> own_columns(const Tensor& whole, const ColumnParallelLoraLinear& layer, const Communicator& comm) {
  std::vector<Tensor> columns;
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < layer.local().parts().size(); ++i) {
    const std::int64_t all = parts(0)[i].out_features, first = begin + all * comm.rank() / comm.size();
    columns.push_back(whole.slice(1, first, first + layer.local().parts()[i].out_features));
    begin += all;
  }
  return columns;
}

void check_layer(Communicator& communicator, StreamRef stream, Faults& faults, DType dtype, double dropout) {
  const std::string what = std::string(to_string(dtype)) + ", dropout " + std::to_string(dropout) + ", rank " +
                           std::to_string(communicator.rank()) + " of " + std::to_string(communicator.size()) + ": ";
  const double bound = dtype == DType::kFloat32 ? 1e-5 : 2e-2;
  const auto near = [&](const Tensor& got, const Tensor& expected, const std::string& name) {
    const double error = difference(values(got, stream), values(expected, stream)).relative_frobenius;
    faults.expect(error < bound, what + name + " is off by " + std::to_string(error));
  };
  LoraLinear whole(kIn, parts(dropout), dtype, true, stream);
  ColumnParallelLoraLinear split(kIn, parts(dropout), dtype, true, communicator, stream);
  const std::vector<Parameter> whole_parameters = whole.parameters(), split_parameters = split.parameters();
  faults.expect(whole_parameters.size() == split_parameters.size(), what + "another number of parameters");
  for (std::size_t i = 0; i < whole_parameters.size(); ++i) {
    const Parameter &w = whole_parameters[i], &s = split_parameters[i];
    faults.expect(w.name == s.name, what + "another order of parameters");
    const Tensor value = random_normal(w.value.shape(), DType::kFloat32, 10 + i, stream, 0.3);
    for (const Tensor& target : {w.value, w.master})
      target.copy_from(convert(value, target.dtype(), stream, stream), stream);
    for (const Tensor& target : {s.value, s.master})
      target.copy_from(own_rows(convert(value, target.dtype(), stream, stream), s), stream);
  }

  const std::optional<DropoutKey> key = dropout > 0 ? std::optional(DropoutKey{3, 4}) : std::nullopt;
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    const auto seed = static_cast<std::uint64_t>(100 + micro_batch);
    const auto with_slack = [&](const Tensor& t, std::int64_t slack) {
      const Tensor copy = Tensor::empty_with_slack(t.shape(), slack, dtype, stream);
      copy.copy_from(t, stream);
      return copy;
    };
    const Tensor x = random_normal({kTokens, kIn}, dtype, seed, stream);
    const Tensor dy = random_normal({kTokens, whole.out_features()}, dtype, seed + 50, stream);
    const Tensor x_whole = with_slack(x, whole.slack_columns()), x_split = with_slack(x, whole.slack_columns());
    Tensor y = Tensor::empty({kTokens, whole.out_features()}, dtype, stream);
    Tensor y_split = Tensor::empty({kTokens, split.local().out_features()}, dtype, stream);
    Tensor dy_split =
        Tensor::empty_with_slack({kTokens, split.local().out_features()}, whole.slack_columns(), dtype, stream);
    LoraLinearContext whole_context, split_context;
    whole.forward(x_whole, y, whole_context, stream, key);
    split.forward(x_split, y_split, split_context, stream, key);
    std::int64_t begin = 0;
    const std::vector<Tensor> expected = own_columns(y, split, communicator),
                              dys = own_columns(dy, split, communicator);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const std::int64_t end = begin + expected[i].size(1);
      near(y_split.slice(1, begin, end), expected[i], "y of part " + std::to_string(i));
      dy_split.slice(1, begin, end).copy_from(dys[i], stream);
      begin = end;
    }
    const double beta = micro_batch;  // plain first, then on top of what is there
    Tensor dx = random_normal({kTokens, kIn}, dtype, 7, stream), dx_split = dx.clone(stream);
    whole.backward(with_slack(dy, whole.slack_columns()), whole_context, &dx, stream, beta);
    split.backward(dy_split, split_context, &dx_split, stream, beta);
    communicator.synchronize(stream);
    near(dx_split, dx, "dx");
  }

  sum_partial_gradients(split_parameters, communicator, stream);
  communicator.synchronize(stream);
  for (std::size_t i = 0; i < whole_parameters.size(); ++i) {
    near(split_parameters[i].grad, own_rows(whole_parameters[i].grad, split_parameters[i]), whole_parameters[i].name);
  }

  // A step of the whole model's optimizer and of the split one's; A stays the same everywhere.
  OptimizerOptions options;
  options.groups = default_groups(Algorithm::kMuown);
  const auto split_optimizer = make_optimizer(options, split_parameters, stream);
  const auto whole_optimizer = make_optimizer(options, whole_parameters, stream);
  SingleCommunicator single;
  split_optimizer->step(split_parameters, {1e-2, 1}, stream, communicator);
  whole_optimizer->step(whole_parameters, {1e-2, 1}, stream, single);
  communicator.synchronize(stream);
  for (std::size_t i = 0; i < whole_parameters.size(); ++i) {
    const Parameter& s = split_parameters[i];
    near(s.value, own_rows(whole_parameters[i].value, s), s.name + " after a step");
    if (s.role != Parameter::Role::kLoraA) continue;
    Tensor first = s.master.clone(stream);
    communicator.broadcast(first, 0, stream);
    communicator.synchronize(stream);
    faults.expect(values(first, stream) == values(s.master, stream), what + s.name + " differs between ranks");
  }
}

}  // namespace

void check_column_parallel(Communicator& communicator, StreamRef stream, Faults& faults) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const double dropout : {0.0, 0.4}) check_layer(communicator, stream, faults, dtype, dropout);
  }
}

TEST_CASE("a column-parallel layer gives outputs, gradients and steps of the whole layer", "[dist]") {
  for (const int size : {1, 2, 3}) {
    CAPTURE(size);
    check_on_threads(size, check_column_parallel);
  }
}

TEST_CASE("a column-parallel layer refuses dropout of outputs and parts smaller than the ranks") {
  const auto outcomes = outcomes_on_threads(2, {}, [](Communicator& communicator) {
    std::vector<LinearPart> dropping = parts(0.5), small = parts(0);
    dropping[0].lora->dropout_place = LoraConfig::DropoutPlace::kOutput;
    small[1].out_features = 1;
    const auto refused = [&](const std::vector<LinearPart>& bad, ErrorKind kind) {
      try {
        ColumnParallelLoraLinear(kIn, bad, DType::kFloat32, false, communicator, StreamRef());
      } catch (const Error& error) {
        if (error.kind() == kind) return;
      }
      throw std::runtime_error("not refused");
    };
    refused(dropping, ErrorKind::kUnsupported);
    refused(small, ErrorKind::kInvalidArgument);
  });
  for (const std::string& outcome : outcomes) CHECK(outcome.empty());
}

}  // namespace rowan::test
