// Rotary position embedding (Su et al., "RoFormer", arXiv 2104.09864) in Hugging Face's half-rotation layout: element j
// of a head is rotated together with element j + head_dim / 2.
#pragma once

#include <cstdint>
#include <vector>

#include "rowan/core/tensor.h"

namespace rowan {

enum class RotaryType {
  kDefault,  ///< the frequencies of theta alone
  kLlama3,   ///< slow frequencies divided by `factor`, a ramp in between (Llama 3.1, `rope_type` "llama3" in
             ///< Transformers)
};

struct RotaryConfig {
  std::int64_t head_dim = 0;  ///< even, >= 2
  double theta = 10000;
  RotaryType type = RotaryType::kDefault;
  // The fields below are read for kLlama3 only.
  double factor = 8;
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  std::int64_t original_max_position = 8192;
};

/// The head_dim / 2 angles per position, by the formulas of Transformers (modeling_rope_utils.py) in float64.
/// Throws InvalidArgument for an odd or non-positive head_dim, and for parameters that give no finite frequencies.
std::vector<double> rotary_frequencies(const RotaryConfig& config);

/// Cosines and sines of position * frequency, computed in float64 on the host: float32 [max_positions, head_dim / 2, 2]
/// on the stream's device, last index 0 the cosine and 1 the sine. Throws InvalidArgument as rotary_frequencies does,
/// or for max_positions < 0.
Tensor rotary_table(const RotaryConfig& config, std::int64_t max_positions, StreamRef stream);

/// Rotates every head of x in place: with (c, s) = table[positions[i], j], h = head_dim / 2,
///   x'[j] = x[j] c - x[j + h] s,   x'[j + h] = x[j + h] c + x[j] s;   `inverse` takes -s and is the backward of the
///   rotation.
/// x [M, heads, head_dim] of a floating dtype, unit last stride, any other strides (a view of a fused buffer);
/// positions int32 [M], contiguous; table from rotary_table. One rounding to x's dtype. A position outside the table:
/// on the CPU InvalidArgument (x untouched); on CUDA that row becomes NaN. Throws InvalidArgument when shapes, dtypes,
/// strides or devices do not fit.
void rotary_apply(Tensor& x, const Tensor& positions, const Tensor& table, StreamRef stream, bool inverse = false);

}  // namespace rowan
