// LoRA adapters in the form that llama.cpp loads.
#pragma once

#include <filesystem>

#include "rowan/io/model_config.h"
#include "rowan/io/peft_adapter.h"

namespace rowan {

/// Writes an adapter as llama.cpp's convert_lora_to_gguf.py does: one GGUF file with general.architecture, general.type
/// "adapter", adapter.type "lora" and adapter.lora.alpha, and for each module blk.N.NAME.weight.lora_a [r, in] and
/// .lora_b [out, r] in `dtype` (float32 or float16, one rounding). For Llama and Mistral the rows of q's and k's B are
/// put in llama.cpp's order, which pairs the two halves of a head for its rotary embedding.
///
/// llama.cpp scales by adapter.lora.alpha / r and knows no other scale. So alpha is chosen such that this is the
/// adapter's scale (s r, which is lora_alpha unless rsLoRA is used), and B takes the rest where modules have different
/// s r or the scale is 0. (adapter.lora.alpha itself is never 0, which llama.cpp reads as a scale of 1.)
///
/// Throws as AdapterFiles::match; Format naming the first key with a value that is not finite, also after rounding;
/// InvalidArgument for another dtype; Io. The old file then stays.
void write_gguf_adapter(const std::filesystem::path& path, const ModelConfig& config, const AdapterFiles& adapter,
                        DType dtype);

}  // namespace rowan
