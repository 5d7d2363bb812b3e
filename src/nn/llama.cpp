#include "rowan/nn/llama.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "nn/llama_block.h"
#include "rowan/core/rng.h"
#include "rowan/ops/cross_entropy.h"
#include "rowan/ops/elementwise.h"
#include "rowan/ops/embedding.h"
#include "rowan/ops/gemm.h"
#include "rowan/ops/rms_norm.h"

namespace rowan {

using detail::DenseWeight;
using detail::LlamaBlock;

// HostBatch

void HostBatch::append(const std::vector<std::int32_t>& sequence, const std::vector<std::int64_t>& sequence_labels) {
  detail::require(sequence_labels.empty() || sequence_labels.size() == sequence.size(),
                  "HostBatch::append: expected one label a token ({}), got {}", sequence.size(),
                  sequence_labels.size());
  detail::require(ids.empty() || labels.empty() == sequence_labels.empty(),
                  "HostBatch::append: expected labels for all sequences or for none");
  const auto length = static_cast<std::int64_t>(sequence.size());
  detail::require(tokens() + length <= INT32_MAX, "HostBatch::append: expected fewer than 2^31 tokens");
  ids.insert(ids.end(), sequence.begin(), sequence.end());
  labels.insert(labels.end(), sequence_labels.begin(), sequence_labels.end());
  for (std::int32_t p = 0; p < length; ++p) positions.push_back(p);
  starts.push_back(static_cast<std::int32_t>(ids.size()));
  max_length = std::max(max_length, length);
}

std::int64_t HostBatch::counted_tokens() const noexcept {
  return std::count_if(labels.begin(), labels.end(), [](std::int64_t label) { return label != kIgnoredLabel; });
}

TokenBatch HostBatch::to(std::int64_t vocab_size, StreamRef stream) const {
  for (const std::int32_t id : ids) {
    detail::require(0 <= id && id < vocab_size, "HostBatch: expected token ids in [0, {}), got {}", vocab_size, id);
  }
  for (const std::int64_t label : labels) {
    detail::require(label == kIgnoredLabel || (0 <= label && label < vocab_size),
                    "HostBatch: expected labels in [0, {}) or {}, got {}", vocab_size, kIgnoredLabel, label);
  }
  const bool sequences_fit = !starts.empty() && starts.front() == 0 && starts.back() == tokens();
  detail::require(sequences_fit, "HostBatch: expected sequence starts from 0 to {} (tokens), got {}", tokens(),
                  starts.empty() ? "none" : fmt::format("{} to {}", starts.front(), starts.back()));
  for (std::size_t s = 1; s < starts.size(); ++s) {
    const std::int64_t length = std::int64_t{starts[s]} - starts[s - 1];
    detail::require(0 <= length && length <= max_length,
                    "HostBatch: expected sequence lengths in [0, {}] (max_length), got {}", max_length, length);
  }
  const Shape tokens_shape{tokens()};
  TokenBatch batch;
  batch.ids = Tensor::from_host(tokens_shape, ids, stream);
  batch.positions = Tensor::from_host(tokens_shape, positions, stream);
  if (!labels.empty() || ids.empty()) batch.labels = Tensor::from_host(tokens_shape, labels, stream);
  batch.sequences.starts = Tensor::from_host(Shape{static_cast<std::int64_t>(starts.size())}, starts, stream);
  batch.sequences.max_length = max_length;
  return batch;
}

// LlamaModel

namespace {

/// Logits are made and turned into gradients in slices of about this many bytes: all of them at once would be the
/// largest buffer of a step (M x vocab_size).
constexpr std::int64_t kLogitsSliceBytes = std::int64_t{256} << 20;

void fill_normal(const Parameter& p, Rng& rng, double std, StreamRef stream) {
  std::vector<double> values(static_cast<std::size_t>(p.value.elements()));
  for (double& v : values) v = std * rng.normal();
  detail::assign(p, values, stream);
}

}  // namespace

struct LlamaModel::Layers {
  Layers(const ModelConfig& model_config, const LlamaOptions& model_options, StreamRef stream);

  /// Throws InvalidArgument for a sequence that is longer than the model takes.
  void check_length(std::int64_t tokens) const;
  Tensor embed(const TokenBatch& batch, StreamRef stream) const;
  Tensor final_hidden(const Tensor& x, Tensor& rstd, StreamRef stream) const;
  /// Runs embedding and blocks; saves what backward needs when `saved` is given.
  Tensor run(const TokenBatch& batch, std::vector<LlamaBlock::Saved>* saved, std::uint64_t dropout_step,
             StreamRef stream);
  /// Losses of all rows; with dhidden also the gradient of grad_scale times their sum.
  void head_loss(const Tensor& hidden, const Tensor& labels, double grad_scale, Tensor* dhidden, Tensor& loss_sum,
                 StreamRef stream);
  const DenseWeight& head() const { return config.tie_word_embeddings ? embedding : lm_head; }
  std::uint64_t dropout_offset(std::uint64_t dropout_step, std::size_t block) const {
    return (dropout_step * blocks.size() + block) * LlamaBlock::kLinears;
  }

  ModelConfig config;
  LlamaOptions options;
  DenseWeight embedding, final_norm, lm_head;  // lm_head is undefined where tied
  std::vector<LlamaBlock> blocks;
  Tensor rotary;
  std::vector<Parameter> parameters;
};

LlamaModel::Layers::Layers(const ModelConfig& model_config, const LlamaOptions& model_options, StreamRef stream)
    : config(model_config), options(model_options) {
  detail::require(is_floating(options.dtype), "LlamaModel: expected a floating dtype, got {}", options.dtype);
  const AllocationLabel label("model weights");
  const bool train = options.train_base;
  const Shape table{config.vocab_size, config.hidden_size};
  embedding =
      DenseWeight("model.embed_tokens.weight", table, Parameter::Role::kEmbedding, options.dtype, train, stream);
  final_norm =
      DenseWeight("model.norm.weight", Shape{config.hidden_size}, Parameter::Role::kNorm, options.dtype, train, stream);
  if (!config.tie_word_embeddings) {
    lm_head = DenseWeight("lm_head.weight", table, Parameter::Role::kHead, options.dtype, train, stream);
  }
  for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) {
    blocks.emplace_back(config, options, "model.layers." + std::to_string(i), stream);
  }
  rotary = rotary_table(config.rotary(), config.max_position_embeddings, stream);

  parameters.push_back(embedding.parameter);
  for (const LlamaBlock& block : blocks) {
    for (Parameter& p : block.parameters()) parameters.push_back(std::move(p));
  }
  parameters.push_back(final_norm.parameter);
  if (!config.tie_word_embeddings) parameters.push_back(lm_head.parameter);
}

Tensor LlamaModel::Layers::embed(const TokenBatch& batch, StreamRef stream) const {
  Tensor x = Tensor::empty({batch.ids.elements(), config.hidden_size}, options.dtype, stream);
  embedding_forward(batch.ids, embedding.value(), x, stream);
  return x;
}

Tensor LlamaModel::Layers::final_hidden(const Tensor& x, Tensor& rstd, StreamRef stream) const {
  Tensor hidden = Tensor::empty(x.shape(), options.dtype, stream);
  rstd = Tensor::empty({x.size(0)}, detail::statistics_dtype(options.dtype), stream);
  rms_norm_forward(x, final_norm.value(), config.rms_norm_eps, hidden, rstd, stream);
  return hidden;
}

Tensor LlamaModel::Layers::run(const TokenBatch& batch, std::vector<LlamaBlock::Saved>* saved,
                               std::uint64_t dropout_step, StreamRef stream) {
  check_length(batch.sequences.max_length);
  const AllocationLabel label("activations");
  Tensor x = embed(batch, stream);
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    LlamaBlock::Saved scratch;
    LlamaBlock::Saved& keep = saved ? (*saved)[i] : scratch;
    const Tensor input = x;
    x = blocks[i].forward(input, batch, rotary, saved != nullptr, dropout_offset(dropout_step, i), keep, stream);
    if (saved && options.recompute) {
      keep = LlamaBlock::Saved{};
      keep.x = input;
    }
  }
  return x;
}

void LlamaModel::Layers::check_length(std::int64_t tokens) const {
  detail::require(tokens <= config.max_position_embeddings,
                  "LlamaModel: expected sequences of at most {} tokens (max_position_embeddings), got {}",
                  config.max_position_embeddings, tokens);
  detail::require(
      config.sliding_window == 0 || tokens <= config.sliding_window,
      "LlamaModel: expected sequences of at most {} tokens (sliding_window, whose windows are not computed), got {}",
      config.sliding_window, tokens);
}

void LlamaModel::Layers::head_loss(const Tensor& hidden, const Tensor& labels, double grad_scale, Tensor* dhidden,
                                   Tensor& loss_sum, StreamRef stream) {
  detail::require(labels.defined(), "LlamaModel: expected labels for a loss, got none");
  const std::int64_t tokens = hidden.size(0), vocab = config.vocab_size;
  const std::int64_t slice_rows =
      std::max<std::int64_t>(1, kLogitsSliceBytes / (vocab * static_cast<std::int64_t>(size_of(options.dtype))));
  Tensor losses = Tensor::empty({tokens}, detail::statistics_dtype(options.dtype), stream);
  Tensor buffer = Tensor::empty({std::min(tokens, slice_rows), vocab}, options.dtype, stream);
  const DenseWeight& weight = head();
  for (std::int64_t begin = 0; begin < tokens; begin += slice_rows) {
    const std::int64_t end = std::min(tokens, begin + slice_rows);
    const Tensor rows = hidden.slice(0, begin, end);
    Tensor logits = buffer.slice(0, 0, end - begin);
    Tensor slice_losses = losses.slice(0, begin, end);
    gemm(rows, weight.value().transpose(0, 1), logits, stream);
    cross_entropy(logits, labels.slice(0, begin, end), slice_losses, dhidden ? &logits : nullptr, grad_scale, stream);
    if (!dhidden) continue;
    Tensor drows = dhidden->slice(0, begin, end);
    gemm(logits, weight.value(), drows, stream);
    if (weight.parameter.trainable) {
      Tensor grad = weight.parameter.grad;
      gemm(logits.transpose(0, 1), rows, grad, stream, {.beta = 1});
    }
  }
  sum(losses, loss_sum, stream);
}

LlamaModel::LlamaModel(const ModelConfig& config, const LlamaOptions& options, StreamRef stream)
    : layers_(std::make_unique<Layers>(config, options, stream)) {}
LlamaModel::~LlamaModel() = default;
LlamaModel::LlamaModel(LlamaModel&&) noexcept = default;
LlamaModel& LlamaModel::operator=(LlamaModel&&) noexcept = default;

void LlamaModel::init_base(std::uint64_t seed, double std, StreamRef stream) {
  std::uint64_t index = 0;
  for (const Parameter& p : layers_->parameters) {
    Rng rng(seed, index++);  // one sequence a tensor: a change of one layer does not move the others
    switch (p.role) {
      case Parameter::Role::kLoraA:
      case Parameter::Role::kLoraB:
        break;
      case Parameter::Role::kNorm:
        detail::assign(p, std::vector<double>(static_cast<std::size_t>(p.value.elements()), 1.0), stream);
        break;
      case Parameter::Role::kBias:
        detail::assign(p, std::vector<double>(static_cast<std::size_t>(p.value.elements()), 0.0), stream);
        break;
      default:
        fill_normal(p, rng, std, stream);
    }
  }
}

void LlamaModel::init_adapter(std::uint64_t seed, StreamRef stream) {
  std::uint64_t index = 0;
  for (LlamaBlock& block : layers_->blocks) {
    block.for_each_linear([&](LoraLinear& linear) {
      Rng rng(seed, index++);
      linear.init_adapter(rng, stream);
    });
  }
}

Tensor LlamaModel::logits(const TokenBatch& batch, StreamRef stream) {
  const Tensor x = layers_->run(batch, nullptr, 0, stream);
  Tensor rstd;
  const Tensor hidden = layers_->final_hidden(x, rstd, stream);
  Tensor out = Tensor::empty({hidden.size(0), layers_->config.vocab_size}, layers_->options.dtype, stream);
  gemm(hidden, layers_->head().value().transpose(0, 1), out, stream);
  return out;
}

Tensor LlamaModel::last_logits(const HostBatch& batch, StreamRef stream) {
  std::vector<std::int64_t> last;
  for (std::size_t s = 1; s < batch.starts.size(); ++s) {
    if (batch.starts[s] > batch.starts[s - 1]) last.push_back(batch.starts[s] - 1);
  }
  const Tensor x = layers_->run(batch.to(layers_->config.vocab_size, stream), nullptr, 0, stream);
  const Tensor picked = Tensor::empty({static_cast<std::int64_t>(last.size()), x.size(1)}, x.dtype(), stream);
  for (std::size_t s = 0; s < last.size(); ++s)
    picked.select(0, static_cast<std::int64_t>(s)).copy_from(x.select(0, last[s]), stream);
  Tensor rstd;
  const Tensor hidden = layers_->final_hidden(picked, rstd, stream);
  Tensor out = Tensor::empty({hidden.size(0), layers_->config.vocab_size}, layers_->options.dtype, stream);
  gemm(hidden, layers_->head().value().transpose(0, 1), out, stream);
  return out;
}

Tensor LlamaModel::decode(std::span<const std::int32_t> ids, KvCache& cache, StreamRef stream) {
  Layers& layers = *layers_;
  const auto tokens = static_cast<std::int64_t>(ids.size());
  const Shape cached{cache.capacity(), layers.config.num_key_value_heads, layers.config.head_dim};
  detail::require(cache.layers_.size() == layers.blocks.size() && cache.dtype_ == layers.options.dtype &&
                      std::all_of(cache.layers_.begin(), cache.layers_.end(),
                                  [&](const KvCache::Layer& layer) { return layer.k.shape() == cached; }),
                  "LlamaModel::decode: expected a cache of this model, got one of another");
  detail::require(tokens >= 1, "LlamaModel::decode: expected ids, got none");
  detail::require(tokens <= cache.capacity() - cache.length(),
                  "LlamaModel::decode: expected at most {} tokens in the cache, got {}", cache.capacity(),
                  cache.length() + tokens);
  layers.check_length(cache.length() + tokens);

  HostBatch host;
  host.append({ids.begin(), ids.end()});
  for (std::int32_t& position : host.positions) position += static_cast<std::int32_t>(cache.length());
  const TokenBatch batch = host.to(layers.config.vocab_size, stream);
  const AllocationLabel label("activations");
  Tensor x = layers.embed(batch, stream);
  for (std::size_t i = 0; i < layers.blocks.size(); ++i) {
    LlamaBlock::Saved scratch;
    const LlamaBlock::Cache past{cache.layers_[i].k, cache.layers_[i].v, cache.length()};
    x = layers.blocks[i].forward(x, batch, layers.rotary, false, 0, scratch, stream, &past);
  }
  Tensor rstd;
  const Tensor hidden = layers.final_hidden(x.slice(0, tokens - 1, tokens), rstd, stream);
  Tensor out = Tensor::empty({1, layers.config.vocab_size}, layers.options.dtype, stream);
  gemm(hidden, layers.head().value().transpose(0, 1), out, stream);
  cache.length_ += tokens;
  return out;
}

void LlamaModel::evaluate(const TokenBatch& batch, Tensor& loss_sum, StreamRef stream) {
  const Tensor x = layers_->run(batch, nullptr, 0, stream);
  const AllocationLabel label("activations");
  Tensor rstd;
  layers_->head_loss(layers_->final_hidden(x, rstd, stream), batch.labels, 0, nullptr, loss_sum, stream);
}

void LlamaModel::forward_backward(const TokenBatch& batch, double grad_scale, Tensor& loss_sum, StreamRef stream,
                                  std::uint64_t dropout_step) {
  Layers& layers = *layers_;
  std::vector<LlamaBlock::Saved> saved(layers.blocks.size());
  Tensor x = layers.run(batch, &saved, dropout_step, stream);

  const AllocationLabel label("activations");
  std::int64_t slack = 0;
  for (const LlamaBlock& block : layers.blocks) slack = std::max(slack, block.residual_slack());
  // The gradient of the residual stream: one buffer, into which each block adds its own share in place.
  Tensor dx = Tensor::empty_with_slack(x.shape(), slack, layers.options.dtype, stream);
  {
    Tensor rstd;
    const Tensor hidden = layers.final_hidden(x, rstd, stream);
    Tensor dhidden = Tensor::empty(x.shape(), layers.options.dtype, stream);
    layers.head_loss(hidden, batch.labels, grad_scale, &dhidden, loss_sum, stream);
    rms_norm_backward(dhidden, x, layers.final_norm.value(), rstd, dx, layers.final_norm.grad(), stream);
  }
  x = Tensor();
  for (std::size_t i = layers.blocks.size(); i-- > 0;) {
    LlamaBlock& block = layers.blocks[i];
    if (layers.options.recompute) {
      const Tensor input = saved[i].x;
      block.forward(input, batch, layers.rotary, true, layers.dropout_offset(dropout_step, i), saved[i], stream);
    }
    // Below the first block only a trained embedding needs a gradient.
    block.backward(dx, batch, layers.rotary, saved[i], i > 0 || layers.options.train_base, stream);
    saved[i] = LlamaBlock::Saved{};
  }
  if (layers.options.train_base) {
    Tensor grad = layers.embedding.parameter.grad;
    embedding_backward(batch.ids, dx, grad, stream);
  }
}

const std::vector<Parameter>& LlamaModel::parameters() const noexcept { return layers_->parameters; }

std::vector<Parameter> LlamaModel::trainable_parameters() const {
  std::vector<Parameter> trainable;
  for (const Parameter& p : layers_->parameters) {
    if (p.trainable) trainable.push_back(p);
  }
  return trainable;
}

void LlamaModel::zero_grad(StreamRef stream) {
  for (const Parameter& p : layers_->parameters) {
    if (p.trainable) p.grad.zero(stream);
  }
}

void LlamaModel::set_adapter_enabled(bool enabled) {
  for (LlamaBlock& block : layers_->blocks)
    block.for_each_linear([enabled](LoraLinear& linear) { linear.set_adapter_enabled(enabled); });
}

void LlamaModel::merge_adapter(StreamRef stream) {
  for (LlamaBlock& block : layers_->blocks)
    block.for_each_linear([stream](LoraLinear& linear) { linear.merge(stream); });
}

const ModelConfig& LlamaModel::config() const noexcept { return layers_->config; }
const LlamaOptions& LlamaModel::options() const noexcept { return layers_->options; }

}  // namespace rowan
