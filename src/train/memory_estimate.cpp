#include "rowan/train/memory_estimate.h"

#include <algorithm>
#include <map>
#include <optional>
#include <regex>
#include <string>
#include <vector>

#include "core/check.h"

namespace rowan {

namespace {

using Role = Parameter::Role;

constexpr std::int64_t kMasterBytes = 4, kStatisticsBytes = 4;
constexpr std::int64_t kLogitsSliceBytes = std::int64_t{256} << 20;   // see LlamaModel
constexpr std::int64_t kMostStackedElements = std::int64_t{1} << 26;  // see the matrix updater

std::int64_t round_up(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }

/// A stack of linear layers that read one x.
struct Linear {
  std::int64_t in = 0, out = 0;
  std::int64_t columns = 0;  // of the adapters, ranks rounded up to 16
};

struct Trainable {
  std::string name;
  Role role;
  std::int64_t rows, cols;  // of a vector: 1 and its length
};

class Estimator {
 public:
  Estimator(const ModelConfig& config, const LlamaOptions& options, const OptimizerOptions& optimizer, Device device)
      : config_(config), options_(options), optimizer_(optimizer), device_(device), element_(bytes_of(options.dtype)) {
    q_ = config.num_attention_heads * config.head_dim;
    kv_ = config.num_key_value_heads * config.head_dim;
    add_dense("model.embed_tokens.weight", Role::kEmbedding, config.vocab_size, config.hidden_size);
    for (std::int64_t i = 0; i < config.num_hidden_layers; ++i) add_block("model.layers." + std::to_string(i));
    add_dense("model.norm.weight", Role::kNorm, 1, config.hidden_size);
    if (!config.tie_word_embeddings) add_dense("lm_head.weight", Role::kHead, config.vocab_size, config.hidden_size);
    result_.weights += config.max_position_embeddings * config.head_dim * kStatisticsBytes;  // rotary table
  }

  MemoryEstimate run(std::int64_t tokens) {
    add_optimizer();
    result_.activations = tokens * activation_bytes() + logits_bytes(tokens);
    result_.activations = std::max(result_.activations, tokens * backward_bytes());
    return result_;
  }

 private:
  static std::int64_t bytes_of(DType dtype) { return static_cast<std::int64_t>(size_of(dtype)); }

  void add_trainable(const std::string& name, Role role, std::int64_t rows, std::int64_t cols) {
    result_.trainable_parameters += rows * cols;
    const bool own_master = element_ < kMasterBytes;
    result_.gradients += rows * cols * std::max(element_, kMasterBytes) * (own_master ? 2 : 1);
    trainable_.push_back({name, role, rows, cols});
  }

  void add_dense(const std::string& name, Role role, std::int64_t rows, std::int64_t cols) {
    result_.parameters += rows * cols;
    result_.weights += rows * cols * element_;
    if (options_.train_base) add_trainable(name, role, rows, cols);
  }

  /// Linear layers on one input, as LoraLinear holds them.
  Linear add_linear(const std::string& block, std::int64_t in,
                    const std::vector<std::pair<const char*, std::int64_t>>& parts, bool bias) {
    Linear linear{in, 0, 0};
    for (const auto& [name, out] : parts) {
      const std::string module = block + name;
      linear.out += out;
      result_.parameters += out * in;
      if (options_.train_base) add_trainable(module + ".weight", Role::kMatrix, out, in);
      if (bias) add_dense(module + ".bias", Role::kBias, 1, out);
      const std::optional<LoraConfig> lora = options_.lora ? options_.lora(module) : std::nullopt;
      if (!lora) continue;
      linear.columns += round_up(lora->rank, 16);
      result_.parameters += lora->rank * (in + out);
      add_trainable(module + ".lora_A.weight", Role::kLoraA, lora->rank, in);
      add_trainable(module + ".lora_B.weight", Role::kLoraB, out, lora->rank);
      result_.gradients += (round_up(lora->rank, 16) - lora->rank) * in * kMasterBytes;
    }
    const std::int64_t border = round_up(linear.columns, 64);
    result_.weights += (linear.out + border) * round_up(in + border, 64) * element_;
    return linear;
  }

  void add_block(const std::string& name) {
    const std::int64_t hidden = config_.hidden_size, width = config_.intermediate_size;
    add_dense(name + ".input_layernorm.weight", Role::kNorm, 1, hidden);
    add_dense(name + ".post_attention_layernorm.weight", Role::kNorm, 1, hidden);
    if (config_.qk_norm) {
      add_dense(name + ".self_attn.q_norm.weight", Role::kNorm, 1, config_.head_dim);
      add_dense(name + ".self_attn.k_norm.weight", Role::kNorm, 1, config_.head_dim);
    }
    qkv_proj_ =
        add_linear(name + ".self_attn.", hidden, {{"q_proj", q_}, {"k_proj", kv_}, {"v_proj", kv_}}, config_.qkv_bias);
    o_proj_ = add_linear(name + ".self_attn.", q_, {{"o_proj", hidden}}, false);
    gate_up_proj_ = add_linear(name + ".mlp.", hidden, {{"gate_proj", width}, {"up_proj", width}}, false);
    down_proj_ = add_linear(name + ".mlp.", width, {{"down_proj", hidden}}, false);
  }

  // Activations, in bytes a token. See LlamaBlock.

  std::int64_t row(std::int64_t cols) const { return cols * element_; }
  std::int64_t row(std::int64_t cols, std::int64_t slack) const { return round_up(cols + slack, 64) * element_; }

  /// What a block saves, the residual stream behind it included.
  std::int64_t saved_bytes() const {
    const std::int64_t heads = config_.num_attention_heads, hidden = config_.hidden_size;
    std::int64_t bytes = row(hidden, qkv_proj_.columns) + row(qkv_proj_.out) + row(q_, o_proj_.columns);
    bytes += row(hidden) + row(hidden, gate_up_proj_.columns) + row(gate_up_proj_.out);
    bytes += row(config_.intermediate_size, down_proj_.columns) + row(hidden);
    bytes += (heads + 2) * kStatisticsBytes;
    if (config_.qk_norm) bytes += row(q_ + kv_) + (heads + config_.num_key_value_heads) * kStatisticsBytes;
    return bytes;
  }

  /// What all blocks together keep until backward.
  std::int64_t kept_bytes() const {
    const std::int64_t a_block = options_.recompute ? row(config_.hidden_size) : saved_bytes();
    return config_.num_hidden_layers * a_block + row(config_.hidden_size);
  }

  std::int64_t residual_gradient_bytes() const {
    return row(config_.hidden_size, std::max(o_proj_.columns, down_proj_.columns));
  }

  /// While the head makes the loss.
  std::int64_t activation_bytes() const {
    return kept_bytes() + residual_gradient_bytes() + 2 * row(config_.hidden_size) + 2 * kStatisticsBytes;
  }

  std::int64_t logits_bytes(std::int64_t tokens) const {
    const std::int64_t vocabulary = row(config_.vocab_size);
    return std::min(tokens, std::max<std::int64_t>(1, kLogitsSliceBytes / vocabulary)) * vocabulary;
  }

  /// While the last block goes backward.
  std::int64_t backward_bytes() const {
    const std::int64_t feed_forward =
        row(gate_up_proj_.out, gate_up_proj_.columns) + row(std::max(config_.intermediate_size, config_.hidden_size));
    const std::int64_t attention = row(q_) + row(qkv_proj_.out, qkv_proj_.columns) +
                                   std::max(row(config_.hidden_size), config_.num_attention_heads * kStatisticsBytes);
    const std::int64_t again = options_.recompute ? saved_bytes() - row(config_.hidden_size) : 0;
    return kept_bytes() - row(config_.hidden_size) + residual_gradient_bytes() + again +
           std::max({feed_forward, attention, options_.recompute ? row(config_.hidden_size) : 0});
  }

  // The optimizer

  const ParameterGroup& group_of(const Trainable& p) const {
    for (const ParameterGroup& group : optimizer_.groups) {
      const bool role = group.roles.empty() || std::count(group.roles.begin(), group.roles.end(), p.role) > 0;
      if (role && (group.name_pattern.empty() || std::regex_search(p.name, std::regex(group.name_pattern))))
        return group;
    }
    detail::fail(ErrorKind::kInvalidArgument, "estimate_memory: expected a group for \"{}\", got none", p.name);
  }

  /// Matrices of one group and shape take their update together.
  void add_optimizer() {
    struct Shape {
      const ParameterGroup* group;
      std::int64_t rows, cols;
      auto operator<=>(const Shape&) const = default;
    };
    std::map<Shape, std::int64_t> counts;
    const std::int64_t master = std::max(element_, kMasterBytes);
    for (const Trainable& p : trainable_) {
      const ParameterGroup& group = group_of(p);
      const bool adamw = group.algorithm == Algorithm::kAdamW;
      result_.optimizer += p.rows * p.cols * master * (adamw ? 2 : 1);
      if (adamw) continue;
      ++counts[{&group, p.rows, p.cols}];
      if (group.algorithm == Algorithm::kMuown) result_.optimizer += p.rows * (6 * master + 8);
    }
    std::map<DType, std::int64_t> most_updates;
    for (const auto& [shape, count] : counts) {
      const std::int64_t elements = shape.rows * shape.cols;
      const std::int64_t stacked = std::clamp<std::int64_t>(kMostStackedElements / elements, 1, count);
      const DType dtype = update_dtype(*shape.group);
      most_updates[dtype] = std::max(most_updates[dtype], stacked * elements);
      result_.update =
          std::max(result_.update, stacked * orthogonalisation_bytes(*shape.group, shape.rows, shape.cols));
    }
    for (const auto& [dtype, elements] : most_updates) result_.optimizer += 2 * elements * bytes_of(dtype);
  }

  DType update_dtype(const ParameterGroup& group) const {
    if (group.update_dtype) return *group.update_dtype;
    const NewtonSchulzPath path = group.newton_schulz.path;
    const bool exact = path == NewtonSchulzPath::kSvd || path == NewtonSchulzPath::kGramFp32;
    return exact ? DType::kFloat32 : DType::kBFloat16;
  }

  /// What Newton-Schulz holds for one matrix; on the CPU it works in the caller's rows.
  std::int64_t orthogonalisation_bytes(const ParameterGroup& group, std::int64_t rows, std::int64_t cols) const {
    const NewtonSchulzPath path = resolve_newton_schulz_path(group.newton_schulz.path, rows, cols);
    if (device_.is_cpu() || path == NewtonSchulzPath::kSkinny) return 0;
    const std::int64_t element = path == NewtonSchulzPath::kGramFp32 ? 4 : 2;
    const std::int64_t squares = path == NewtonSchulzPath::kStandard ? 2 : 5;
    const std::int64_t padded = round_up(std::min(rows, cols), 64);
    return (2 * round_up(rows, 64) * round_up(cols, 64) + squares * padded * padded) * element;
  }

  const ModelConfig& config_;
  const LlamaOptions& options_;
  const OptimizerOptions& optimizer_;
  Device device_;
  std::int64_t element_;  // bytes of the compute dtype
  std::int64_t q_ = 0, kv_ = 0;
  Linear qkv_proj_, o_proj_, gate_up_proj_, down_proj_;  // of the last block
  std::vector<Trainable> trainable_;
  MemoryEstimate result_;
};

}  // namespace

MemoryEstimate estimate_memory(const ModelConfig& config, const LlamaOptions& options,
                               const OptimizerOptions& optimizer, std::int64_t tokens, Device device) {
  detail::require(tokens >= 1, "estimate_memory: expected tokens >= 1, got {}", tokens);
  return Estimator(config, options, optimizer, device).run(tokens);
}

}  // namespace rowan
