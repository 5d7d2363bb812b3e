// The LoRA operations against float64 results of the formulas that NeMo Automodel's lora_kernel implements
// (tests/data/goldens/README.md).
#include <cmath>
#include <vector>

#include "catch.h"
#include "rowan/ops/lora.h"
#include "support/device.h"
#include "support/goldens.h"
#include "support/lora_oracle.h"

using namespace rowan;
using namespace rowan::test;

namespace {

/// The bound comes from the inputs; the values to compare with from the file.
void check(const Tensor& got, const Golden& golden, const char* name, const Estimate& estimate, StreamRef stream) {
  const std::vector<double> expected = golden.values(name);
  // The file's own float64 sums against those of this test.
  std::vector<double> same = expected;
  for (double& v : same) v = 1e-10 * (1 + std::abs(v));
  CHECK(within(estimate.exact.v, expected, same));
  std::string message;
  const bool good = within(values(got, stream), expected, estimate.error.v, &message);
  INFO(name << ": " << message);
  CHECK(good);
}

/// rowan's relative error against float64 must not exceed that of the reference's kernels by more than its own last
/// rounding can vary.
void check_not_worse(const Tensor& got, const Golden& golden, const std::string& name, StreamRef stream) {
  if (!golden.has(name + "_peer")) return;
  const std::vector<double> exact = golden.values(name + "_f64");
  const double ours = difference(values(got, stream), exact).relative_frobenius;
  const double theirs = difference(golden.values(name + "_peer"), exact).relative_frobenius;
  CAPTURE(name, ours, theirs);
  CHECK(ours <= 1.05 * theirs);
}

void check_file(const std::filesystem::path& path, StreamRef stream) {
  const Golden golden(path);
  CAPTURE(golden.name());
  const Tensor x = golden.tensor("x", stream), a = golden.tensor("lora_A", stream), b = golden.tensor("lora_B", stream),
               dy = golden.tensor("dy", stream);
  const double scale = golden.number("scale", 1);
  const DType dtype = x.dtype();
  const Matrix x_host = host(x, stream), a_host = host(a, stream), b_host = host(b, stream), dy_host = host(dy, stream);
  const Estimate u = shrink_estimate(x_host, a_host, scale, dtype),
                 t = shrink_estimate(dy_host, transposed(b_host), scale, dtype);

  const Tensor y = lora_forward(x, a, b, scale, stream);
  const LoraDaDx grads = lora_da_dx(dy, x, a, b, scale, stream);
  const Tensor db = lora_db(dy, x, a, scale, stream);
  check(y, golden, "y_f64", expand_estimate(u, transposed(b_host), dtype, dtype), stream);
  check(grads.dx, golden, "dx_f64", expand_estimate(t, a_host, dtype, dtype), stream);
  check(grads.da, golden, "dA_f64", reduce_estimate(t, x_host, dtype), stream);
  check(db, golden, "dB_f64", transposed(reduce_estimate(u, dy_host, dtype)), stream);
  check_not_worse(y, golden, "y", stream);
  check_not_worse(grads.dx, golden, "dx", stream);
  check_not_worse(grads.da, golden, "dA", stream);
  check_not_worse(db, golden, "dB", stream);
}

}  // namespace

TEST_CASE("the LoRA operations agree with every golden file within bounds of their dtype") {
  const auto files = golden_files("lora");
  REQUIRE(!files.empty());
  for (const auto& file : files) check_file(file, {});
}

TEST_CASE("the LoRA operations on CUDA agree with every golden file within bounds of their dtype", "[gpu]") {
  if (!have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const auto& file : golden_files("lora")) check_file(file, stream);
}
