// Loss of a language model's head.
#pragma once

#include <cstdint>

#include "rowan/core/tensor.h"

namespace rowan {

/// Rows with this label count for nothing, as in PyTorch and Transformers.
inline constexpr std::int64_t kIgnoredLabel = -100;

/// losses[i] = log(sum_j exp(logits[i, j])) - logits[i, labels[i]];  dlogits[i, j] = (softmax_j(logits[i, :]) - [j =
/// labels[i]]) grad_scale; both zero in rows whose label is kIgnoredLabel. Labels are already the target of their own
/// row (no shift in here). logits [M, V], V >= 1, of a floating dtype, unit column stride; labels int64 [M],
/// contiguous; losses float32 (float64 when logits are), [M], contiguous. dlogits: null for no gradient, or [M, V] of
/// the dtype of logits, unit column stride; may be logits itself (the same view). Maximum and sum in float32 (float64),
/// one rounding of each gradient. Writes losses and dlogits. A label outside [0, V) that is not kIgnoredLabel: on the
/// CPU InvalidArgument naming it (nothing written); on CUDA, where labels are only known on the device, loss and
/// gradient of that row become NaN. Throws InvalidArgument when shapes, dtypes, strides or devices do not fit, or
/// grad_scale is not finite.
void cross_entropy(const Tensor& logits, const Tensor& labels, Tensor& losses, Tensor* dlogits, double grad_scale,
                   StreamRef stream);

}  // namespace rowan
