// Newton-Schulz against the public implementation and the exact polynomial (tests/data/goldens/README.md).
#include <algorithm>
#include <cmath>
#include <sstream>

#include "catch.h"
#include "rowan/ops/newton_schulz.h"
#include "support/compare.h"
#include "support/device.h"
#include "support/goldens.h"

namespace rowan {
namespace {

using test::Golden;

NewtonSchulzOptions options_of(const Golden& golden) {
  NewtonSchulzOptions options;
  options.steps = static_cast<int>(std::lround(golden.number("steps", 5)));
  options.epsilon = golden.number("eps", 1e-7);
  std::string text = golden.text("coefficients");
  if (text.empty()) return options;
  for (char& c : text) {
    if (c == ',' || c == ';' || c == '(' || c == ')' || c == '[' || c == ']') c = ' ';
  }
  std::istringstream numbers(text);
  options.schedule.coefficients.clear();
  for (NewtonSchulzCoefficients step; numbers >> step.a >> step.b >> step.c;)
    options.schedule.coefficients.push_back(step);
  return options;
}

/// Relative Frobenius distance of a path's result from a float64 reference; the path stores in `dtype`.
double error_of(const Golden& golden, NewtonSchulzPath path, DType dtype, const char* reference, StreamRef stream) {
  NewtonSchulzOptions options = options_of(golden);
  options.path = path;
  const Tensor input = golden.tensor("input", stream);
  Tensor out = Tensor::empty(input.shape(), dtype, stream);
  newton_schulz(input, out, options, stream);
  return test::difference(test::values(out, stream), golden.values(reference)).relative_frobenius;
}

/// Each path's error against the exact polynomial is at most 1.1 times the reference's own.
void check_file(const std::filesystem::path& file, StreamRef stream) {
  const Golden golden(file);
  CAPTURE(golden.name());
  const double reference =
      test::difference(golden.values("standard_bf16"), golden.values("exact_quintic_f64")).relative_frobenius;
  const Tensor input = golden.tensor("input");
  std::vector<NewtonSchulzPath> paths{NewtonSchulzPath::kAuto, NewtonSchulzPath::kStandard, NewtonSchulzPath::kGram,
                                      NewtonSchulzPath::kGramFp32};
  if (std::min(input.size(-1), input.size(-2)) <= 64) paths.push_back(NewtonSchulzPath::kSkinny);
  for (const NewtonSchulzPath path : paths) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
      CAPTURE(to_string(path), to_string(dtype));
      CHECK(error_of(golden, path, dtype, "exact_quintic_f64", stream) <= 1.1 * reference);
    }
  }
}

}  // namespace

TEST_CASE("Newton-Schulz is as near to the exact polynomial as the golden files", "[ops][golden]") {
  const auto files = test::golden_files("newton_schulz");
  REQUIRE(files.size() >= 6);
  for (const auto& file : files) check_file(file, StreamRef());
}

TEST_CASE("The exact polar factor agrees with the golden files", "[ops][golden]") {
  for (const auto& file : test::golden_files("newton_schulz")) {
    const Golden golden(file);
    CAPTURE(golden.name());
    CHECK(error_of(golden, NewtonSchulzPath::kSvd, DType::kFloat64, "polar_f64", StreamRef()) <= 1e-11);
  }
}

TEST_CASE("Newton-Schulz on CUDA is as near to the exact polynomial as the golden files", "[ops][golden][gpu]") {
  if (!test::have_gpu()) return;
  const Stream stream(Device::cuda());
  for (const auto& file : test::golden_files("newton_schulz")) check_file(file, stream);
}

}  // namespace rowan
