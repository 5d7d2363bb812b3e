#include "rowan/ops/step_control.h"

#include <array>
#include <cmath>
#include <vector>

#include "core/check.h"
#include "ops/row_view.h"
#include "ops/step_control_backend.h"

namespace rowan {

namespace {

void require_control(const char* op, const Tensor& control, StreamRef stream) {
  detail::require_shape(op, "control", control, {4});
  detail::require_dtype(op, "control", control, DType::kFloat64);
  detail::require_contiguous(op, "control", control);
  detail::require_on(op, "control", control, stream);
}

}  // namespace

struct GradSquareSum::Table {
  std::vector<Tensor> gradients;
  Tensor active;
  std::vector<SquareSumPiece> pieces;  // what the CPU reads
  Tensor device_pieces;                // the same bytes on a CUDA device
  Tensor partial;
  DType dtype = DType::kFloat32;
  std::int64_t chunks = 0;
};

GradSquareSum::GradSquareSum(std::span<const Tensor> gradients, const Tensor& active, StreamRef stream) {
  constexpr const char* kOp = "grad_square_sum";
  auto table = std::make_shared<Table>();
  if (active.defined()) {
    detail::require_shape(kOp, "active", active, {static_cast<std::int64_t>(gradients.size())});
    detail::require_dtype(kOp, "active", active, DType::kInt32);
    detail::require_contiguous(kOp, "active", active);
    detail::require_on(kOp, "active", active, stream);
    table->active = active;
  }
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const Tensor& gradient = gradients[i];
    if (!gradient.defined()) continue;
    detail::require_on(kOp, "every gradient", gradient, stream);
    if (table->pieces.empty()) table->dtype = gradient.dtype();
    detail::require_dtype(kOp, "every gradient", gradient, table->dtype);
    const bool known =
        gradient.dtype() == DType::kFloat32 || (gradient.dtype() == DType::kFloat64 && stream.device().is_cpu());
    detail::require(known, "{}: expected gradients of dtype float32 (or float64 on the CPU), got {} on {}", kOp,
                    gradient.dtype(), stream.device());
    detail::require_rows(kOp, "every gradient", gradient);
    SquareSumPiece piece;
    piece.gradient = gradient.raw();
    piece.active = active.defined() ? active.data<std::int32_t>() + i : nullptr;
    piece.cols = detail::common_cols({&gradient});
    piece.stride = detail::row_stride(gradient, piece.cols);
    piece.elements = gradient.elements();
    piece.first_chunk = table->chunks;
    table->chunks += (piece.elements + kSquareSumChunk - 1) / kSquareSumChunk;
    table->pieces.push_back(piece);
  }
  table->gradients.assign(gradients.begin(), gradients.end());
  table->partial = Tensor::empty({table->chunks}, DType::kFloat64, stream);
  if (stream.device().is_cuda()) {
    const auto bytes = std::as_bytes(std::span<const SquareSumPiece>(table->pieces));
    table->device_pieces = Tensor::from_host_bytes({static_cast<std::int64_t>(bytes.size() / sizeof(std::int64_t))},
                                                   DType::kInt64, bytes.data(), bytes.size(), stream);
  }
  table_ = std::move(table);
}

void GradSquareSum::run(Tensor& control, StreamRef stream, bool accumulate) const {
  constexpr const char* kOp = "grad_square_sum";
  detail::require(table_ != nullptr, "{}: expected a list of gradients, got a default-constructed one", kOp);
  require_control(kOp, control, stream);
  detail::require_on(kOp, "gradients", table_->partial, stream);
  SquareSumArguments arguments;
  arguments.piece_count = static_cast<std::int64_t>(table_->pieces.size());
  arguments.chunks = table_->chunks;
  arguments.partial = table_->partial.data<double>();
  arguments.dtype = table_->dtype;
  arguments.control = control.data<double>();
  arguments.accumulate = accumulate;
  if (stream.device().is_cpu()) {
    arguments.pieces = table_->pieces.data();
    cpu::grad_square_sum(arguments);
    return;
  }
  arguments.pieces = static_cast<const SquareSumPiece*>(table_->device_pieces.raw());
  cuda::grad_square_sum(arguments, stream);
  for (const Tensor& gradient : table_->gradients) gradient.record_use(stream);
  for (const Tensor* t : {&table_->active, &table_->device_pieces, &table_->partial}) t->record_use(stream);
  control.record_use(stream);
}

void grad_square_sum(std::span<const Tensor> gradients, Tensor& control, StreamRef stream, bool accumulate) {
  require_control("grad_square_sum", control, stream);
  GradSquareSum(gradients, Tensor(), stream).run(control, stream, accumulate);
}

Tensor make_step_control(StreamRef stream) {
  return Tensor::from_host<double>({4}, std::vector<double>{0, 1, 0, 0}, stream);
}

void finish_step_control(Tensor& control, double max_norm, StreamRef stream) {
  require_control("finish_step_control", control, stream);
  detail::require(std::isfinite(max_norm) && max_norm >= 0,
                  "finish_step_control: expected max_norm >= 0 and finite, got {}", max_norm);
  if (stream.device().is_cpu()) {
    cpu::finish_step_control(control.data<double>(), max_norm);
  } else {
    cuda::finish_step_control(control.data<double>(), max_norm, stream);
  }
  control.record_use(stream);
}

void count_skipped_step(Tensor& control, StreamRef stream) {
  require_control("count_skipped_step", control, stream);
  if (stream.device().is_cpu()) {
    cpu::count_skipped_step(control.data<double>());
  } else {
    cuda::count_skipped_step(control.data<double>(), stream);
  }
  control.record_use(stream);
}

StepReport read_step_control(const Tensor& control, StreamRef stream) {
  require_control("read_step_control", control, stream);
  const std::vector<double> values = control.to_vector<double>(stream);
  StepReport report;
  report.gradient_norm = std::sqrt(values[StepControl::kSquareSum]);
  report.factor = values[StepControl::kFactor];
  report.skipped = values[StepControl::kSkip] != 0;
  report.skipped_steps = static_cast<std::int64_t>(values[StepControl::kSkipCount]);
  return report;
}

void advance_steps(const Tensor& control, const Tensor& active, Tensor& steps, Tensor& controls, StreamRef stream) {
  constexpr const char* kOp = "advance_steps";
  require_control(kOp, control, stream);
  detail::require_rank(kOp, "active", active, 1);
  detail::require_dtype(kOp, "active", active, DType::kInt32);
  detail::require_shape(kOp, "steps", steps, {active.size(0)});
  detail::require_dtype(kOp, "steps", steps, DType::kInt64);
  detail::require_shape(kOp, "controls", controls, {active.size(0), 4});
  detail::require_dtype(kOp, "controls", controls, DType::kFloat64);
  detail::require_contiguous(kOp, "active", active);
  detail::require_contiguous(kOp, "steps", steps);
  detail::require_contiguous(kOp, "controls", controls);
  detail::require_on(kOp, "active", active, stream);
  detail::require_on(kOp, "steps", steps, stream);
  detail::require_on(kOp, "controls", controls, stream);
  detail::require(!controls.overlaps(control), "{}: expected controls apart from control, got overlapping memory", kOp);
  AdvanceArguments arguments;
  arguments.control = control.data<double>();
  arguments.active = active.data<std::int32_t>();
  arguments.steps = steps.data<std::int64_t>();
  arguments.controls = controls.data<double>();
  arguments.count = active.size(0);
  if (stream.device().is_cpu()) {
    cpu::advance_steps(arguments);
  } else {
    cuda::advance_steps(arguments, stream);
  }
  for (const Tensor* t : {&control, &active, static_cast<const Tensor*>(&steps), static_cast<const Tensor*>(&controls)})
    t->record_use(stream);
}

namespace {

template <class T>
void write(Tensor& destination, std::span<const T> values, StreamRef stream) {
  constexpr const char* kOp = "write_values";
  detail::require_dtype(kOp, "destination", destination, dtype_of<T>::value);
  detail::require_contiguous(kOp, "destination", destination);
  detail::require_on(kOp, "destination", destination, stream);
  detail::require(destination.elements() == static_cast<std::int64_t>(values.size()),
                  "{}: expected {} values for shape {}, got {}", kOp, destination.elements(), destination.shape(),
                  values.size());
  if (stream.device().is_cpu()) {
    std::copy(values.begin(), values.end(), destination.data<T>());
    return;
  }
  cuda::write_values(destination.data<T>(), values, stream);
  destination.record_use(stream);
}

}  // namespace

void write_values(Tensor& destination, std::span<const double> values, StreamRef stream) {
  write(destination, values, stream);
}

void write_values(Tensor& destination, std::span<const std::int32_t> values, StreamRef stream) {
  write(destination, values, stream);
}

}  // namespace rowan
