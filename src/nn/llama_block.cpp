#include "nn/llama_block.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "nn/host_values.h"
#include "rowan/ops/attention.h"
#include "rowan/ops/attention_cached.h"
#include "rowan/ops/elementwise.h"
#include "rowan/ops/rms_norm.h"
#include "rowan/ops/swiglu.h"

namespace rowan::detail {

void assign(const Parameter& parameter, const std::vector<double>& values, StreamRef stream) {
  write_values_to(parameter.value, values, stream);
  if (parameter.has_own_master()) write_values_to(parameter.master, values, stream);
}

DenseWeight::DenseWeight(const std::string& name, const Shape& shape, Parameter::Role role, DType dtype, bool trainable,
                         StreamRef stream) {
  parameter.name = name;
  parameter.role = role;
  parameter.value = Tensor::empty(shape, dtype, stream);
  parameter.trainable = trainable;
  if (!trainable) return;
  const DType master = statistics_dtype(dtype);
  parameter.master = master == dtype ? parameter.value : Tensor::zeros(shape, master, stream);
  parameter.grad = Tensor::zeros(shape, master, stream);
}

namespace {

LinearPart part(const LlamaOptions& options, const std::string& module, std::int64_t out_features, bool bias) {
  LinearPart p;
  p.name = module;
  p.out_features = out_features;
  p.bias = bias;
  if (options.lora) p.lora = options.lora(module);
  return p;
}

}  // namespace

LlamaBlock::LlamaBlock(const ModelConfig& config, const LlamaOptions& options, const std::string& name,
                       StreamRef stream)
    : config_(config),
      dtype_(options.dtype),
      dropout_seed_(options.seed),
      input_norm_(name + ".input_layernorm.weight", Shape{config.hidden_size}, Parameter::Role::kNorm, options.dtype,
                  options.train_base, stream),
      mid_norm_(name + ".post_attention_layernorm.weight", Shape{config.hidden_size}, Parameter::Role::kNorm,
                options.dtype, options.train_base, stream),
      qkv_proj_(
          config.hidden_size,
          {part(options, name + ".self_attn.q_proj", config.num_attention_heads * config.head_dim, config.qkv_bias),
           part(options, name + ".self_attn.k_proj", config.num_key_value_heads * config.head_dim, config.qkv_bias),
           part(options, name + ".self_attn.v_proj", config.num_key_value_heads * config.head_dim, config.qkv_bias)},
          options.dtype, options.train_base, stream),
      o_proj_(config.num_attention_heads * config.head_dim,
              {part(options, name + ".self_attn.o_proj", config.hidden_size, false)}, options.dtype, options.train_base,
              stream),
      gate_up_proj_(config.hidden_size,
                    {part(options, name + ".mlp.gate_proj", config.intermediate_size, false),
                     part(options, name + ".mlp.up_proj", config.intermediate_size, false)},
                    options.dtype, options.train_base, stream),
      down_proj_(config.intermediate_size, {part(options, name + ".mlp.down_proj", config.hidden_size, false)},
                 options.dtype, options.train_base, stream) {
  if (!config.qk_norm) return;
  const Shape head{config.head_dim};
  q_norm_ = DenseWeight(name + ".self_attn.q_norm.weight", head, Parameter::Role::kNorm, options.dtype,
                        options.train_base, stream);
  k_norm_ = DenseWeight(name + ".self_attn.k_norm.weight", head, Parameter::Role::kNorm, options.dtype,
                        options.train_base, stream);
}

LlamaBlock::Heads LlamaBlock::heads_of(const Tensor& qkv) const {
  const std::int64_t tokens = qkv.size(0), d = config_.head_dim, q = config_.num_attention_heads,
                     kv = config_.num_key_value_heads;
  const auto heads = [&](std::int64_t first, std::int64_t count) {
    return qkv.slice(1, first * d, (first + count) * d).reshape({tokens, count, d});
  };
  const bool with_v = qkv.size(1) == (q + 2 * kv) * d;
  return {heads(0, q), heads(q, kv), with_v ? heads(q + kv, kv) : Tensor()};
}

Tensor LlamaBlock::rotated_heads(const Tensor& qkv) const {
  const std::int64_t d = config_.head_dim, heads = config_.num_attention_heads + config_.num_key_value_heads;
  return qkv.slice(1, 0, heads * d).reshape({qkv.size(0), heads, d});
}

LlamaBlock::Heads LlamaBlock::attention_inputs(const Saved& saved) const {
  Heads heads = heads_of(saved.qkv);
  if (!config_.qk_norm) return heads;
  const Heads normalised = heads_of(saved.qk);
  return {normalised.q, normalised.k, heads.v};
}

void LlamaBlock::attend(const Heads& heads, const TokenBatch& batch, const Cache* cache, Tensor& out, Tensor& lse,
                        StreamRef stream) const {
  const double scale = 1.0 / std::sqrt(static_cast<double>(config_.head_dim));
  std::int64_t all = 0;
  if (cache != nullptr) {
    all = cache->length + heads.k.size(0);
    cache->k.slice(0, cache->length, all).copy_from(heads.k, stream);
    cache->v.slice(0, cache->length, all).copy_from(heads.v, stream);
  }
  if (cache == nullptr || cache->length == 0) {
    attention_forward(heads.q, heads.k, heads.v, batch.sequences, scale, out, lse, stream);
  } else {
    attention_cached(heads.q, cache->k.slice(0, 0, all), cache->v.slice(0, 0, all), scale, out, stream);
  }
}

Tensor LlamaBlock::forward(const Tensor& x, const TokenBatch& batch, const Tensor& rotary, bool training,
                           std::uint64_t dropout_offset, Saved& saved, StreamRef stream, const Cache* cache) {
  const std::int64_t tokens = x.size(0), hidden = config_.hidden_size, d = config_.head_dim;
  const std::int64_t q_heads = config_.num_attention_heads, kv_heads = config_.num_key_value_heads;
  const DType statistics = statistics_dtype(dtype_);
  const auto linear = [&](LoraLinear& layer, std::uint64_t index, const Tensor& input, Tensor& output,
                          LoraLinearContext& context, const Tensor* residual = nullptr) {
    std::optional<DropoutKey> dropout;
    if (training) dropout = DropoutKey{dropout_seed_, dropout_offset + index};
    layer.forward(input, output, context, stream, dropout, residual);
  };

  saved.x = x;
  saved.rstd_in = Tensor::empty({tokens}, statistics, stream);
  Tensor normed = Tensor::empty_with_slack({tokens, hidden}, qkv_proj_.slack_columns(), dtype_, stream);
  rms_norm_forward(x, input_norm_.value(), config_.rms_norm_eps, normed, saved.rstd_in, stream);

  saved.qkv = Tensor::empty({tokens, (q_heads + 2 * kv_heads) * d}, dtype_, stream);
  linear(qkv_proj_, 0, normed, saved.qkv, saved.qkv_proj);
  if (config_.qk_norm) {
    saved.qk = Tensor::empty({tokens, (q_heads + kv_heads) * d}, dtype_, stream);
    saved.rstd_q = Tensor::empty({tokens, q_heads}, statistics, stream);
    saved.rstd_k = Tensor::empty({tokens, kv_heads}, statistics, stream);
    const Heads raw = heads_of(saved.qkv);
    Heads normalised = heads_of(saved.qk);
    rms_norm_forward(raw.q, q_norm_.value(), config_.rms_norm_eps, normalised.q, saved.rstd_q, stream);
    rms_norm_forward(raw.k, k_norm_.value(), config_.rms_norm_eps, normalised.k, saved.rstd_k, stream);
  }
  Tensor queries_and_keys = rotated_heads(config_.qk_norm ? saved.qk : saved.qkv);
  rotary_apply(queries_and_keys, batch.positions, rotary, stream);
  const Heads heads = attention_inputs(saved);

  Tensor attended = Tensor::empty_with_slack({tokens, q_heads * d}, o_proj_.slack_columns(), dtype_, stream);
  Tensor attended_heads = attended.reshape({tokens, q_heads, d});
  saved.lse = Tensor::empty({q_heads, tokens}, statistics, stream);
  attend(heads, batch, cache, attended_heads, saved.lse, stream);

  Tensor mid = Tensor::empty({tokens, hidden}, dtype_, stream);
  linear(o_proj_, 1, attended, mid, saved.o_proj, &x);
  saved.x_mid = mid;

  saved.rstd_mid = Tensor::empty({tokens}, statistics, stream);
  Tensor normed_mid = Tensor::empty_with_slack({tokens, hidden}, gate_up_proj_.slack_columns(), dtype_, stream);
  rms_norm_forward(mid, mid_norm_.value(), config_.rms_norm_eps, normed_mid, saved.rstd_mid, stream);

  const std::int64_t width = config_.intermediate_size;
  saved.gate_up = Tensor::empty({tokens, 2 * width}, dtype_, stream);
  linear(gate_up_proj_, 2, normed_mid, saved.gate_up, saved.gate_up_proj);
  Tensor activated = Tensor::empty_with_slack({tokens, width}, down_proj_.slack_columns(), dtype_, stream);
  swiglu_forward(saved.gate_up.slice(1, 0, width), saved.gate_up.slice(1, width, 2 * width), activated, stream);

  Tensor out = Tensor::empty({tokens, hidden}, dtype_, stream);
  linear(down_proj_, 3, activated, out, saved.down_proj, &mid);
  return out;
}

void LlamaBlock::backward(Tensor& dx, const TokenBatch& batch, const Tensor& rotary, const Saved& saved, bool need_dx,
                          StreamRef stream) {
  const std::int64_t tokens = dx.size(0), hidden = config_.hidden_size, d = config_.head_dim,
                     width = config_.intermediate_size;
  const std::int64_t q_heads = config_.num_attention_heads, kv_heads = config_.num_key_value_heads;
  {
    Tensor dgate_up = Tensor::empty_with_slack({tokens, 2 * width}, gate_up_proj_.slack_columns(), dtype_, stream);
    {
      Tensor dactivated = Tensor::empty({tokens, width}, dtype_, stream);
      down_proj_.backward(dx, saved.down_proj, &dactivated, stream);
      Tensor dgate = dgate_up.slice(1, 0, width), dup = dgate_up.slice(1, width, 2 * width);
      swiglu_backward(dactivated, saved.gate_up.slice(1, 0, width), saved.gate_up.slice(1, width, 2 * width), dgate,
                      dup, stream);
    }
    Tensor dnormed = Tensor::empty({tokens, hidden}, dtype_, stream);
    gate_up_proj_.backward(dgate_up, saved.gate_up_proj, &dnormed, stream);
    rms_norm_backward(dnormed, saved.x_mid, mid_norm_.value(), saved.rstd_mid, dx, mid_norm_.grad(), stream, 1.0);
  }

  Tensor dattended = Tensor::empty({tokens, q_heads * d}, dtype_, stream);
  o_proj_.backward(dx, saved.o_proj, &dattended, stream);
  Tensor dqkv =
      Tensor::empty_with_slack({tokens, (q_heads + 2 * kv_heads) * d}, qkv_proj_.slack_columns(), dtype_, stream);
  Heads grads = heads_of(dqkv);
  const Heads heads = attention_inputs(saved);
  const double scale = 1.0 / std::sqrt(static_cast<double>(d));
  attention_backward(dattended.reshape({tokens, q_heads, d}), heads.q, heads.k, heads.v,
                     saved.o_proj.x.reshape({tokens, q_heads, d}), saved.lse, batch.sequences, scale, grads.q, grads.k,
                     grads.v, stream);
  Tensor queries_and_keys = rotated_heads(dqkv);
  rotary_apply(queries_and_keys, batch.positions, rotary, stream, true);
  if (config_.qk_norm) {
    const Heads raw = heads_of(saved.qkv);
    rms_norm_backward(grads.q, raw.q, q_norm_.value(), saved.rstd_q, grads.q, q_norm_.grad(), stream);
    rms_norm_backward(grads.k, raw.k, k_norm_.value(), saved.rstd_k, grads.k, k_norm_.grad(), stream);
  }
  if (!need_dx) {
    qkv_proj_.backward(dqkv, saved.qkv_proj, nullptr, stream);
    return;
  }
  Tensor dnormed = Tensor::empty({tokens, hidden}, dtype_, stream);
  qkv_proj_.backward(dqkv, saved.qkv_proj, &dnormed, stream);
  rms_norm_backward(dnormed, saved.x, input_norm_.value(), saved.rstd_in, dx, input_norm_.grad(), stream, 1.0);
}

std::int64_t LlamaBlock::residual_slack() const {
  return std::max(o_proj_.slack_columns(), down_proj_.slack_columns());
}

std::vector<Parameter> LlamaBlock::parameters() const {
  std::vector<Parameter> all{input_norm_.parameter};
  const auto append = [&all](const LoraLinear& linear) {
    for (Parameter& p : linear.parameters()) all.push_back(std::move(p));
  };
  append(qkv_proj_);
  if (config_.qk_norm) {
    all.push_back(q_norm_.parameter);
    all.push_back(k_norm_.parameter);
  }
  append(o_proj_);
  all.push_back(mid_norm_.parameter);
  append(gate_up_proj_);
  append(down_proj_);
  return all;
}

}  // namespace rowan::detail
