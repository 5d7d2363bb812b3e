// Whether two tensors can share elements, for operations whose output must not be one of their inputs. For .cpp files
// only.
#pragma once

#include "core/check.h"

namespace rowan::detail {

/// False only when no element is shared: other storages, disjoint byte ranges, or disjoint columns of one row-strided
/// buffer (the slack of x beside x).
inline bool may_share_elements(const Tensor& a, const Tensor& b) {
  if (!a.overlaps(b)) return false;
  const auto rows_of_buffer = [](const Tensor& t) {
    return t.rank() == 2 && t.size(0) > 1 && (t.size(1) == 1 || t.stride(1) == 1);
  };
  if (!rows_of_buffer(a) || !rows_of_buffer(b)) return true;
  const std::int64_t stride = a.stride(0), size = static_cast<std::int64_t>(size_of(a.dtype()));
  if (b.stride(0) != stride || a.dtype() != b.dtype() || stride < a.size(1) || stride < b.size(1)) return true;
  // Where b's rows begin within the period of a's rows.
  const std::int64_t bytes = static_cast<const std::byte*>(b.raw()) - static_cast<const std::byte*>(a.raw());
  const std::int64_t gap = bytes / size;
  const std::int64_t begin = ((gap % stride) + stride) % stride;
  return begin < a.size(1) || begin + b.size(1) > stride;
}

inline void require_apart(const char* op, const char* output_name, const Tensor& output, const char* input_name,
                          const Tensor& input) {
  require(!may_share_elements(output, input),
          "{}: expected {} and {} not to share memory, got overlapping tensors of shapes {} and {}", op, output_name,
          input_name, output.shape(), input.shape());
}

}  // namespace rowan::detail
