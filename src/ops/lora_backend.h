// Private backend of the LoRA primitives: the same calls for both devices.
#pragma once

#include <cstdint>

#include "ops/dropout_mask.h"
#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

/// A matrix with adjacent columns; element (i, j) at i * stride + j.
struct LoraMatrix {
  void* data = nullptr;
  std::int64_t stride = 0;
};

/// A factor [r, C] or its gradient: element (k, c) at k * stride + c, or at c * stride + k when transposed.
struct LoraFactor {
  void* data = nullptr;
  std::int64_t stride = 0;
  bool transposed = false;
};

/// All extents at least 1. The mask, when active, is that of the wide matrix and drops some but not all elements.
struct LoraShrinkArguments {
  std::int64_t rows = 0;   ///< M
  std::int64_t width = 0;  ///< C
  std::int64_t rank = 0;
  std::int64_t padded_rank = 0;  ///< columns of out; those from rank on become zero
  LoraMatrix wide, out;
  LoraFactor factor;
  DType dtype = DType::kFloat32;
  double scale = 1;
  MaskArguments mask;
};

struct LoraExpandArguments {
  std::int64_t rows = 0;
  std::int64_t width = 0;
  std::int64_t rank = 0;
  LoraMatrix narrow, out;
  LoraFactor factor;
  DType dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
  bool accumulate = false;
  MaskArguments mask;
};

struct LoraReduceArguments {
  std::int64_t rows = 0;
  std::int64_t width = 0;
  std::int64_t rank = 0;
  LoraMatrix narrow, wide;
  LoraFactor grad;  ///< float32, float64 when dtype is
  DType dtype = DType::kFloat32;
  bool accumulate = false;
  MaskArguments mask;
};

namespace cpu {
void lora_shrink(const LoraShrinkArguments& arguments);
void lora_expand(const LoraExpandArguments& arguments);
void lora_reduce(const LoraReduceArguments& arguments);
}  // namespace cpu

namespace cuda {
/// How a primitive splits its long sum over blocks: each part writes its own partial result, added in order by a second
/// kernel. The streaming kernels only need the workspace from it and plan for themselves (lora_plan.h).
struct LoraSplit {
  std::int64_t parts = 1;
  std::int64_t length = 0;            ///< elements of the sum that one part takes
  std::int64_t workspace_floats = 0;  ///< 0 when there are no partial results
};
LoraSplit lora_shrink_split(const LoraShrinkArguments& arguments, Device device);
LoraSplit lora_reduce_split(const LoraReduceArguments& arguments, Device device);

void lora_shrink(const LoraShrinkArguments& arguments, const LoraSplit& split, float* workspace, StreamRef stream);
void lora_expand(const LoraExpandArguments& arguments, StreamRef stream);
void lora_reduce(const LoraReduceArguments& arguments, const LoraSplit& split, float* workspace, StreamRef stream);

/// Which kernels serve 16-bit types: the streaming ones where the device has what they need, or the plain ones. For
/// tests of the plain ones on such a device; not thread-safe.
void prefer_plain_lora_kernels(bool prefer) noexcept;
/// Whether a shrink and a reduce of one wide matrix run as one pass over it.
bool lora_shares_pass(const LoraShrinkArguments& shrink, Device device);
std::int64_t lora_shrink_reduce_workspace(const LoraShrinkArguments& shrink, const LoraReduceArguments& reduce,
                                          Device device);
void lora_shrink_reduce(const LoraShrinkArguments& shrink, const LoraReduceArguments& reduce, float* workspace,
                        StreamRef stream);
}  // namespace cuda

}  // namespace rowan
