#include "ops/symmetric_product_backend.h"

#include <cmath>

#include "catch.h"
#include "rowan/ops/gemm.h"
#include "support/compare.h"
#include "support/device.h"

namespace rowan {
namespace {

using test::values;

SymmetricOperand operand(const Tensor& t) { return {t.raw(), t.stride(1), t.stride(0)}; }

/// alpha a a^T + beta c + gamma I against a whole product in float32; twice, for equal bits.
void check_product(std::int64_t batches, std::int64_t side, std::int64_t depth, StreamRef stream) {
  const double alpha = 1 / static_cast<double>(depth), beta = 0.5, gamma = 2;
  const Tensor a = test::random_normal({batches, side, depth}, DType::kFloat16, 21, stream);
  Tensor c = Tensor::empty({batches, side, side}, DType::kFloat16, stream);
  gemm(a, a.transpose(1, 2), c, stream, {.alpha = 1 / std::sqrt(static_cast<double>(depth))});
  Tensor whole = Tensor::empty(c.shape(), DType::kFloat32, stream);
  gemm(a, a.transpose(1, 2), whole, stream, {.alpha = alpha});

  const std::vector<double> nan(static_cast<std::size_t>(c.elements()), std::nan(""));
  const Tensor out =
      test::convert(Tensor::from_host(c.shape(), nan, StreamRef()), DType::kFloat16, StreamRef(), stream);
  const SymmetricProductArguments arguments{DType::kFloat16, batches,      side,  depth, operand(a), operand(a),
                                            operand(c),      operand(out), alpha, beta,  gamma};
  if (!cuda::symmetric_product_pays(arguments, stream)) return;  // another GPU than Hopper
  const Tensor workspace = Tensor::zeros({cuda::symmetric_product_workspace(stream) / 4}, DType::kFloat32, stream);
  cuda::symmetric_product(arguments, workspace.raw(), stream);
  const std::vector<double> got = values(out, stream), product = values(whole, stream), added = values(c, stream);
  cuda::symmetric_product(arguments, workspace.raw(), stream);
  CAPTURE(batches, side, depth);
  CHECK((values(out, stream) == got));

  std::int64_t wrong = 0, asymmetric = 0;
  for (std::int64_t e = 0; e < c.elements(); ++e) {
    const std::int64_t i = e / side % side, j = e % side;
    const auto at = static_cast<std::size_t>(e), mirrored = static_cast<std::size_t>(e + (j - i) * side + (i - j));
    const std::size_t lower = i >= j ? at : mirrored;
    const double expected = product[lower] + beta * added[lower] + (i == j ? gamma : 0);
    if (!(std::abs(got[at] - expected) <= 1.01 * unit_roundoff(DType::kFloat16) * std::abs(expected) + 1e-5)) ++wrong;
    if (got[at] != got[mirrored]) ++asymmetric;
  }
  CHECK(wrong == 0);
  CHECK(asymmetric == 0);
}

}  // namespace

TEST_CASE("A symmetric product by its lower triangle agrees with the whole one", "[ops][newton_schulz][gpu]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  check_product(1, 1600, 4096, stream);
  check_product(4, 1024, 4096, stream);
  check_product(1, 3008, 3072, stream);
}

}  // namespace rowan
