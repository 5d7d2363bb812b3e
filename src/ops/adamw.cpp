#include "rowan/ops/adamw.h"

#include <vector>

#include "core/check.h"
#include "ops/adamw_backend.h"
#include "ops/row_view.h"

namespace rowan {

struct AdamwBatch::Table {
  std::vector<AdamwArguments> parameters;
  std::vector<AdamwPiece> pieces;  // what the CPU reads
  Tensor device_pieces;            // the same bytes on a CUDA device
  DType dtype = DType::kFloat32;
  std::int64_t chunks = 0;
};

namespace {

constexpr const char* kOp = "adamw";

void require_values(const AdamwArguments& p, StreamRef stream) {
  detail::require_shape(kOp, "rates", p.rates, {2});
  detail::require_dtype(kOp, "rates", p.rates, DType::kFloat64);
  detail::require_contiguous(kOp, "rates", p.rates);
  detail::require_on(kOp, "rates", p.rates, stream);
  detail::require_shape(kOp, "step", p.step, {1});
  detail::require_dtype(kOp, "step", p.step, DType::kInt64);
  detail::require_on(kOp, "step", p.step, stream);
  if (p.control.defined()) {
    detail::require_shape(kOp, "control", p.control, {4});
    detail::require_dtype(kOp, "control", p.control, DType::kFloat64);
    detail::require_contiguous(kOp, "control", p.control);
    detail::require_on(kOp, "control", p.control, stream);
  }
  detail::require(p.beta1 >= 0 && p.beta1 < 1, "{}: expected beta1 in [0, 1), got {}", kOp, p.beta1);
  detail::require(p.beta2 >= 0 && p.beta2 < 1, "{}: expected beta2 in [0, 1), got {}", kOp, p.beta2);
  detail::require(p.epsilon >= 0, "{}: expected epsilon >= 0, got {}", kOp, p.epsilon);
}

void require_tensors(const AdamwArguments& p, DType dtype, StreamRef stream) {
  detail::require_on(kOp, "master", p.master, stream);
  detail::require_dtype(kOp, "master", p.master, dtype);
  const bool known = dtype == DType::kFloat32 || (dtype == DType::kFloat64 && stream.device().is_cpu());
  detail::require(known, "{}: expected master of dtype float32 (or float64 on the CPU), got {} on {}", kOp, dtype,
                  stream.device());
  const std::pair<const char*, const Tensor*> same[] = {
      {"gradient", &p.gradient}, {"first_moment", &p.first_moment}, {"second_moment", &p.second_moment}};
  for (const auto& [name, t] : same) {
    detail::require_shape(kOp, name, *t, p.master.shape());
    detail::require_dtype(kOp, name, *t, dtype);
    detail::require_on(kOp, name, *t, stream);
  }
  detail::require_rows(kOp, "master", p.master);
  detail::require_rows(kOp, "gradient", p.gradient);
  detail::require_contiguous(kOp, "first_moment", p.first_moment);
  detail::require_contiguous(kOp, "second_moment", p.second_moment);
  if (p.value.defined()) {
    detail::require_shape(kOp, "value", p.value, p.master.shape());
    detail::require_on(kOp, "value", p.value, stream);
    detail::require(p.value.dtype() == DType::kBFloat16 || p.value.dtype() == DType::kFloat16,
                    "{}: expected value of dtype bfloat16 or float16 (or none), got {}", kOp, p.value.dtype());
    detail::require_rows(kOp, "value", p.value);
  }
}

AdamwPiece make_piece(const AdamwArguments& p) {
  AdamwPiece piece;
  piece.master = p.master.raw();
  piece.gradient = p.gradient.raw();
  piece.first_moment = p.first_moment.raw();
  piece.second_moment = p.second_moment.raw();
  piece.value = p.value.raw();
  piece.rates = p.rates.data<double>();
  piece.step = p.step.data<std::int64_t>();
  piece.control = p.control.defined() ? p.control.data<double>() : nullptr;
  piece.elements = p.master.elements();
  piece.cols = detail::common_cols({&p.master, &p.gradient, &p.value});
  piece.master_stride = detail::row_stride(p.master, piece.cols);
  piece.gradient_stride = detail::row_stride(p.gradient, piece.cols);
  piece.value_stride = detail::row_stride(p.value, piece.cols);
  piece.beta1 = p.beta1;
  piece.beta2 = p.beta2;
  piece.epsilon = p.epsilon;
  piece.value_is_bfloat16 = p.value.defined() && p.value.dtype() == DType::kBFloat16 ? 1 : 0;
  return piece;
}

}  // namespace

AdamwBatch::AdamwBatch(std::span<const AdamwArguments> parameters, StreamRef stream) {
  auto table = std::make_shared<Table>();
  for (const AdamwArguments& p : parameters) {
    detail::require_floating(kOp, "master", p.master);
    if (table->pieces.empty()) table->dtype = p.master.dtype();
    require_tensors(p, table->dtype, stream);
    require_values(p, stream);
    AdamwPiece piece = make_piece(p);
    piece.first_chunk = table->chunks;
    table->chunks += (piece.elements + kAdamwChunk - 1) / kAdamwChunk;
    table->pieces.push_back(piece);
  }
  table->parameters.assign(parameters.begin(), parameters.end());
  if (stream.device().is_cuda()) {
    const auto bytes = std::as_bytes(std::span<const AdamwPiece>(table->pieces));
    table->device_pieces = Tensor::from_host_bytes({static_cast<std::int64_t>(bytes.size() / sizeof(std::int64_t))},
                                                   DType::kInt64, bytes.data(), bytes.size(), stream);
  }
  table_ = std::move(table);
}

void AdamwBatch::run(StreamRef stream) const {
  detail::require(table_ != nullptr, "{}: expected a list of parameters, got a default-constructed one", kOp);
  AdamwBatchArguments arguments;
  arguments.piece_count = static_cast<std::int64_t>(table_->pieces.size());
  arguments.chunks = table_->chunks;
  arguments.dtype = table_->dtype;
  if (table_->parameters.empty()) return;
  detail::require_on(kOp, "parameters", table_->parameters.front().master, stream);
  if (stream.device().is_cpu()) {
    arguments.pieces = table_->pieces.data();
    cpu::adamw(arguments);
    return;
  }
  arguments.pieces = static_cast<const AdamwPiece*>(table_->device_pieces.raw());
  cuda::adamw(arguments, stream);
  table_->device_pieces.record_use(stream);
  for (const AdamwArguments& p : table_->parameters) {
    for (const Tensor* t :
         {&p.master, &p.gradient, &p.first_moment, &p.second_moment, &p.value, &p.rates, &p.step, &p.control}) {
      t->record_use(stream);
    }
  }
}

void adamw_step(std::span<const AdamwArguments> parameters, StreamRef stream) {
  AdamwBatch(parameters, stream).run(stream);
}

}  // namespace rowan
