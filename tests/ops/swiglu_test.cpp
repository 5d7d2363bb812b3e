#include "rowan/ops/swiglu.h"

#include "ops/op_test.h"

using namespace rowan;
using namespace rowan::test;

namespace {

struct Operands {
  Tensor gate, up, dout;
};

Operands make(std::int64_t rows, std::int64_t width, DType dtype, StreamRef stream) {
  return {random_normal({rows, width}, dtype, 1, stream, 3.0), random_normal({rows, width}, dtype, 2, stream),
          random_normal({rows, width}, dtype, 3, stream)};
}

double sigmoid(double g) { return 1 / (1 + std::exp(-g)); }

/// A handful of roundings of the accumulator: exponential, sum, quotient, products.
double roundings(DType dtype, double magnitude) { return 8 * unit_roundoff(accumulator(dtype)) * magnitude; }

void check_both_ways(std::int64_t rows, std::int64_t width, DType dtype, StreamRef stream) {
  for (const bool gaps : {false, true}) {
    CAPTURE(rows, width, dtype, gaps);
    Operands o = make(rows, width, dtype, stream);
    Tensor out = random_normal({rows, width}, dtype, 4, stream), dgate = out.clone(stream), dup = out.clone(stream);
    if (gaps) {
      o = {apart(o.gate, stream, 1), apart(o.up, stream, 2), apart(o.dout, stream, 3)};
      out = apart(out, stream, 4), dgate = apart(dgate, stream, 5), dup = apart(dup, stream, 6);
    }
    const std::vector<double> gate = values(o.gate, stream), up = values(o.up, stream), dout = values(o.dout, stream);
    std::vector<double> value[3], bound[3];
    for (std::size_t i = 0; i < gate.size(); ++i) {
      const double g = gate[i], p = sigmoid(g);
      const double exact[3] = {g * p * up[i], dout[i] * up[i] * p * (1 + g * (1 - p)), dout[i] * g * p};
      const double error[3] = {roundings(dtype, std::abs(exact[0])),
                               roundings(dtype, std::abs(dout[i] * up[i]) * p * (1 + std::abs(g))),
                               roundings(dtype, std::abs(exact[2]))};
      for (int k = 0; k < 3; ++k) {
        value[k].push_back(exact[k]);
        bound[k].push_back(rounded_error(dtype, exact[k], error[k]));
      }
    }
    swiglu_forward(o.gate, o.up, out, stream);
    swiglu_backward(o.dout, o.gate, o.up, dgate, dup, stream);
    check_within(values(out, stream), value[0], bound[0]);
    check_within(values(dgate, stream), value[1], bound[1]);
    check_within(values(dup, stream), value[2], bound[2]);
  }
}

/// Gradients over gate and up as views of one fused buffer.
void check_in_place(DType dtype, StreamRef stream) {
  CAPTURE(dtype);
  const std::int64_t rows = 5, width = 300;
  const Operands o = make(rows, width, dtype, stream);
  Tensor dgate = Tensor::empty({rows, width}, dtype, stream), dup = dgate.clone(stream), out = dgate.clone(stream);
  swiglu_forward(o.gate, o.up, out, stream);
  swiglu_backward(o.dout, o.gate, o.up, dgate, dup, stream);
  const Tensor fused = Tensor::empty({rows, 2 * width}, dtype, stream);
  Tensor gate = fused.slice(1, 0, width), up = fused.slice(1, width, 2 * width);
  gate.copy_from(o.gate, stream), up.copy_from(o.up, stream);
  swiglu_backward(o.dout, gate, up, gate, up, stream);
  CHECK(same_values(gate, dgate, stream));
  CHECK(same_values(up, dup, stream));
  Tensor over = o.up.clone(stream);
  swiglu_forward(o.gate, over, over, stream);
  CHECK(same_values(over, out, stream));
}

void check_extremes(DType dtype, StreamRef stream) {
  CAPTURE(dtype);
  const auto row = [&](const std::vector<double>& v) {
    return convert(Tensor::from_host({1, static_cast<std::int64_t>(v.size())}, v, StreamRef()), dtype, StreamRef(),
                   stream);
  };
  const Tensor gate = row({0, 10000, -10000, kNan, 1, kInfinity}), up = row({3, 2, 2, 1, kNan, 1}),
               one = row({1, 1, 1, 1, 1, 1});
  Tensor out = one.clone(stream), dgate = one.clone(stream), dup = one.clone(stream);
  swiglu_forward(gate, up, out, stream);
  swiglu_backward(one, gate, up, dgate, dup, stream);
  const std::vector<double> y = values(out, stream), dg = values(dgate, stream), du = values(dup, stream);
  const double big = values(gate, stream)[1];  // 10000 as the dtype has it
  CHECK(y[0] == 0);
  CHECK(dg[0] == 1.5);
  CHECK(y[1] == 2 * big);
  CHECK(dg[1] == 2);
  CHECK(du[1] == big);
  CHECK(y[2] == 0);
  CHECK(dg[2] == 0);
  CHECK(std::isnan(y[3]));
  CHECK(std::isnan(y[4]));
  CHECK(y[5] == kInfinity);
}

}  // namespace

TEST_CASE("SwiGLU and its gradients match their formulas", "[ops][swiglu]") {
  for (const DType dtype : kCpuDtypes) {
    for (const std::int64_t width : {1, 7, 64, 129, 344, 1000}) check_both_ways(33, width, dtype, StreamRef());
  }
}

TEST_CASE("SwiGLU takes more than 65535 rows", "[ops][swiglu]") {
  check_both_ways(70000, 3, DType::kFloat32, StreamRef());
}

TEST_CASE("SwiGLU's gradients may overwrite gate and up", "[ops][swiglu]") {
  for (const DType dtype : kCpuDtypes) check_in_place(dtype, StreamRef());
}

TEST_CASE("SwiGLU keeps zeros, large values, infinities and NaN", "[ops][swiglu]") {
  for (const DType dtype : kCpuDtypes) check_extremes(dtype, StreamRef());
}

TEST_CASE("SwiGLU's gradients agree with finite differences", "[ops][swiglu]") {
  const StreamRef cpu;
  const Operands o = make(3, 5, DType::kFloat64, cpu);
  Tensor out = o.up.clone(cpu), dgate = out.clone(cpu), dup = out.clone(cpu);
  const auto loss = [&] {
    swiglu_forward(o.gate, o.up, out, cpu);
    return dot(values(out, cpu), values(o.dout, cpu));
  };
  swiglu_backward(o.dout, o.gate, o.up, dgate, dup, cpu);
  check_gradient(loss, o.gate, values(dgate, cpu));
  check_gradient(loss, o.up, values(dup, cpu));
}

TEST_CASE("SwiGLU of no rows does nothing and misfits are named", "[ops][swiglu]") {
  const StreamRef cpu;
  Tensor none = Tensor::empty({0, 5}, DType::kFloat32, cpu);
  swiglu_forward(none, none, none, cpu);
  swiglu_backward(none, none, none, none, none, cpu);
  Tensor a = random_normal({2, 5}, DType::kFloat32, 1, cpu), b = random_normal({2, 4}, DType::kFloat32, 2, cpu);
  Tensor c = random_normal({2, 5}, DType::kFloat16, 2, cpu);
  check_throws(ErrorKind::kInvalidArgument, "swiglu_forward: expected up of shape [2, 5], got [2, 4]",
               [&] { swiglu_forward(a, b, a, cpu); });
  check_throws(ErrorKind::kInvalidArgument, "swiglu_backward: expected dup of dtype float32, got float16",
               [&] { swiglu_backward(a, a, a, a, c, cpu); });
}

TEST_CASE("SwiGLU and its gradients match their formulas on the GPU", "[ops][swiglu][gpu][sanitize]") {
  if (!have_gpu()) return;
  const Stream gpu(Device::cuda());
  for (const DType dtype : kGpuDtypes) {
    for (const std::int64_t width : {1, 7, 64, 129, 344, 1000}) check_both_ways(33, width, dtype, gpu);
    check_in_place(dtype, gpu);
    check_extremes(dtype, gpu);
  }
  Tensor none = Tensor::empty({0, 5}, DType::kFloat32, gpu);
  swiglu_forward(none, none, none, gpu);
  swiglu_backward(none, none, none, none, none, gpu);
}

TEST_CASE("SwiGLU takes more than 65535 rows on the GPU", "[ops][swiglu][gpu]") {
  if (!have_gpu()) return;
  check_both_ways(70000, 3, DType::kFloat16, Stream(Device::cuda()));
}
