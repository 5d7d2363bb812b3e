// Stands in for step_control_cuda.cu in a build without CUDA.
#include "ops/step_control_backend.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

namespace {
[[noreturn]] void unsupported() { throw Error(ErrorKind::kUnsupported, "step_control: built without CUDA"); }
}  // namespace

void grad_square_sum(const SquareSumArguments&, StreamRef) { unsupported(); }
void finish_step_control(double*, double, StreamRef) { unsupported(); }
void count_skipped_step(double*, StreamRef) { unsupported(); }
void advance_steps(const AdvanceArguments&, StreamRef) { unsupported(); }
void write_values(double*, std::span<const double>, StreamRef) { unsupported(); }
void write_values(std::int32_t*, std::span<const std::int32_t>, StreamRef) { unsupported(); }

}  // namespace rowan::cuda
