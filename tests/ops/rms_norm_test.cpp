#include "rowan/ops/rms_norm.h"

#include "ops/op_test.h"

using namespace rowan;
using namespace rowan::test;

namespace {

constexpr double kEps = 1e-5;

Shape row_shape(const Shape& shape) { return shape.rank() == 3 ? Shape{shape[0], shape[1]} : Shape{shape[0]}; }

/// Values and what they may be off by.
struct Expected {
  std::vector<double> value, bound;
};

/// How far sums of `width` terms of these relative sizes go: see sum_error. rstd and the products carry it along.
double relative_error(DType dtype, std::int64_t width) { return sum_error(accumulator(dtype), width, 1.0); }

Expected forward_oracle(const std::vector<double>& x, const std::vector<double>& weight, DType dtype,
                        std::vector<double>* rstds) {
  const std::size_t width = weight.size(), rows = x.size() / width;
  Expected y;
  for (std::size_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (std::size_t j = 0; j < width; ++j) squares += x[r * width + j] * x[r * width + j];
    const double rstd = 1 / std::sqrt(squares / static_cast<double>(width) + kEps);
    rstds->push_back(rstd);
    for (std::size_t j = 0; j < width; ++j) {
      const double value = x[r * width + j] * rstd * weight[j];
      y.value.push_back(value);
      y.bound.push_back(
          rounded_error(dtype, value, relative_error(dtype, static_cast<std::int64_t>(width)) * std::abs(value)));
    }
  }
  return y;
}

struct Case {
  Tensor x, weight, rstd, dy;
};

Case make(const Shape& shape, DType dtype, StreamRef stream, bool gaps) {
  Case c;
  c.x = random_normal(shape, dtype, 1, stream, 2.0);
  c.weight = random_normal({shape[-1]}, dtype, 2, stream);
  c.dy = random_normal(shape, dtype, 3, stream);
  c.rstd = Tensor::empty(row_shape(shape), accumulator(dtype), stream);
  if (gaps) c.x = apart(c.x, stream), c.dy = apart(c.dy, stream, 5);
  return c;
}

void check_forward(const Shape& shape, DType dtype, StreamRef stream) {
  for (const bool gaps : {false, true}) {
    CAPTURE(to_string(shape), dtype, gaps);
    Case c = make(shape, dtype, stream, gaps);
    Tensor y = Tensor::empty(shape, dtype, stream);
    if (gaps) y = apart(y, stream, 7);
    std::vector<double> rstds;
    const Expected expected = forward_oracle(values(c.x, stream), values(c.weight, stream), dtype, &rstds);
    rms_norm_forward(c.x, c.weight, kEps, y, c.rstd, stream);
    check_within(values(y, stream), expected.value, expected.bound);
    std::vector<double> bound;
    for (const double rstd : rstds) bound.push_back(relative_error(dtype, shape[-1]) * rstd);
    check_within(values(c.rstd, stream), rstds, bound);

    Tensor in_place =
        c.x.clone(stream);  // y may be x; compared in one layout, since alignment decides the order of sums on CUDA
    Tensor apart_from_x = Tensor::empty(shape, dtype, stream);
    rms_norm_forward(in_place, c.weight, kEps, apart_from_x, c.rstd, stream);
    rms_norm_forward(in_place, c.weight, kEps, in_place, c.rstd, stream);
    CHECK(same_values(in_place, apart_from_x, stream));
  }
}

void check_backward(const Shape& shape, DType dtype, StreamRef stream) {
  for (const double beta : {0.0, 1.0, -0.5}) {
    CAPTURE(to_string(shape), dtype, beta);
    Case c = make(shape, dtype, stream, beta != 0);
    const std::vector<double> x = values(c.x, stream), weight = values(c.weight, stream), dy = values(c.dy, stream);
    std::vector<double> rstds;
    forward_oracle(x, weight, dtype, &rstds);
    Tensor y = Tensor::empty(shape, dtype, stream);
    rms_norm_forward(c.x, c.weight, kEps, y, c.rstd, stream);
    Tensor dx = beta == 0 ? Tensor::empty(shape, dtype, stream) : apart(random_normal(shape, dtype, 4, stream), stream);
    Tensor dweight = random_normal({shape[-1]}, accumulator(dtype), 5, stream);
    const std::vector<double> dx_before = values(dx, stream), dweight_before = values(dweight, stream);
    rms_norm_backward(c.dy, c.x, c.weight, c.rstd, dx, &dweight, stream, beta);

    const std::size_t width = weight.size(), rows = rstds.size();
    const double relative = relative_error(dtype, static_cast<std::int64_t>(width));
    Expected gradient, weight_gradient{dweight_before, constant(width, 0)};
    std::vector<double> weight_magnitude(width);
    for (std::size_t j = 0; j < width; ++j) weight_magnitude[j] = std::abs(dweight_before[j]);
    for (std::size_t r = 0; r < rows; ++r) {
      double mean = 0, mean_magnitude = 0;
      for (std::size_t j = 0; j < width; ++j) {
        const double product = dy[r * width + j] * weight[j] * x[r * width + j] * rstds[r] / static_cast<double>(width);
        mean += product;
        mean_magnitude += std::abs(product);
      }
      for (std::size_t j = 0; j < width; ++j) {
        const double g = dy[r * width + j] * weight[j], n = x[r * width + j] * rstds[r];
        const double before = beta == 0 ? 0 : beta * dx_before[r * width + j];
        gradient.value.push_back(rstds[r] * (g - n * mean) + before);
        const double error =
            relative * (rstds[r] * (std::abs(g) + std::abs(n) * (std::abs(mean) + mean_magnitude)) + std::abs(before));
        gradient.bound.push_back(rounded_error(dtype, gradient.value.back(), error));
        weight_gradient.value[j] += dy[r * width + j] * n;
        weight_magnitude[j] += std::abs(dy[r * width + j] * n);
      }
    }
    for (std::size_t j = 0; j < width; ++j) {
      weight_gradient.bound[j] = sum_error(accumulator(dtype), static_cast<std::int64_t>(rows), weight_magnitude[j]) +
                                 relative * weight_magnitude[j];
    }
    check_within(values(dx, stream), gradient.value, gradient.bound);
    check_within(values(dweight, stream), weight_gradient.value, weight_gradient.bound);

    Tensor frozen = dx.clone(stream);  // without a weight gradient; dx may be dy
    if (beta == 0) {
      Tensor in_place = c.dy.clone(stream);
      Tensor again = Tensor::zeros({shape[-1]}, accumulator(dtype), stream);
      rms_norm_backward(in_place, c.x, c.weight, c.rstd, in_place, &again, stream);
      CHECK(same_values(in_place, dx, stream));
      rms_norm_backward(c.dy, c.x, c.weight, c.rstd, frozen, nullptr, stream);
      CHECK(same_values(frozen, dx, stream));
    }
  }
}

std::vector<double> all_gradients(DType dtype, StreamRef stream) {
  Case c = make({777, 130}, dtype, stream, false);
  Tensor y = Tensor::empty({777, 130}, dtype, stream), dx = Tensor::empty({777, 130}, dtype, stream);
  Tensor dweight = Tensor::zeros({130}, DType::kFloat32, stream);
  rms_norm_forward(c.x, c.weight, kEps, y, c.rstd, stream);
  rms_norm_backward(c.dy, c.x, c.weight, c.rstd, dx, &dweight, stream);
  std::vector<double> all = values(y, stream);
  for (const Tensor* t : {&c.rstd, &dx, &dweight}) {
    const std::vector<double> more = values(*t, stream);
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

void check_empty(StreamRef stream) {
  Case c = make({0, 8}, DType::kFloat32, stream, false);
  Tensor y = Tensor::empty({0, 8}, DType::kFloat32, stream);
  Tensor dweight = random_normal({8}, DType::kFloat32, 1, stream);
  const Tensor before = dweight.clone(stream);
  rms_norm_forward(c.x, c.weight, kEps, y, c.rstd, stream);
  rms_norm_backward(c.dy, c.x, c.weight, c.rstd, y, &dweight, stream);
  CHECK(same_values(dweight, before, stream));
}

void check_zero_row(DType dtype, StreamRef stream) {
  const Tensor x = Tensor::zeros({2, 16}, dtype, stream), weight = random_normal({16}, dtype, 1, stream);
  Tensor y = Tensor::empty({2, 16}, dtype, stream), rstd = Tensor::empty({2}, accumulator(dtype), stream);
  rms_norm_forward(x, weight, kEps, y, rstd, stream);
  CHECK(values(y, stream) == values(Tensor::zeros({2, 16}, dtype, stream), stream));
  Tensor dx = Tensor::empty({2, 16}, dtype, stream);
  rms_norm_backward(random_normal({2, 16}, dtype, 2, stream), x, weight, rstd, dx, nullptr, stream);
  for (const double v : values(dx, stream)) CHECK(std::isfinite(v));
}

const std::vector<Shape> kShapes = {{1, 1}, {3, 7}, {33, 64}, {129, 1000}, {65, 128}, {5, 3, 16}, {17, 2, 33}};

}  // namespace

TEST_CASE("RMSNorm divides each row by its root mean square", "[ops][rms_norm]") {
  const PoisonedMemory memory(Device::cpu());
  for (const DType dtype : kCpuDtypes) {
    for (const Shape& shape : kShapes) check_forward(shape, dtype, StreamRef());
  }
  CHECK(memory.violations() == 0);
}

TEST_CASE("RMSNorm's gradients match their formulas in every dtype", "[ops][rms_norm]") {
  const PoisonedMemory memory(Device::cpu());
  for (const DType dtype : kCpuDtypes) {
    for (const Shape& shape : kShapes) check_backward(shape, dtype, StreamRef());
  }
  CHECK(memory.violations() == 0);
}

TEST_CASE("RMSNorm takes more than 65535 rows", "[ops][rms_norm]") {
  check_forward({70000, 8}, DType::kFloat32, StreamRef());
  check_backward({70000, 8}, DType::kFloat32, StreamRef());
}

TEST_CASE("RMSNorm's gradients agree with finite differences", "[ops][rms_norm]") {
  const StreamRef cpu;
  const Shape shape = {4, 2, 6};
  Case c = make(shape, DType::kFloat64, cpu, false);
  const std::vector<double> weights = values(c.dy, cpu);
  Tensor y = Tensor::empty(shape, DType::kFloat64, cpu), dx = Tensor::empty(shape, DType::kFloat64, cpu);
  Tensor dweight = Tensor::zeros({6}, DType::kFloat64, cpu);
  const auto loss = [&] {
    rms_norm_forward(c.x, c.weight, kEps, y, c.rstd, cpu);
    return dot(values(y, cpu), weights);
  };
  loss();
  rms_norm_backward(c.dy, c.x, c.weight, c.rstd, dx, &dweight, cpu);
  check_gradient(loss, c.x, values(dx, cpu));
  check_gradient(loss, c.weight, values(dweight, cpu));
}

TEST_CASE("RMSNorm's results do not depend on threads", "[ops][rms_norm]") {
  CHECK(same_with_any_threads([] { return all_gradients(DType::kFloat32, StreamRef()); }));
}

TEST_CASE("RMSNorm of no rows and of zero rows is well defined", "[ops][rms_norm]") {
  check_empty(StreamRef());
  for (const DType dtype : kCpuDtypes) check_zero_row(dtype, StreamRef());
}

TEST_CASE("RMSNorm names the operand that does not fit", "[ops][rms_norm]") {
  const StreamRef cpu;
  Case c = make({3, 8}, DType::kFloat32, cpu, false);
  Tensor y = Tensor::empty({3, 8}, DType::kFloat32, cpu), narrow = Tensor::empty({3, 7}, DType::kFloat32, cpu);
  const auto refuse = [](const std::string& part, const std::function<void()>& f) {
    check_throws(ErrorKind::kInvalidArgument, part, f);
  };
  refuse("expected weight of shape [8], got [7]",
         [&] { rms_norm_forward(c.x, narrow.select(0, 0), kEps, y, c.rstd, cpu); });
  refuse("expected y of shape [3, 8], got [3, 7]", [&] { rms_norm_forward(c.x, c.weight, kEps, narrow, c.rstd, cpu); });
  refuse("eps >= 0, got -1", [&] { rms_norm_forward(c.x, c.weight, -1, y, c.rstd, cpu); });
  refuse("finite dx_beta", [&] { rms_norm_backward(c.dy, c.x, c.weight, c.rstd, y, nullptr, cpu, kNan); });
  refuse("adjacent columns", [&] {
    rms_norm_forward(random_normal({8, 3}, DType::kFloat32, 1, cpu).transpose(0, 1), c.weight, kEps, y, c.rstd, cpu);
  });
  Tensor half = random_normal({8}, DType::kBFloat16, 1, cpu);
  refuse("expected dweight of dtype float32, got bfloat16",
         [&] { rms_norm_backward(c.dy, c.x, c.weight, c.rstd, y, &half, cpu); });
}

TEST_CASE("RMSNorm divides each row by its root mean square on the GPU", "[ops][rms_norm][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  const PoisonedMemory memory(gpu.device());
  for (const DType dtype : kGpuDtypes) {
    for (const Shape& shape : kShapes) check_forward(shape, dtype, gpu);
    check_forward({9, 4104}, dtype, gpu);
    check_zero_row(dtype, gpu);
  }
  check_empty(gpu);
  CHECK(memory.violations() == 0);
}

TEST_CASE("RMSNorm's gradients match their formulas on the GPU", "[ops][rms_norm][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  const PoisonedMemory memory(gpu.device());
  for (const DType dtype : kGpuDtypes) {
    for (const Shape& shape : kShapes) check_backward(shape, dtype, gpu);
    check_backward({9, 4104}, dtype, gpu);
  }
  CHECK(memory.violations() == 0);
}

TEST_CASE("RMSNorm takes more than 65535 rows on the GPU", "[ops][rms_norm][gpu]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  check_forward({70000, 8}, DType::kBFloat16, gpu);
  check_backward({70000, 8}, DType::kBFloat16, gpu);
}

TEST_CASE("RMSNorm has the same bits in every run on the GPU", "[ops][rms_norm][gpu]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  CHECK(all_gradients(DType::kBFloat16, gpu) == all_gradients(DType::kBFloat16, gpu));
}
