#include "rowan/ops/cross_entropy.h"

#include "ops/op_test.h"

using namespace rowan;
using namespace rowan::test;

namespace {

struct Inputs {
  Tensor logits, labels;
  std::vector<std::int64_t> host_labels;
};

Inputs make(std::int64_t rows, std::int64_t classes, DType dtype, StreamRef stream, double scale = 3.0) {
  Inputs in;
  Rng rng(static_cast<std::uint64_t>(rows + classes));
  for (std::int64_t i = 0; i < rows; ++i) {  // every third row is ignored
    const auto drawn = static_cast<std::int64_t>(rng.below(static_cast<std::uint64_t>(classes)));
    in.host_labels.push_back(i % 3 == 1 ? kIgnoredLabel : drawn);
  }
  in.logits = random_normal({rows, classes}, dtype, 1, stream, scale);
  in.labels = ids64(in.host_labels, stream);
  return in;
}

void check_against_definition(std::int64_t rows, std::int64_t classes, DType dtype, double grad_scale, StreamRef stream,
                              double scale = 3.0) {
  for (const bool gaps : {false, true}) {
    CAPTURE(rows, classes, dtype, gaps, grad_scale, scale);
    Inputs in = make(rows, classes, dtype, stream, scale);
    if (gaps) in.logits = apart(in.logits, stream);
    const std::vector<double> logits = values(in.logits, stream);
    const double u = unit_roundoff(accumulator(dtype));
    std::vector<double> losses, loss_bound, gradient, gradient_bound;
    for (std::int64_t i = 0; i < rows; ++i) {
      const double* const row = logits.data() + i * classes;
      const std::int64_t label = in.host_labels[at(i)];
      if (label == kIgnoredLabel) {
        losses.push_back(0), loss_bound.push_back(0);
        gradient.insert(gradient.end(), at(classes), 0.0),
            gradient_bound.insert(gradient_bound.end(), at(classes), 0.0);
        continue;
      }
      double largest = row[0], sum = 0;
      for (std::int64_t j = 0; j < classes; ++j) largest = std::max(largest, row[j]);
      for (std::int64_t j = 0; j < classes; ++j) sum += std::exp(row[j] - largest);
      const double target = row[label] - largest;
      losses.push_back(std::log(sum) - target);
      const double sum_relative = sum_error(accumulator(dtype), classes, 1.0) + 4 * u;
      loss_bound.push_back(sum_relative + 2 * u * (std::abs(target) + std::abs(std::log(sum))));
      for (std::int64_t j = 0; j < classes; ++j) {
        const double p = std::exp(row[j] - largest) / sum;
        gradient.push_back((p - (j == label ? 1 : 0)) * grad_scale);
        // The exponential carries the rounding of its argument; 1 is subtracted after p was rounded.
        const double relative = sum_relative + u * (8 + std::abs(row[j] - largest));
        const double error = std::abs(grad_scale) * (relative * p + (j == label ? 2 * u : 0));
        gradient_bound.push_back(rounded_error(dtype, gradient.back(), error));
      }
    }
    Tensor found = Tensor::empty({rows}, accumulator(dtype), stream);
    Tensor dlogits = Tensor::empty({rows, classes}, dtype, stream);
    if (gaps) dlogits = apart(dlogits, stream, 5);
    cross_entropy(in.logits, in.labels, found, nullptr, grad_scale, stream);
    check_within(values(found, stream), losses, loss_bound);
    const Tensor first = found.clone(stream);
    cross_entropy(in.logits, in.labels, found, &dlogits, grad_scale, stream);
    CHECK(same_values(found, first, stream));
    check_within(values(dlogits, stream), gradient, gradient_bound);
    cross_entropy(in.logits, in.labels, found, &in.logits, grad_scale, stream);  // in place
    CHECK(same_values(found, first, stream));
    CHECK(same_values(in.logits, dlogits, stream));
  }
}

void check_all_ignored(StreamRef stream) {
  const Tensor logits = random_normal({4, 9}, DType::kFloat32, 1, stream);
  Tensor losses = Tensor::empty({4}, DType::kFloat32, stream), dlogits = Tensor::empty({4, 9}, DType::kFloat32, stream);
  cross_entropy(logits, ids64({-100, -100, -100, -100}, stream), losses, &dlogits, 1, stream);
  CHECK(values(losses, stream) == constant(4, 0));
  CHECK(values(dlogits, stream) == constant(36, 0));
}

/// Ignored rows may hold anything; -infinity is a class that never comes; far from zero nothing overflows.
void check_extremes(DType dtype, StreamRef stream) {
  CAPTURE(dtype);
  const std::vector<double> host_logits = {kNan,  kNan,  kInfinity, 0,     -kInfinity, 1,         -kInfinity, 1,
                                           -9000, -9000, -9000,     -9000, 9000,       9000,      9000,       9000,
                                           kNan,  0,     0,         0,     0,          kInfinity, 0,          0};
  Tensor logits = convert(Tensor::from_host({6, 4}, host_logits, StreamRef()), dtype, StreamRef(), stream);
  Tensor losses = Tensor::empty({6}, accumulator(dtype), stream), dlogits = logits.clone(stream);
  cross_entropy(logits, ids64({-100, 1, 2, 3, 1, 2}, stream), losses, &dlogits, 1, stream);
  const std::vector<double> loss = values(losses, stream);
  const Matrix gradient = host(dlogits, stream);
  const double u = unit_roundoff(accumulator(dtype));
  CHECK(loss[0] == 0);
  CHECK(std::abs(loss[1] - std::log(2.0)) <= 4 * u);
  CHECK(std::abs(loss[2] - std::log(4.0)) <= 4 * u);
  CHECK(std::abs(loss[3] - std::log(4.0)) <= 4 * u);
  CHECK(std::isnan(loss[4]));
  CHECK(std::isnan(loss[5]));
  for (std::int64_t j = 0; j < 4; ++j) CHECK(gradient.at(0, j) == 0);
  CHECK(gradient.at(1, 0) == 0);
  CHECK(gradient.at(1, 1) == -0.5);
  CHECK(gradient.at(1, 3) == 0.5);
  CHECK(gradient.at(2, 0) == 0.25);
  CHECK(gradient.at(3, 3) == -0.75);
}

std::vector<double> loss_and_gradient(StreamRef stream) {
  const Inputs in = make(200, 1500, DType::kFloat32, stream);
  Tensor losses = Tensor::empty({200}, DType::kFloat32, stream), dlogits = in.logits.clone(stream);
  cross_entropy(in.logits, in.labels, losses, &dlogits, 0.01, stream);
  std::vector<double> all = values(losses, stream);
  const std::vector<double> more = values(dlogits, stream);
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace

TEST_CASE("Cross-entropy and its gradient match their definition", "[ops][cross_entropy]") {
  const PoisonedMemory memory(Device::cpu());
  for (const DType dtype : kCpuDtypes) {
    for (const std::int64_t classes : {1, 2, 7, 256, 1000, 1025, 5003}) {
      check_against_definition(7, classes, dtype, 1.0, StreamRef());
    }
    check_against_definition(7, 300, dtype, -0.125, StreamRef(), 30.0);
  }
  check_against_definition(3, 150000, DType::kFloat32, 1.0, StreamRef());
  CHECK(memory.violations() == 0);
}

TEST_CASE("Cross-entropy takes more than 65535 rows", "[ops][cross_entropy]") {
  check_against_definition(70000, 3, DType::kFloat32, 1.0 / 70000, StreamRef());
}

TEST_CASE("Cross-entropy's gradient agrees with finite differences", "[ops][cross_entropy]") {
  const StreamRef cpu;
  const Inputs in = make(4, 6, DType::kFloat64, cpu, 1.0);
  Tensor losses = Tensor::empty({4}, DType::kFloat64, cpu), dlogits = in.logits.clone(cpu);
  cross_entropy(in.logits, in.labels, losses, &dlogits, 0.5, cpu);
  check_gradient(
      [&] {
        cross_entropy(in.logits, in.labels, losses, nullptr, 0.5, cpu);
        return 0.5 * dot(values(losses, cpu), constant(4, 1));
      },
      in.logits, values(dlogits, cpu));
}

TEST_CASE("Cross-entropy of ignored labels alone is zero", "[ops][cross_entropy]") { check_all_ignored(StreamRef()); }

TEST_CASE("Cross-entropy keeps infinities and NaN to their rows", "[ops][cross_entropy]") {
  for (const DType dtype : kCpuDtypes) check_extremes(dtype, StreamRef());
}

TEST_CASE("Cross-entropy does not depend on threads", "[ops][cross_entropy]") {
  CHECK(same_with_any_threads([] { return loss_and_gradient(StreamRef()); }));
}

TEST_CASE("Cross-entropy of no rows does nothing", "[ops][cross_entropy]") {
  const StreamRef cpu;
  Tensor losses = Tensor::empty({0}, DType::kFloat32, cpu), logits = Tensor::empty({0, 5}, DType::kFloat32, cpu);
  cross_entropy(logits, ids64({}, cpu), losses, &logits, 1, cpu);
  CHECK(losses.elements() == 0);
}

TEST_CASE("Cross-entropy refuses labels that are no class and writes nothing", "[ops][cross_entropy]") {
  const StreamRef cpu;
  Tensor logits = random_normal({2, 5}, DType::kFloat32, 1, cpu), losses = random_normal({2}, DType::kFloat32, 2, cpu);
  const Tensor logits_before = logits.clone(cpu), losses_before = losses.clone(cpu);
  const auto refuse = [&](const std::string& part, const std::function<void()>& f) {
    check_throws(ErrorKind::kInvalidArgument, part, f);
    CHECK(same_values(logits, logits_before, cpu));
    CHECK(same_values(losses, losses_before, cpu));
  };
  const auto call = [&](const Tensor& labels, double scale) {
    return [&, labels, scale] { cross_entropy(logits, labels, losses, &logits, scale, cpu); };
  };
  refuse("labels in [0, 5) or -100, got 5 at index 1", call(ids64({0, 5}, cpu), 1));
  refuse("labels in [0, 5) or -100, got -1 at index 0", call(ids64({-1, 0}, cpu), 1));
  refuse("expected labels of shape [2], got [3]", call(ids64({0, 1, 2}, cpu), 1));
  refuse("expected labels of dtype int64, got int32", call(ids32({0, 1}, cpu), 1));
  refuse("finite grad_scale", call(ids64({0, 1}, cpu), kInfinity));
}

TEST_CASE("Cross-entropy and its gradient match their definition on the GPU", "[ops][cross_entropy][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  const PoisonedMemory memory(gpu.device());
  for (const DType dtype : kGpuDtypes) {
    for (const std::int64_t classes : {1, 2, 7, 256, 1000, 1025, 5003}) {
      check_against_definition(7, classes, dtype, 1.0, gpu);
    }
    check_against_definition(7, 300, dtype, -0.125, gpu, 30.0);
    check_extremes(dtype, gpu);
  }
  check_all_ignored(gpu);
  CHECK(memory.violations() == 0);
}

TEST_CASE("Cross-entropy takes large vocabularies and many rows on the GPU", "[ops][cross_entropy][gpu]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  for (const DType dtype : kGpuDtypes) check_against_definition(5, 151936, dtype, 1.0, gpu);
  check_against_definition(70000, 3, DType::kFloat32, 1.0 / 70000, gpu);
}

TEST_CASE("Cross-entropy subtracts its maximum where threads have no class of their own on the GPU",
          "[ops][cross_entropy][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  const Tensor logits = convert(Tensor::from_host({1, 3}, std::vector<double>{-5000, -5001, -5002}, StreamRef()),
                                DType::kFloat32, StreamRef(), gpu);
  Tensor losses = Tensor::empty({1}, DType::kFloat32, gpu);
  cross_entropy(logits, ids64({0}, gpu), losses, nullptr, 1, gpu);
  CHECK(std::abs(values(losses, gpu)[0] - std::log(1 + std::exp(-1.0) + std::exp(-2.0))) <= 1e-6);
}

TEST_CASE("Cross-entropy has the same bits in every run on the GPU", "[ops][cross_entropy][gpu]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  CHECK(loss_and_gradient(gpu) == loss_and_gradient(gpu));
}

TEST_CASE("On the GPU a label that is no class makes its row NaN", "[ops][cross_entropy][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  const Tensor logits = random_normal({3, 5}, DType::kFloat32, 1, gpu);
  Tensor losses = Tensor::empty({3}, DType::kFloat32, gpu), dlogits = Tensor::empty({3, 5}, DType::kFloat32, gpu);
  cross_entropy(logits, ids64({5, 1, -1}, gpu), losses, &dlogits, 1, gpu);
  const std::vector<double> loss = values(losses, gpu), gradient = values(dlogits, gpu);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(std::isnan(loss[i]) == (i != 1));
    for (std::size_t j = 0; j < 5; ++j) CHECK(std::isnan(gradient[i * 5 + j]) == (i != 1));
  }
}
