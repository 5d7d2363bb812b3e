#include "rowan/nn/lora_linear.h"

#include <cmath>
#include <utility>

#include "core/check.h"
#include "nn/host_values.h"
#include "ops/alias.h"
#include "rowan/ops/elementwise.h"
#include "rowan/ops/gemm.h"
#include "rowan/ops/lora.h"

namespace rowan {

using detail::require;
using Place = LoraConfig::DropoutPlace;

namespace {

constexpr const char* kOp = "LoraLinear";
constexpr std::int64_t kRankStep = 16, kBorderStep = 64;

std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }
DType master_dtype(DType dtype) { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

void check_config(const LinearPart& part) {
  require(part.out_features >= 1, "{}: expected {} to have at least one output, got {}", kOp, part.name,
          part.out_features);
  if (!part.lora) return;
  const LoraConfig& lora = *part.lora;
  require(lora.rank >= 1, "{}: expected a rank of at least 1 for {}, got {}", kOp, part.name, lora.rank);
  require(std::isfinite(lora.alpha), "{}: expected alpha to be set for {}, got {}", kOp, part.name, lora.alpha);
  require(lora.dropout >= 0 && lora.dropout <= 1, "{}: expected dropout in [0, 1] for {}, got {}", kOp, part.name,
          lora.dropout);
}

}  // namespace

double LoraConfig::scale() const {
  const auto r = static_cast<double>(rank);
  return alpha / (use_rslora ? std::sqrt(r) : r);
}

LoraLinear::LoraLinear(std::int64_t in_features, std::vector<LinearPart> parts, DType dtype, bool train_weight,
                       StreamRef stream)
    : in_features_(in_features), parts_(std::move(parts)), dtype_(dtype), train_weight_(train_weight) {
  require(in_features >= 1, "{}: expected at least one input, got {}", kOp, in_features);
  require(!parts_.empty(), "{}: expected at least one part, got none", kOp);
  require(is_floating(dtype), "{}: expected a floating dtype, got {}", kOp, dtype);
  if (stream.device().is_cuda() && dtype == DType::kFloat64) {
    detail::fail(ErrorKind::kUnsupported, "{}: expected float32, bfloat16 or float16 on CUDA, got float64", kOp);
  }
  bool first = true;
  for (const LinearPart& part : parts_) {
    check_config(part);
    Part& state = state_.emplace_back();
    state.row = out_features_;
    out_features_ += part.out_features;
    has_bias_ = has_bias_ || part.bias;
    if (!part.lora) continue;
    Adapter& adapter = state.adapter.emplace(Adapter{});
    adapter.column = columns_;
    adapter.padded_rank = round_up(part.lora->rank, kRankStep);
    adapter.scale = part.lora->scale();
    columns_ += adapter.padded_rank;
    common_scale_ = first || adapter.scale == common_scale_ ? adapter.scale : std::numeric_limits<double>::quiet_NaN();
    first = false;
  }

  const DType wide = master_dtype(dtype);
  const std::int64_t border = round_up(columns_, kBorderStep);
  buffer_ = Tensor::zeros({out_features_ + border, round_up(in_features + border, kBorderStep)}, dtype, stream)
                .slice(0, 0, out_features_ + columns_)
                .slice(1, 0, in_features + columns_);
  if (has_bias_) bias_ = Tensor::zeros({out_features_}, dtype, stream);
  if (train_weight) {
    const Shape shape{out_features_, in_features};
    weight_grad_ = Tensor::zeros(shape, wide, stream);
    weight_master_ = wide == dtype ? buffer_.slice(0, 0, out_features_).slice(1, 0, in_features)
                                   : Tensor::zeros(shape, wide, stream);
    if (has_bias_) {
      bias_grad_ = Tensor::zeros({out_features_}, wide, stream);
      bias_master_ = wide == dtype ? bias_ : Tensor::zeros({out_features_}, wide, stream);
    }
  }
  if (columns_ == 0) return;
  a_grad_ = Tensor::zeros({columns_, in_features}, wide, stream);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (!state_[i].adapter) continue;
    Adapter& adapter = *state_[i].adapter;
    const std::int64_t rank = parts_[i].lora->rank, row = out_features_ + adapter.column,
                       column = in_features + adapter.column;
    adapter.a = buffer_.slice(0, row, row + rank).slice(1, 0, in_features);
    adapter.b = buffer_.slice(0, state_[i].row, state_[i].row + parts_[i].out_features).slice(1, column, column + rank);
    adapter.a_grad = a_grad_.slice(0, adapter.column, adapter.column + rank);
    adapter.b_grad = Tensor::zeros(adapter.b.shape(), wide, stream);
    adapter.a_master = wide == dtype ? adapter.a : Tensor::zeros(adapter.a.shape(), wide, stream);
    adapter.b_master = wide == dtype ? adapter.b : Tensor::zeros(adapter.b.shape(), wide, stream);
  }
}

bool LoraLinear::drops(Place place) const {
  for (const LinearPart& part : parts_) {
    if (part.lora && part.lora->dropout > 0 && part.lora->dropout_place == place) return true;
  }
  return false;
}

DropoutMask LoraLinear::mask(std::size_t part, const std::optional<DropoutKey>& key) const {
  if (!key) return {};
  // Parts draw different masks, as separate layers do in PEFT.
  const std::uint64_t seed = key->seed ^ (0x9E3779B97F4A7C15u * static_cast<std::uint64_t>(part));
  return {parts_[part].lora->dropout, seed, key->offset, key->counter};
}

void LoraLinear::check_forward(const Tensor& x, const Tensor& y, StreamRef stream,
                               const std::optional<DropoutKey>& dropout, const Tensor* addend) const {
  detail::require_rank(kOp, "x", x, 2);
  detail::require_shape(kOp, "x", x, {x.size(0), in_features_});
  detail::require_shape(kOp, "y", y, {x.size(0), out_features_});
  const std::pair<const char*, const Tensor*> all[] = {{"x", &x}, {"y", &y}};
  for (const auto& [name, tensor] : all) {
    detail::require_dtype(kOp, name, *tensor, dtype_);
    detail::require_on(kOp, name, *tensor, stream);
    detail::require_unit_columns(kOp, name, *tensor);
  }
  detail::require_on(kOp, "the weight", buffer_, stream);
  detail::require_apart(kOp, "y", y, "x", x.slack() >= columns_ ? x.with_slack(columns_) : x);
  if (addend) {
    detail::require_shape(kOp, "addend", *addend, y.shape());
    detail::require_dtype(kOp, "addend", *addend, dtype_);
    detail::require_on(kOp, "addend", *addend, stream);
    detail::require_unit_columns(kOp, "addend", *addend);
    detail::require_apart(kOp, "y", y, "addend", *addend);
  }
  if (!dropout || !dropout->counter.defined()) return;
  detail::require_shape(kOp, "the dropout counter", dropout->counter, {1});
  detail::require_dtype(kOp, "the dropout counter", dropout->counter, DType::kInt64);
  detail::require_on(kOp, "the dropout counter", dropout->counter, stream);
}

/// s = scale (x A^T) of every part, dropped or not.
void LoraLinear::shrink_input(const Tensor& x, const LoraLinearContext& context, Tensor& s, bool input_dropped,
                              StreamRef stream) const {
  if (!input_dropped && !std::isnan(common_scale_)) {
    const Tensor a = buffer_.slice(0, out_features_, out_features_ + columns_).slice(1, 0, in_features_);
    return lora_shrink(x, a, common_scale_, s, stream);
  }
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (!state_[i].adapter) continue;
    const Adapter& adapter = *state_[i].adapter;
    Tensor columns = s.slice(1, adapter.column, adapter.column + adapter.padded_rank);
    const bool masked = input_dropped && parts_[i].lora->dropout_place == Place::kInput;
    const DropoutMask drawn = mask(i, context.dropout);
    lora_shrink(x, adapter.a, adapter.scale, columns, stream, masked ? &drawn : nullptr);
  }
}

void LoraLinear::forward(const Tensor& x, Tensor& y, LoraLinearContext& context, StreamRef stream,
                         const std::optional<DropoutKey>& dropout, const Tensor* addend) const {
  check_forward(x, y, stream, dropout, addend);
  const bool adapted = enabled_ && columns_ > 0;
  LoraLinearContext fresh;
  fresh.x = x;
  if (adapted && (drops(Place::kInput) || drops(Place::kOutput))) fresh.dropout = dropout;
  // Where the context was on this x, the spare columns are free again. x and dropout may have been its own.
  context = LoraLinearContext();
  if (adapted && fresh.x.slack() >= columns_) fresh.slack_claim = fresh.x.claim_slack();
  const bool spare = fresh.slack_claim != nullptr;
  if (adapted) {
    fresh.s = spare ? fresh.x.slack_view(columns_) : Tensor::empty({fresh.x.size(0), columns_}, dtype_, stream);
    shrink_input(fresh.x, fresh, fresh.s, fresh.dropout && drops(Place::kInput), stream);
  }

  if (has_bias_) broadcast_row(bias_, y, stream);
  const bool fused_addend = addend && !has_bias_ && (y.size(0) <= 1 || addend->stride(0) == y.stride(0));
  const GemmOptions options{.beta = has_bias_ || fused_addend ? 1.0 : 0.0, .addend = fused_addend ? addend : nullptr};
  const Tensor rows = buffer_.slice(0, 0, out_features_);
  const bool output_dropped = fresh.dropout && drops(Place::kOutput);
  if (adapted && spare && !output_dropped) {
    gemm(fresh.x.with_slack(columns_), rows.transpose(0, 1), y, stream, options);
  } else {
    gemm(fresh.x, rows.slice(1, 0, in_features_).transpose(0, 1), y, stream, options);
    if (adapted && !output_dropped) {
      lora_expand(fresh.s, rows.slice(1, in_features_, in_features_ + columns_).transpose(0, 1), y, 1, stream);
    } else if (adapted) {
      for (std::size_t i = 0; i < parts_.size(); ++i) {
        if (!state_[i].adapter) continue;
        const Adapter& adapter = *state_[i].adapter;
        Tensor part = y.slice(1, state_[i].row, state_[i].row + parts_[i].out_features);
        const DropoutMask drawn = mask(i, fresh.dropout);
        lora_expand(fresh.s.slice(1, adapter.column, adapter.column + adapter.a.size(0)), adapter.b.transpose(0, 1),
                    part, 1, stream, parts_[i].lora->dropout_place == Place::kOutput ? &drawn : nullptr);
      }
    }
  }
  if (addend && !fused_addend) add(*addend, y, y, stream);
  context = std::move(fresh);
}

void LoraLinear::check_backward(const Tensor& dy, const LoraLinearContext& context, const Tensor* dx, StreamRef stream,
                                double dx_beta) const {
  require(context.x.defined(), "{}: expected a context that forward has filled, got an empty one", kOp);
  const std::int64_t rows = context.x.size(0);
  require(
      context.x.size(1) == in_features_ && (!context.s.defined() || context.s.shape() == Shape{rows, columns_}),
      "{}: expected the context of a layer with {} inputs and {} adapter columns, got x of shape {} and S of shape {}",
      kOp, in_features_, columns_, context.x.shape(), context.s.shape());
  detail::require_shape(kOp, "dy", dy, {rows, out_features_});
  detail::require_dtype(kOp, "dy", dy, dtype_);
  detail::require_on(kOp, "dy", dy, stream);
  detail::require_unit_columns(kOp, "dy", dy);
  const Tensor dy_written = dy.slack() >= columns_ ? dy.with_slack(columns_) : dy;
  const Tensor x_saved =
      context.s.defined() && context.x.slack() >= columns_ ? context.x.with_slack(columns_) : context.x;
  detail::require_apart(kOp, "dy", dy_written, "the saved x", x_saved);
  require(std::isfinite(dx_beta), "{}: expected a finite dx_beta, got {}", kOp, dx_beta);
  if (!dx) return;
  detail::require_shape(kOp, "dx", *dx, context.x.shape());
  detail::require_dtype(kOp, "dx", *dx, dtype_);
  detail::require_on(kOp, "dx", *dx, stream);
  detail::require_unit_columns(kOp, "dx", *dx);
  detail::require_apart(kOp, "dx", *dx, "dy", dy_written);
  detail::require_apart(kOp, "dx", *dx, "the saved x", x_saved);
}

void LoraLinear::add_weight_gradients(const Tensor& dy, const Tensor& x, StreamRef stream) const {
  Tensor weight_grad = weight_grad_;
  gemm(dy.transpose(0, 1), x, weight_grad, stream, {.beta = 1});
  if (!has_bias_) return;
  Tensor bias_grad = bias_grad_;
  sum_rows(dy, bias_grad, stream, 1);
}

void LoraLinear::add_b_gradients(const Tensor& dy, Tensor& ds, const LoraLinearContext& context,
                                 StreamRef stream) const {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (!state_[i].adapter) continue;
    const Adapter& adapter = *state_[i].adapter;
    const std::int64_t begin = adapter.column, end = begin + adapter.a.size(0);
    Tensor columns = ds.slice(1, begin, begin + adapter.padded_rank), b_grad = adapter.b_grad.transpose(0, 1);
    const DropoutMask drawn = mask(i, context.dropout);
    const bool behind = context.dropout && parts_[i].lora->dropout_place == Place::kOutput;
    lora_shrink_reduce(dy.slice(1, state_[i].row, state_[i].row + parts_[i].out_features), adapter.b.transpose(0, 1),
                       adapter.scale, columns, context.s.slice(1, begin, end), b_grad, 1, stream,
                       behind ? &drawn : nullptr);
  }
}

void LoraLinear::add_a_gradients(const Tensor& ds, const LoraLinearContext& context, StreamRef stream) const {
  if (!context.dropout || !drops(Place::kInput)) {
    Tensor a_grad = a_grad_;
    return lora_reduce(ds, context.x, a_grad, 1, stream);
  }
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (!state_[i].adapter) continue;
    const Adapter& adapter = *state_[i].adapter;
    const std::int64_t begin = adapter.column, end = begin + adapter.a.size(0);
    const DropoutMask drawn = mask(i, context.dropout);
    Tensor a_grad = adapter.a_grad;
    lora_reduce(ds.slice(1, begin, end), context.x, a_grad, 1, stream,
                parts_[i].lora->dropout_place == Place::kInput ? &drawn : nullptr);
  }
}

void LoraLinear::backward(const Tensor& dy, const LoraLinearContext& context, Tensor* dx, StreamRef stream,
                          double dx_beta) const {
  check_backward(dy, context, dx, stream, dx_beta);
  const bool adapted = context.s.defined();
  const std::shared_ptr<void> claim = adapted && dy.slack() >= columns_ ? dy.claim_slack() : nullptr;
  const bool spare = claim != nullptr;
  Tensor ds;
  if (adapted) {
    ds = spare ? dy.slack_view(columns_) : Tensor::empty({dy.size(0), columns_}, dtype_, stream);
    add_b_gradients(dy, ds, context, stream);
    add_a_gradients(ds, context, stream);
  }
  if (train_weight_) add_weight_gradients(dy, context.x, stream);
  if (!dx) return;

  const Tensor columns = buffer_.slice(1, 0, in_features_);
  const bool input_dropped = context.dropout && drops(Place::kInput);
  if (adapted && spare && !input_dropped) {
    gemm(dy.with_slack(columns_), columns, *dx, stream, {.beta = dx_beta});
    return;
  }
  gemm(dy, columns.slice(0, 0, out_features_), *dx, stream, {.beta = dx_beta});
  if (adapted && !input_dropped) {
    lora_expand(ds, columns.slice(0, out_features_, out_features_ + columns_), *dx, 1, stream);
  } else if (adapted) {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      if (!state_[i].adapter) continue;
      const Adapter& adapter = *state_[i].adapter;
      const DropoutMask drawn = mask(i, context.dropout);
      lora_expand(ds.slice(1, adapter.column, adapter.column + adapter.a.size(0)), adapter.a, *dx, 1, stream,
                  parts_[i].lora->dropout_place == Place::kInput ? &drawn : nullptr);
    }
  }
}

std::vector<Parameter> LoraLinear::parameters() const {
  std::vector<Parameter> all;
  const auto append = [&](const std::string& name, Parameter::Role role, const Tensor& value, const Tensor& master,
                          const Tensor& grad) {
    Parameter& p = all.emplace_back();
    p.name = name;
    p.role = role;
    p.value = value;
    p.master = master;
    p.grad = grad;
    p.trainable = grad.defined();
  };
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    const LinearPart& part = parts_[i];
    const auto rows = [&](const Tensor& t) {
      return t.defined() ? t.slice(0, state_[i].row, state_[i].row + part.out_features) : Tensor();
    };
    append(part.name + ".weight", Parameter::Role::kMatrix, rows(buffer_.slice(1, 0, in_features_)),
           rows(weight_master_), rows(weight_grad_));
    if (part.bias)
      append(part.name + ".bias", Parameter::Role::kBias, rows(bias_), rows(bias_master_), rows(bias_grad_));
    if (!state_[i].adapter) continue;
    const Adapter& adapter = *state_[i].adapter;
    append(part.name + ".lora_A.weight", Parameter::Role::kLoraA, adapter.a, adapter.a_master, adapter.a_grad);
    append(part.name + ".lora_B.weight", Parameter::Role::kLoraB, adapter.b, adapter.b_master, adapter.b_grad);
  }
  return all;
}

void LoraLinear::init_adapter(Rng& rng, StreamRef stream) const {
  const double bound = 1 / std::sqrt(static_cast<double>(in_features_));
  for (const Part& part : state_) {
    if (!part.adapter) continue;
    const Adapter& adapter = *part.adapter;
    std::vector<double> values(static_cast<std::size_t>(adapter.a.elements()));
    for (double& value : values) value = bound * (2 * rng.uniform() - 1);
    detail::write_values_to(adapter.a_master, values, stream);
    detail::write_values_to(adapter.a, values, stream);
    adapter.b_master.zero(stream);
    adapter.b.zero(stream);
  }
}

void LoraLinear::merge(StreamRef stream) const {
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    if (!state_[i].adapter) continue;
    const Adapter& adapter = *state_[i].adapter;
    const auto rows = [&](const Tensor& t) {
      return t.slice(0, state_[i].row, state_[i].row + parts_[i].out_features);
    };
    const DType wide = master_dtype(dtype_);
    Tensor weight = rows(buffer_.slice(1, 0, in_features_)), sum = weight;
    if (weight_master_.defined()) {
      sum = rows(weight_master_);
    } else if (dtype_ != wide) {
      sum = Tensor::empty(weight.shape(), wide, stream);
      cast(weight, sum, stream);
    }
    gemm(adapter.b_master, adapter.a_master, sum, stream, {.alpha = adapter.scale, .beta = 1});
    if (dtype_ != wide) cast(sum, weight, stream);
    adapter.b_master.zero(stream);
    adapter.b.zero(stream);
  }
}

}  // namespace rowan
