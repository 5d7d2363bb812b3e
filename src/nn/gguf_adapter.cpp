#include "rowan/nn/gguf_adapter.h"

#include <array>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/dispatch.h"
#include "rowan/io/gguf.h"
#include "rowan/nn/llama_files.h"

namespace rowan {

namespace {

const char* gguf_architecture(const ModelConfig& config) {
  if (config.architecture == "Qwen2ForCausalLM") return "qwen2";
  if (config.architecture == "Qwen3ForCausalLM") return "qwen3";
  return "llama";  // Mistral too
}

/// "model.layers.3.self_attn.q_proj" -> "blk.3.attn_q".
std::string gguf_module(std::string_view module) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 7> kNames = {
      {{".self_attn.q_proj", "attn_q"},
       {".self_attn.k_proj", "attn_k"},
       {".self_attn.v_proj", "attn_v"},
       {".self_attn.o_proj", "attn_output"},
       {".mlp.gate_proj", "ffn_gate"},
       {".mlp.up_proj", "ffn_up"},
       {".mlp.down_proj", "ffn_down"}}};
  constexpr std::string_view kBlocks = "model.layers.";
  for (const auto& [from, to] : kNames) {
    if (!module.starts_with(kBlocks) || !module.ends_with(from)) continue;
    const std::string_view block = module.substr(kBlocks.size(), module.size() - kBlocks.size() - from.size());
    return fmt::format("blk.{}.{}", block, to);
  }
  detail::fail(ErrorKind::kUnsupported, "write_gguf_adapter: {} has no name in llama.cpp", module);
}

/// The row that llama.cpp has at `row`: inside a head its rotary embedding turns neighbours, where Transformers turns
/// the two halves.
std::int64_t source_row(std::int64_t row, std::int64_t head_dim) {
  const std::int64_t head = row / head_dim, in_head = row % head_dim;
  return head * head_dim + in_head % 2 * (head_dim / 2) + in_head / 2;
}

/// A factor times `scale` in `dtype`, its rows in llama.cpp's order for heads of head_dim (0: as they are).
Tensor converted(const AdapterFiles& adapter, const std::string& key, double scale, std::int64_t head_dim,
                 DType dtype) {
  const Tensor source = adapter.file().load(key, DType::kFloat64, StreamRef());
  const Tensor result = Tensor::empty(source.shape(), dtype, StreamRef());
  const std::int64_t rows = source.size(0), columns = source.size(1);
  detail::dispatch_floating(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (std::int64_t i = 0; i < rows; ++i) {
      const double* const from = source.data<double>() + (head_dim == 0 ? i : source_row(i, head_dim)) * columns;
      T* const to = result.data<T>() + i * columns;
      for (std::int64_t j = 0; j < columns; ++j) {
        to[j] = static_cast<T>(scale * from[j]);
        if (std::isfinite(static_cast<double>(to[j]))) continue;
        detail::fail(ErrorKind::kFormat, "{}: key {}: a value is not finite in {}", adapter.file().path().string(), key,
                     dtype);
      }
    }
  });
  return result;
}

/// alpha / r is llama.cpp's scale: the alpha that fits the first module whose scale is not 0.
double alpha_of(const std::vector<AdapterTarget>& targets) {
  for (const AdapterTarget& target : targets) {
    if (target.scale != 0) return target.scale * static_cast<double>(target.r);
  }
  return 1;
}

}  // namespace

void write_gguf_adapter(const std::filesystem::path& path, const ModelConfig& config, const AdapterFiles& adapter,
                        DType dtype) {
  const std::vector<LinearShape> linears = linear_shapes(config);
  const std::vector<AdapterTarget> targets = adapter.match(linears);
  const double alpha = alpha_of(targets);
  const bool permuted = std::string_view(gguf_architecture(config)) == "llama";

  std::vector<GgufTensor> tensors;
  for (const AdapterTarget& target : targets) {
    const AdapterFiles::Keys keys = AdapterFiles::keys_of(target.module);
    const auto add = [&](const char* suffix, const std::string& key, double scale, std::int64_t head_dim) {
      const Shape shape(std::span<const std::int64_t>(adapter.file().at(key).shape));
      tensors.push_back({gguf_module(target.module) + suffix, shape, dtype,
                         [=, &adapter] { return converted(adapter, key, scale, head_dim, dtype); }});
    };
    const bool q_or_k = target.module.ends_with(".q_proj") || target.module.ends_with(".k_proj");
    add(".weight.lora_a", keys.lora_a, 1, 0);
    add(".weight.lora_b", keys.lora_b, target.scale * static_cast<double>(target.r) / alpha,
        permuted && q_or_k ? config.head_dim : 0);
  }
  const std::vector<std::pair<std::string, GgufValue>> metadata = {
      {"general.architecture", gguf_architecture(config)},
      {"general.type", "adapter"},
      {"adapter.type", "lora"},
      {"general.file_type", dtype == DType::kFloat32 ? 0u : 1u},  // all float32, mostly float16
      {"general.quantization_version", 2u},
      {"adapter.lora.alpha", static_cast<float>(alpha)}};
  write_gguf(path, metadata, tensors);
}

}  // namespace rowan
