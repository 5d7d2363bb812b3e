// GGUF files (version 3), the container of llama.cpp and ggml.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "rowan/core/tensor.h"

namespace rowan {

using GgufValue = std::variant<std::uint32_t, float, std::string>;

/// A tensor to be written, made when its turn comes.
struct GgufTensor {
  std::string name;  ///< at most 63 bytes: ggml's limit
  Shape shape;       ///< row-major as everywhere here; the file lists extents in ggml's order, the fastest first
  DType dtype = DType::kFloat32;  ///< float32 or float16
  std::function<Tensor()> make;   ///< a contiguous CPU tensor of that shape and dtype
};

/// Writes a file atomically: metadata in the order given, then tensors, each aligned to 32 bytes. Equal inputs give
/// equal bytes. Throws InvalidArgument for a name that is empty, too long or given twice, for another dtype, a rank
/// that is not 1 to 4, and where `make` returns another tensor than announced; Io when writing fails; the old file then
/// stays.
void write_gguf(const std::filesystem::path& path, std::span<const std::pair<std::string, GgufValue>> metadata,
                std::span<const GgufTensor> tensors);

}  // namespace rowan
