// One decoder block of the Llama family, and the weights around the blocks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "rowan/core/tensor.h"
#include "rowan/nn/llama.h"
#include "rowan/nn/lora_linear.h"
#include "rowan/nn/parameter.h"
#include "rowan/ops/rotary.h"

namespace rowan::detail {

/// Dtype of norms, log-sum-exps and losses beside activations of `dtype`.
inline DType statistics_dtype(DType dtype) { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

/// Writes values (row-major) to a parameter, rounded once.
void assign(const Parameter& parameter, const std::vector<double>& values, StreamRef stream);

/// A weight outside the linear layers: embedding, norm or head.
struct DenseWeight {
  DenseWeight() = default;
  DenseWeight(const std::string& name, const Shape& shape, Parameter::Role role, DType dtype, bool trainable,
              StreamRef stream);

  const Tensor& value() const { return parameter.value; }
  /// Where backward accumulates; null when frozen.
  Tensor* grad() { return parameter.trainable ? &parameter.grad : nullptr; }

  Parameter parameter;
};

class LlamaBlock {
 public:
  static constexpr std::uint64_t kLinears = 4;  ///< LoraLinear objects a block: each needs its own dropout offset

  /// What backward reads of one forward.
  struct Saved {
    Tensor x, x_mid;  // residual stream before attention and before the feed-forward part
    Tensor rstd_in, rstd_mid;
    Tensor qkv;  // as the projection left it; q and k rotated in place unless they are normalised per head
    Tensor qk;   // normalised and rotated q and k (Qwen3)
    Tensor rstd_q, rstd_k;
    Tensor lse;
    Tensor gate_up;
    LoraLinearContext qkv_proj, o_proj, gate_up_proj, down_proj;
  };

  LlamaBlock(const ModelConfig& config, const LlamaOptions& options, const std::string& name, StreamRef stream);

  /// Keys and values of the first `length` tokens of one sequence, with room for more.
  struct Cache {
    Tensor k, v;
    std::int64_t length = 0;
  };

  /// The residual stream behind the block; fills `saved`. `training` draws dropout masks from `dropout_offset`. With a
  /// cache the batch is one sequence that goes on behind the tokens there; its keys and values are added, and `saved`
  /// is of no use to backward.
  Tensor forward(const Tensor& x, const TokenBatch& batch, const Tensor& rotary, bool training,
                 std::uint64_t dropout_offset, Saved& saved, StreamRef stream, const Cache* cache = nullptr);
  /// Turns dx, the gradient behind the block, into the one before it, in place, and adds to the parameters' gradients.
  /// Without `need_dx` dx is garbage afterwards. dx needs residual_slack() spare columns.
  void backward(Tensor& dx, const TokenBatch& batch, const Tensor& rotary, const Saved& saved, bool need_dx,
                StreamRef stream);

  std::int64_t residual_slack() const;
  std::vector<Parameter> parameters() const;
  template <class F>
  void for_each_linear(const F& f) {
    for (LoraLinear* linear : {&qkv_proj_, &o_proj_, &gate_up_proj_, &down_proj_}) f(*linear);
  }

 private:
  struct Heads {
    Tensor q, k, v;  // [M, heads, head_dim] views
  };
  Heads heads_of(const Tensor& qkv) const;
  /// Queries and keys, which lie side by side in qkv, as one tensor of heads.
  Tensor rotated_heads(const Tensor& qkv) const;
  /// The q and k that attention reads: those of qkv, or their normalised copies.
  Heads attention_inputs(const Saved& saved) const;
  void attend(const Heads& heads, const TokenBatch& batch, const Cache* cache, Tensor& out, Tensor& lse,
              StreamRef stream) const;

  ModelConfig config_;
  DType dtype_;
  std::uint64_t dropout_seed_;
  DenseWeight input_norm_, mid_norm_, q_norm_, k_norm_;  // the last two only where the family normalises heads
  LoraLinear qkv_proj_, o_proj_, gate_up_proj_, down_proj_;
};

}  // namespace rowan::detail
