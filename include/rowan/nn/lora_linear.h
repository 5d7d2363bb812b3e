// Linear layers with low-rank adapters on one bordered weight.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "rowan/core/rng.h"
#include "rowan/core/tensor.h"
#include "rowan/nn/parameter.h"
#include "rowan/ops/dropout.h"

namespace rowan {

/// An adapter as PEFT configures it.
struct LoraConfig {
  enum class DropoutPlace {
    kInput,   ///< drops x before A, as PEFT does
    kOutput,  ///< drops what the adapter adds to y
  };

  std::int64_t rank = 8;
  double alpha = std::numeric_limits<double>::quiet_NaN();  ///< must be set
  bool use_rslora = false;
  double dropout = 0;  ///< in [0, 1]; acts in training only
  DropoutPlace dropout_place = DropoutPlace::kInput;

  /// alpha / rank, or alpha / sqrt(rank) with use_rslora (Kalajdzievski, arXiv 2312.03732).
  double scale() const;
};

/// Where one forward's dropout masks come from: equal keys draw equal masks. Layers and steps differ in seed or offset.
struct DropoutKey {
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  /// Optional int64 [1] on the device, added to offset when kernels run (see DropoutMask).
  Tensor counter = {};
};

/// One linear layer of those that read the same input.
struct LinearPart {
  std::string name;  ///< module path, for example "model.layers.0.self_attn.q_proj"
  std::int64_t out_features = 0;
  bool bias = false;
  std::optional<LoraConfig> lora;
};

/// What backward needs of one forward. S is kept, never computed again. Where x has spare columns, S lies in them, and
/// no other layer that reads the same x will write there while this context lives (it makes an S of its own). x itself
/// must stay as it is until the last backward.
struct LoraLinearContext {
  Tensor x;
  Tensor s;                           ///< [M, slack_columns()]; undefined where the adapter was off
  std::optional<DropoutKey> dropout;  ///< undefined where no mask was drawn
  std::shared_ptr<void> slack_claim;  ///< null where S is not in x's spare columns
};

/// y = x W^T + bias + scale (x A^T) B^T for a stack of parts that read one x (q_proj, k_proj, v_proj; gate_proj,
/// up_proj; or a single layer); y holds the parts' outputs side by side. Any part may be without an adapter.
///
/// One buffer of N + p rows and round_up(K + p, 64) columns holds everything (N: out features of all parts, K: in
/// features, p: a multiple of 64 that holds the parts' ranks, each rounded up to 16):
///
///          K      p
///   N [    W   |  B  ]     y  = [ x  | scale x A^T ] [ W | B ]^T     one product
///   p [    A   |  0  ]     dx = [ dy | scale dy B  ] [ W ; A ]       one product
///
/// Each part's A has its own rows and its B its own columns of the border, zeros elsewhere. The bordered products are
/// used where x and dy come with slack_columns() spare columns (Tensor::empty_with_slack); other inputs take products
/// and low-rank updates one after the other. W and biases are frozen unless train_weight is set, and then no gradient
/// of them is computed. Copies share memory.
///
/// All functions throw InvalidArgument when shapes, dtypes, devices or configurations do not fit. Running out of memory
/// inside backward may leave gradients partly added.
class LoraLinear {
 public:
  LoraLinear() = default;
  /// Weights, factors and biases are zero. dtype: float32, bfloat16, float16, or float64 on the CPU.
  LoraLinear(std::int64_t in_features, std::vector<LinearPart> parts, DType dtype, bool train_weight, StreamRef stream);

  std::int64_t in_features() const noexcept { return in_features_; }
  std::int64_t out_features() const noexcept { return out_features_; }
  const std::vector<LinearPart>& parts() const noexcept { return parts_; }
  /// Spare columns that x and dy should bring for the bordered products: the sum of the ranks rounded up to 16.
  std::int64_t slack_columns() const noexcept { return columns_; }

  /// x [M, K], y [M, N], adjacent columns, any row stride, dtype of the layer, not sharing memory. Writes y and x's
  /// spare columns and fills context, which is empty when memory runs out on the way. With a dropout key (training) the
  /// adapters' dropout acts, each part with masks of its own; without one it does not. An `addend` like y (the residual
  /// stream) is added, in the bordered product before the one rounding where its row stride is y's.
  void forward(const Tensor& x, Tensor& y, LoraLinearContext& context, StreamRef stream,
               const std::optional<DropoutKey>& dropout = {}, const Tensor* addend = nullptr) const;

  /// Adds to every trainable parameter's gradient, and dx = (gradient of x) + dx_beta dx unless dx is null. dy [M, N],
  /// dx [M, K] as y and x above; dx must share memory with neither dy nor the saved x. Writes dx and dy's spare
  /// columns. May be called again with the same context.
  void backward(const Tensor& dy, const LoraLinearContext& context, Tensor* dx, StreamRef stream,
                double dx_beta = 0) const;

  /// By part: weight [out, K], bias [out], lora_A [r, K] and lora_B [out, r], named as in Transformers and PEFT.
  std::vector<Parameter> parameters() const;

  /// Draws A uniformly from +-1/sqrt(K), as PEFT does (Kaiming with a = sqrt(5)), and zeroes B; values and masters.
  void init_adapter(Rng& rng, StreamRef stream) const;

  /// Without the adapter forward and backward are those of the frozen layer. On at first.
  void set_adapter_enabled(bool enabled) noexcept { enabled_ = enabled; }

  /// W = round(W + scale B A) with one rounding to the layer's dtype (from the factors' masters; into W's master too),
  /// then B = 0.
  void merge(StreamRef stream) const;

 private:
  struct Adapter {
    std::int64_t column = 0;  ///< first of its columns in S and in the border
    std::int64_t padded_rank = 0;
    double scale = 0;
    Tensor a, b;  ///< views into the border, [r, K] and [out, r]
    Tensor a_master, b_master, a_grad, b_grad;
  };
  struct Part {
    std::int64_t row = 0;  ///< first of its rows in W
    std::optional<Adapter> adapter;
  };

  void check_forward(const Tensor& x, const Tensor& y, StreamRef stream, const std::optional<DropoutKey>& dropout,
                     const Tensor* addend) const;
  void check_backward(const Tensor& dy, const LoraLinearContext& context, const Tensor* dx, StreamRef stream,
                      double dx_beta) const;
  bool drops(LoraConfig::DropoutPlace place) const;
  DropoutMask mask(std::size_t part, const std::optional<DropoutKey>& key) const;
  void shrink_input(const Tensor& x, const LoraLinearContext& context, Tensor& s, bool input_dropped,
                    StreamRef stream) const;
  void add_weight_gradients(const Tensor& dy, const Tensor& x, StreamRef stream) const;
  /// ds = scale (dy B) of every part, and the gradients of B.
  void add_b_gradients(const Tensor& dy, Tensor& ds, const LoraLinearContext& context, StreamRef stream) const;
  void add_a_gradients(const Tensor& ds, const LoraLinearContext& context, StreamRef stream) const;

  std::int64_t in_features_ = 0, out_features_ = 0, columns_ = 0;
  std::vector<LinearPart> parts_;
  std::vector<Part> state_;
  DType dtype_ = DType::kFloat32;
  bool train_weight_ = false, has_bias_ = false, enabled_ = true;
  double common_scale_ = 0;  ///< of all adapters; NaN where they differ
  Tensor buffer_;            ///< [N + columns_, K + columns_] of the bordered buffer
  Tensor weight_master_, weight_grad_, bias_, bias_master_, bias_grad_, a_grad_;
};

}  // namespace rowan
