// Decoder-only language models of the Llama family (Llama, Mistral, Qwen2, Qwen3), forward and backward, with LoRA on
// any of their linear layers. Parameters carry the names of Transformers' checkpoints.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "rowan/core/tensor.h"
#include "rowan/io/model_config.h"
#include "rowan/nn/kv_cache.h"
#include "rowan/nn/lora_linear.h"
#include "rowan/nn/parameter.h"
#include "rowan/ops/attention.h"

namespace rowan {

/// Tokens of one or more sequences laid end to end, on one device.
struct TokenBatch {
  Tensor ids;        ///< int32 [M], each in [0, vocab_size)
  Tensor positions;  ///< int32 [M], position of each token in its own sequence, below max_position_embeddings
  Tensor labels;     ///< int64 [M], the token that should follow; kIgnoredLabel counts for nothing. Undefined where no
                     ///< loss is asked for
  SequenceBatch sequences;
};

/// Sequences on the host, as data sets make them.
struct HostBatch {
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> positions;
  std::vector<std::int64_t> labels;
  std::vector<std::int32_t> starts{0};  ///< sequence s is [starts[s], starts[s + 1])
  std::int64_t max_length = 0;

  /// Appends one sequence; labels may be empty (no loss) for all sequences or for none. Throws InvalidArgument
  /// otherwise.
  void append(const std::vector<std::int32_t>& sequence, const std::vector<std::int64_t>& sequence_labels = {});
  std::int64_t tokens() const noexcept { return static_cast<std::int64_t>(ids.size()); }
  /// Labels that count for the loss.
  std::int64_t counted_tokens() const noexcept;
  /// Copies to the stream's device. Throws InvalidArgument for ids or labels outside the vocabulary and for starts that
  /// do not cover the tokens in sequences of at most max_length, none of which a kernel can report.
  TokenBatch to(std::int64_t vocab_size, StreamRef stream) const;
};

struct LlamaOptions {
  DType dtype = DType::kFloat32;  ///< of weights and activations
  bool train_base =
      false;  ///< gradients of every weight; otherwise the base is frozen and only LoRA factors are trained
  /// LoRA of a linear layer by its module path ("model.layers.0.self_attn.q_proj"); empty function or nullopt: none.
  std::function<std::optional<LoraConfig>(const std::string& module)> lora;
  bool recompute =
      false;  ///< keep only each block's input, and run its forward again in backward: less memory, a third more work
  std::uint64_t seed = 0;  ///< of dropout masks
};

class LlamaModel {
 public:
  /// Makes the layers on the stream's device with uninitialised weights. Throws InvalidArgument for sizes that do not
  /// fit together and Unsupported for what the family does not have.
  LlamaModel(const ModelConfig& config, const LlamaOptions& options, StreamRef stream);
  ~LlamaModel();
  LlamaModel(LlamaModel&&) noexcept;
  LlamaModel& operator=(LlamaModel&&) noexcept;

  /// Base weights as Transformers initialises them: normal with standard deviation `std` (norms one, biases zero). Same
  /// values on every device.
  void init_base(std::uint64_t seed, double std, StreamRef stream);
  /// LoRA factors as PEFT initialises them: A uniform in +-1/sqrt(in), B zero. Same values on every device.
  void init_adapter(std::uint64_t seed, StreamRef stream);

  /// logits [M, vocab_size] of every token.
  Tensor logits(const TokenBatch& batch, StreamRef stream);
  /// logits [S, vocab_size] of the last token of each non-empty sequence.
  Tensor last_logits(const HostBatch& batch, StreamRef stream);
  /// logits [1, vocab_size] behind `ids`, which follow the tokens in the cache and are added to it. Equal, but for
  /// rounding, to the last row of logits() of all these tokens in one sequence; many ids at once are fast where the
  /// cache is empty. Throws InvalidArgument, and leaves the cache as it was, for no ids or ids outside the vocabulary,
  /// a cache of another model, and more tokens than the cache or the model (as logits()) has room for.
  Tensor decode(std::span<const std::int32_t> ids, KvCache& cache, StreamRef stream);
  /// loss_sum (float64 [1]) = sum of cross-entropies over counted tokens, in nats.
  void evaluate(const TokenBatch& batch, Tensor& loss_sum, StreamRef stream);
  /// The same, and adds grad_scale times its gradient to every trainable parameter's grad. `dropout_step` must differ
  /// between calls that should draw different masks; equal values draw equal masks.
  void forward_backward(const TokenBatch& batch, double grad_scale, Tensor& loss_sum, StreamRef stream,
                        std::uint64_t dropout_step = 0);

  /// Every tensor under its Hugging Face name, base first. Copies share memory with the model.
  const std::vector<Parameter>& parameters() const noexcept;
  /// Those with `trainable`.
  std::vector<Parameter> trainable_parameters() const;
  void zero_grad(StreamRef stream);
  /// Switches every LoRA branch on (the start) or off.
  void set_adapter_enabled(bool enabled);
  /// Adds s B A to the base weights, each rounded once, and zeroes B: logits stay the same up to that rounding.
  void merge_adapter(StreamRef stream);
  const ModelConfig& config() const noexcept;
  const LlamaOptions& options() const noexcept;

 private:
  struct Layers;
  std::unique_ptr<Layers> layers_;
};

}  // namespace rowan
