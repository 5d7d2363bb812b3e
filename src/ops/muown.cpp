#include "rowan/ops/muown.h"

#include <cmath>
#include <exception>
#include <map>

#include "core/check.h"
#include "ops/alias.h"
#include "ops/matrix_view.h"
#include "ops/muown_backend.h"

namespace rowan {

namespace {

using detail::require;

static_assert(kMaxRowBlocks == MuownScales::kMost);

constexpr const char* kPrepare = "muown_prepare";
constexpr const char* kFinish = "muown_finish";
constexpr const char* kInit = "muown_init";

bool is_transposed(const MuownOptions& options) { return options.layout == MatrixLayout::kInOut; }

/// Shape of the row tensors: the weight's without its input dimension.
Shape row_shape(const Tensor& weight, const MuownOptions& options) {
  std::vector<std::int64_t> extents(weight.shape().extents().begin(), weight.shape().extents().end());
  extents.erase(extents.end() - (is_transposed(options) ? 2 : 1));
  return Shape(std::span<const std::int64_t>(extents));
}

void check_options(const char* op, const MuownOptions& o, std::int64_t neurons) {
  require(o.epsilon > 0 && std::isfinite(o.epsilon), "{}: expected epsilon above 0, got {}", op, o.epsilon);
  require(std::isfinite(o.momentum), "{}: expected a finite momentum, got {}", op, o.momentum);
  require(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1, "{}: expected betas in [0, 1), got {} and {}", op,
          o.beta1, o.beta2);
  require(std::isfinite(o.update_scale), "{}: expected a finite update_scale, got {}", op, o.update_scale);
  require(o.direction != MuownDirection::kAngular || o.cold_rows == ColdRows::kWarm,
          "{}: expected warm cold_rows with the angular direction, got floor", op);
  require(o.angular_warmup >= 0, "{}: expected an angular_warmup of 0 or more, got {}", op, o.angular_warmup);
  require(std::isfinite(o.magnitude_lr), "{}: expected a finite magnitude_lr, got {}", op, o.magnitude_lr);
  require(o.row_blocks.size() <= kMaxRowBlocks, "{}: expected at most {} row blocks, got {}", op, kMaxRowBlocks,
          o.row_blocks.size());
  if (o.row_blocks.empty()) return;
  std::int64_t rows = 0;
  for (const RowBlock& block : o.row_blocks) {
    require(block.rows >= 0 && block.global_rows >= 0, "{}: expected row blocks of 0 or more rows, got {} of {}", op,
            block.rows, block.global_rows);
    rows += block.rows;
  }
  require(rows == neurons, "{}: expected row blocks of {} rows together, got {}", op, neurons, rows);
}

/// Checks weight and options; the shape of the work.
MuownShape check_weight(const char* op, const Tensor& weight, const MuownOptions& options) {
  const detail::MatrixView view = detail::matrix_view(op, "weight", weight);
  require(weight.dtype() == DType::kFloat32 || (weight.dtype() == DType::kFloat64 && weight.device().is_cpu()),
          "{}: expected weight of dtype float32 (or float64 on the CPU), got {} on {}", op, weight.dtype(),
          weight.device());
  MuownShape shape;
  shape.batches = view.batches;
  shape.transposed = is_transposed(options);
  shape.neurons = shape.transposed ? view.cols : view.rows;
  shape.inputs = shape.transposed ? view.rows : view.cols;
  shape.dtype = weight.dtype();
  check_options(op, options, shape.neurons);
  return shape;
}

/// A tensor of the weight's shape.
MuownOperand check_matrix(const char* op, const char* name, const Tensor& t, const Tensor& weight, StreamRef stream) {
  detail::require_shape(op, name, t, weight.shape());
  detail::require_on(op, name, t, stream);
  const detail::MatrixView view = detail::matrix_view(op, name, t);
  return {t.raw(), view.batch_stride, view.row_stride};
}
MuownOperand check_matrix(const char* op, const char* name, const Tensor& t, const Tensor& weight, DType dtype,
                          StreamRef stream) {
  detail::require_dtype(op, name, t, dtype);
  return check_matrix(op, name, t, weight, stream);
}

void* check_rows(const char* op, const char* name, const Tensor& t, const Shape& shape, DType dtype, StreamRef stream) {
  detail::require_shape(op, name, t, shape);
  detail::require_dtype(op, name, t, dtype);
  detail::require_contiguous(op, name, t);
  detail::require_on(op, name, t, stream);
  return t.raw();
}

DType check_update_dtype(const char* op, DType dtype, DType weight) {
  require(
      dtype == DType::kBFloat16 || dtype == DType::kFloat32 || (dtype == DType::kFloat64 && weight == DType::kFloat64),
      "{}: expected update of dtype bfloat16 or float32 (or float64 beside a float64 weight), got {}", op, dtype);
  return dtype;
}

const double* check_control(const char* op, const Tensor& control, StreamRef stream) {
  if (!control.defined()) return nullptr;
  return static_cast<const double*>(check_rows(op, "control", control, {4}, DType::kFloat64, stream));
}

double angular_scale(std::int64_t rows, std::int64_t columns, double update_scale) {
  return update_scale * std::sqrt(std::max(1.0, static_cast<double>(rows) / static_cast<double>(columns)));
}

MuownScales block_scales(const MuownOptions& options, const MuownShape& shape) {
  MuownScales scales;
  std::int64_t end = 0;
  const auto add = [&](std::int64_t rows, std::int64_t global_rows) {
    end += rows;
    scales.end[scales.count] = end;
    const std::int64_t all = global_rows == 0 ? rows : global_rows;
    scales.scale[scales.count++] = options.direction == MuownDirection::kAngular
                                       ? angular_scale(all, shape.inputs, options.update_scale)
                                       : muown_scale(all, shape.inputs, options.update_scale);
  };
  if (options.row_blocks.empty()) add(shape.neurons, 0);
  for (const RowBlock& block : options.row_blocks) add(block.rows, block.global_rows);
  return scales;
}

Tensor workspace(const MuownShape& shape, StreamRef stream) {
  const auto bytes = static_cast<std::int64_t>(cuda::muown_workspace_bytes(shape));
  return Tensor::empty({(bytes + 7) / 8}, DType::kFloat64, stream);
}

/// Everything muown_prepare refuses; what its kernels take.
MuownPrepareArguments check_prepare(const Tensor& weight, const Tensor& gradient, const MuownState& state,
                                    const MuownOptions& options, const Tensor& control, const MuownUpdate& out,
                                    StreamRef stream) {
  MuownPrepareArguments a;
  a.shape = check_weight(kPrepare, weight, options);
  const DType dtype = weight.dtype();
  const Shape rows = row_shape(weight, options);
  a.weight = check_matrix(kPrepare, "weight", weight, weight, stream);
  a.gradient = check_matrix(kPrepare, "gradient", gradient, weight, dtype, stream);
  a.momentum = check_matrix(kPrepare, "momentum", state.momentum, weight, dtype, stream);
  detail::require_contiguous(kPrepare, "momentum", state.momentum);
  a.magnitude = check_rows(kPrepare, "magnitude", state.magnitude, rows, dtype, stream);
  a.norm = check_rows(kPrepare, "norm", state.norm, rows, dtype, stream);
  detail::require_defined(kPrepare, "update", out.update);
  a.shape.update_dtype = check_update_dtype(kPrepare, out.update.dtype(), dtype);
  a.update = check_matrix(kPrepare, "update", out.update, weight, stream);
  detail::require_contiguous(kPrepare, "update", out.update);
  a.magnitude_grad = check_rows(kPrepare, "magnitude_grad", out.magnitude_grad, rows, dtype, stream);
  a.row_square_sum =
      static_cast<double*>(check_rows(kPrepare, "row_square_sum", out.row_square_sum, rows, DType::kFloat64, stream));
  a.row_max = check_rows(kPrepare, "row_max", out.row_max, rows, dtype, stream);
  if (out.direction.defined()) {
    a.direction = check_matrix(kPrepare, "direction", out.direction, weight, dtype, stream);
    detail::require_contiguous(kPrepare, "direction", out.direction);
  }
  a.control = check_control(kPrepare, control, stream);
  const Tensor* const inputs[] = {&weight, &gradient, &state.magnitude, &state.norm};
  const Tensor* const outputs[] = {&state.momentum,     &out.update,  &out.magnitude_grad,
                                   &out.row_square_sum, &out.row_max, &out.direction};
  for (const Tensor* output : outputs) {
    if (!output->defined()) continue;
    for (const Tensor* input : inputs) detail::require_apart(kPrepare, "outputs", *output, "inputs", *input);
  }
  a.quads = moves_in_quads(a.shape, a.update, size_of(a.shape.update_dtype));
  for (const MuownOperand* m : {&a.weight, &a.gradient, &a.momentum, &a.direction})
    a.quads = a.quads && moves_in_quads(a.shape, *m, size_of(dtype));
  a.mu = options.momentum;
  a.nesterov = options.nesterov;
  a.epsilon = options.epsilon;
  return a;
}

/// Everything muown_finish refuses; what its kernels take.
MuownFinishArguments check_finish(const Tensor& weight, const Tensor& gradient, const MuownState& state,
                                  const Tensor& update, const Tensor& magnitude_grad, const MuownOptions& options,
                                  const MuownStep& step, const Tensor* value, StreamRef stream) {
  MuownFinishArguments a;
  a.shape = check_weight(kFinish, weight, options);
  const DType dtype = weight.dtype();
  const Shape rows = row_shape(weight, options);
  a.warm = options.cold_rows == ColdRows::kWarm;
  a.weight = check_matrix(kFinish, "weight", weight, weight, stream);
  if (gradient.defined() || a.warm) a.gradient = check_matrix(kFinish, "gradient", gradient, weight, dtype, stream);
  detail::require_defined(kFinish, "update", update);
  a.shape.update_dtype = check_update_dtype(kFinish, update.dtype(), dtype);
  a.update = check_matrix(kFinish, "update", update, weight, stream);
  a.magnitude = check_rows(kFinish, "magnitude", state.magnitude, rows, dtype, stream);
  a.norm = check_rows(kFinish, "norm", state.norm, rows, dtype, stream);
  a.first_moment = check_rows(kFinish, "first_moment", state.first_moment, rows, dtype, stream);
  a.second_moment = check_rows(kFinish, "second_moment", state.second_moment, rows, dtype, stream);
  a.magnitude_grad = check_rows(kFinish, "magnitude_grad", magnitude_grad, rows, dtype, stream);
  a.rates = static_cast<const double*>(check_rows(kFinish, "rates", step.rates, {2}, DType::kFloat64, stream));
  a.step = static_cast<const std::int64_t*>(check_rows(kFinish, "step", step.step, {1}, DType::kInt64, stream));
  a.control = check_control(kFinish, step.control, stream);
  if (value) {
    detail::require_defined(kFinish, "value", *value);
    a.value_dtype = value->dtype();
    require(a.value_dtype == DType::kBFloat16 || a.value_dtype == DType::kFloat16 || a.value_dtype == DType::kFloat32,
            "{}: expected value of dtype bfloat16, float16 or float32, got {}", kFinish, a.value_dtype);
    a.value = check_matrix(kFinish, "value", *value, weight, stream);
    detail::require_apart(kFinish, "value", *value, "weight", weight);
  }
  const Tensor* const inputs[] = {&gradient, &update, &magnitude_grad, &step.rates, &step.step, &step.control};
  const Tensor* const outputs[] = {&weight, &state.magnitude, &state.norm, &state.first_moment, &state.second_moment,
                                   value};
  for (const Tensor* output : outputs) {
    if (!output) continue;
    for (const Tensor* input : inputs) {
      if (input->defined()) detail::require_apart(kFinish, "outputs", *output, "inputs", *input);
    }
  }
  a.quads = moves_in_quads(a.shape, a.weight, size_of(dtype)) &&
            moves_in_quads(a.shape, a.update, size_of(a.shape.update_dtype));
  a.value_quads = moves_in_quads(a.shape, a.value, size_of(a.value_dtype));
  a.beta1 = options.beta1;
  a.beta2 = options.beta2;
  a.epsilon = options.epsilon;
  a.magnitude_lr = options.magnitude_lr;
  a.angular = options.direction == MuownDirection::kAngular;
  a.angular_warmup = options.angular_warmup;
  a.scales = block_scales(options, a.shape);
  return a;
}

void record_use(std::initializer_list<const Tensor*> tensors, StreamRef stream) {
  for (const Tensor* t : tensors) {
    if (t && t->defined()) t->record_use(stream);
  }
}
void record_prepare(const Tensor& weight, const Tensor& gradient, const MuownState& state, const Tensor& control,
                    const MuownUpdate& out, StreamRef stream) {
  record_use({&weight, &gradient, &state.magnitude, &state.norm, &state.momentum, &out.update, &out.magnitude_grad,
              &out.row_square_sum, &out.row_max, &out.direction, &control},
             stream);
}
void record_finish(const Tensor& weight, const Tensor& gradient, const MuownState& state, const Tensor& update,
                   const Tensor& magnitude_grad, const MuownStep& step, const Tensor* value, StreamRef stream) {
  record_use({&weight, &gradient, &state.magnitude, &state.norm, &state.first_moment, &state.second_moment, &update,
              &magnitude_grad, &step.rates, &step.step, &step.control, value},
             stream);
}

void run_prepare(const MuownPrepareArguments& a, StreamRef stream) {
  if (a.shape.rows() == 0) return;
  if (stream.device().is_cuda()) {
    cuda::muown_prepare(a, workspace(a.shape, stream).raw(), stream);
  } else {
    cpu::muown_prepare(a);
  }
}
void run_finish(const MuownFinishArguments& a, StreamRef stream) {
  if (a.shape.rows() == 0) return;
  if (stream.device().is_cuda()) {
    cuda::muown_finish(a, workspace(a.shape, stream).raw(), stream);
  } else {
    cpu::muown_finish(a);
  }
}

/// Matrices of one launch, with their table on the device.
template <class Arguments>
class SharedLaunch {
 public:
  void add(Arguments a) {
    a.first_block = static_cast<std::int64_t>(matrix_of_block_.size());
    matrix_of_block_.insert(matrix_of_block_.end(), static_cast<std::size_t>(cuda::muown_row_blocks(a.shape)),
                            static_cast<std::int32_t>(matrices_.size()));
    matrices_.push_back(a);
  }
  void to_device(StreamRef stream) {
    constexpr std::size_t kWord = sizeof(std::int64_t);
    static_assert(sizeof(Arguments) % kWord == 0);
    const auto bytes = matrices_.size() * sizeof(Arguments);
    device_matrices_ = Tensor::from_host_bytes({static_cast<std::int64_t>(bytes / kWord)}, DType::kInt64,
                                               matrices_.data(), bytes, stream);
    device_matrix_of_block_ =
        Tensor::from_host({static_cast<std::int64_t>(matrix_of_block_.size())}, matrix_of_block_, stream);
  }
  MuownTable<Arguments> table() const {
    return {static_cast<const Arguments*>(device_matrices_.raw()), device_matrix_of_block_.data<std::int32_t>(),
            static_cast<std::int64_t>(matrix_of_block_.size())};
  }
  void record_use(StreamRef stream) const {
    device_matrices_.record_use(stream);
    device_matrix_of_block_.record_use(stream);
  }

 private:
  std::vector<Arguments> matrices_;
  std::vector<std::int32_t> matrix_of_block_;
  Tensor device_matrices_, device_matrix_of_block_;
};

}  // namespace

MuownSupport muown_supported(const Tensor& weight, const MuownOptions& options) {
  try {
    check_weight("muown", weight, options);
    return {true, ""};
  } catch (const Error& error) {
    return {false, error.what()};
  }
}

double muown_scale(std::int64_t global_rows, std::int64_t columns, double update_scale) {
  return update_scale * 0.2 * std::sqrt(static_cast<double>(std::max(global_rows, columns)));
}

MuownState muown_init(const Tensor& weight, const MuownOptions& options, StreamRef stream) {
  MuownInitArguments a;
  a.shape = check_weight(kInit, weight, options);
  a.weight = check_matrix(kInit, "weight", weight, weight, stream);
  a.epsilon = options.epsilon;
  a.warm = options.cold_rows == ColdRows::kWarm;
  a.angular = options.direction == MuownDirection::kAngular;
  const Shape rows = row_shape(weight, options);
  MuownState state;
  state.magnitude = Tensor::empty(rows, weight.dtype(), stream);
  state.norm = Tensor::empty(rows, weight.dtype(), stream);
  state.momentum = Tensor::zeros(weight.shape(), weight.dtype(), stream);
  state.first_moment = Tensor::zeros(rows, weight.dtype(), stream);
  state.second_moment = Tensor::zeros(rows, weight.dtype(), stream);
  a.magnitude = state.magnitude.raw();
  a.norm = state.norm.raw();
  if (a.shape.rows() == 0) return state;
  if (stream.device().is_cuda()) {
    cuda::muown_init(a, workspace(a.shape, stream).raw(), stream);
  } else {
    cpu::muown_init(a);
  }
  weight.record_use(stream);
  return state;
}

MuownUpdate muown_empty_update(const Tensor& weight, const MuownOptions& options, DType dtype, StreamRef stream) {
  check_weight(kPrepare, weight, options);
  check_update_dtype(kPrepare, dtype, weight.dtype());
  const Shape rows = row_shape(weight, options);
  MuownUpdate out;
  out.update = Tensor::empty(weight.shape(), dtype, stream);
  out.magnitude_grad = Tensor::empty(rows, weight.dtype(), stream);
  out.row_square_sum = Tensor::empty(rows, DType::kFloat64, stream);
  out.row_max = Tensor::empty(rows, weight.dtype(), stream);
  return out;
}

void muown_prepare(const Tensor& weight, const Tensor& gradient, MuownState& state, const MuownOptions& options,
                   const Tensor& control, MuownUpdate& out, StreamRef stream) {
  const MuownPrepareArguments a = check_prepare(weight, gradient, state, options, control, out, stream);
  if (a.shape.rows() == 0) return;
  run_prepare(a, stream);
  record_prepare(weight, gradient, state, control, out, stream);
}

void muown_finish(Tensor& weight, const Tensor& gradient, MuownState& state, const Tensor& update,
                  const Tensor& magnitude_grad, const MuownOptions& options, const MuownStep& step, Tensor* value,
                  StreamRef stream) {
  const MuownFinishArguments a =
      check_finish(weight, gradient, state, update, magnitude_grad, options, step, value, stream);
  if (a.shape.rows() == 0) return;
  run_finish(a, stream);
  record_finish(weight, gradient, state, update, magnitude_grad, step, value, stream);
}

struct MuownBatch::Table {
  std::vector<MuownItem> items;
  // One by one: all of them on the CPU, on CUDA those in kInOut layout.
  std::vector<MuownPrepareArguments> prepares;
  std::vector<MuownFinishArguments> finishes;
  // On CUDA the others.
  std::map<cuda::MuownRowKind, SharedLaunch<MuownPrepareArguments>> prepare_launches;
  std::map<cuda::MuownRowKind, SharedLaunch<MuownFinishArguments>> finish_launches;
};

MuownBatch::MuownBatch(std::span<const MuownItem> items, StreamRef stream) {
  auto table = std::make_shared<Table>();
  table->items.assign(items.begin(), items.end());
  for (const MuownItem& item : table->items) {
    const MuownPrepareArguments prepare =
        check_prepare(item.weight, item.gradient, item.state, item.options, item.step.control, item.update, stream);
    const MuownFinishArguments finish =
        check_finish(item.weight, item.gradient, item.state, item.orthogonal, item.update.magnitude_grad, item.options,
                     item.step, item.value.defined() ? &item.value : nullptr, stream);
    if (prepare.shape.rows() == 0) continue;
    if (stream.device().is_cpu() || prepare.shape.transposed) {
      table->prepares.push_back(prepare);
      table->finishes.push_back(finish);
    } else {
      table->prepare_launches[cuda::muown_row_kind(prepare.shape)].add(prepare);
      table->finish_launches[cuda::muown_row_kind(finish.shape)].add(finish);
    }
  }
  for (auto& [kind, launch] : table->prepare_launches) launch.to_device(stream);
  for (auto& [kind, launch] : table->finish_launches) launch.to_device(stream);
  table_ = std::move(table);
}

void MuownBatch::prepare(StreamRef stream) const {
  require(table_ != nullptr, "{}: expected a list of matrices, got a default-constructed one", kPrepare);
  for (const auto& [kind, launch] : table_->prepare_launches) {
    cuda::muown_prepare(kind, launch.table(), stream);
    launch.record_use(stream);
  }
  for (const MuownPrepareArguments& a : table_->prepares) run_prepare(a, stream);
  for (const MuownItem& i : table_->items)
    record_prepare(i.weight, i.gradient, i.state, i.step.control, i.update, stream);
}

void MuownBatch::finish(StreamRef stream) const {
  require(table_ != nullptr, "{}: expected a list of matrices, got a default-constructed one", kFinish);
  for (const auto& [kind, launch] : table_->finish_launches) {
    cuda::muown_finish(kind, launch.table(), stream);
    launch.record_use(stream);
  }
  for (const MuownFinishArguments& a : table_->finishes) run_finish(a, stream);
  for (const MuownItem& i : table_->items)
    record_finish(i.weight, i.gradient, i.state, i.orthogonal, i.update.magnitude_grad, i.step, &i.value, stream);
}

}  // namespace rowan
