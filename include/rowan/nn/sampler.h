// The next token of a text, picked from a model's logits.
#pragma once

#include <cstdint>

#include "rowan/core/rng.h"
#include "rowan/core/tensor.h"

namespace rowan {

struct SamplingOptions {
  double temperature = 0;  ///< 0: the most likely token, the first of equals
  std::int64_t top_k = 0;  ///< only so many of the most likely tokens; 0: all
  double top_p = 1;        ///< of those, only the fewest most likely whose probabilities reach this sum
  std::uint64_t seed = 0;
};

/// Draws from softmax(logits / temperature), cut by top_k and then by top_p as Transformers does; probabilities in
/// float64. Equal seeds and logits give equal tokens.
class Sampler {
 public:
  /// Throws InvalidArgument for a temperature below 0 or not finite, top_k below 0, or top_p outside (0, 1].
  explicit Sampler(const SamplingOptions& options);

  /// logits [1, vocabulary] of any floating dtype; synchronizes. Throws InvalidArgument when no logit is finite or one
  /// is NaN.
  std::int32_t pick(const Tensor& logits, StreamRef stream);

 private:
  SamplingOptions options_;
  Rng rng_;
};

}  // namespace rowan
