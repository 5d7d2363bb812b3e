// Private backend of cross-entropy: the same call for both devices.
#pragma once

#include <cstdint>

#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

struct CrossEntropyArguments {
  std::int64_t rows = 0;
  std::int64_t classes = 0;
  DType dtype = DType::kFloat32;
  const void* logits = nullptr;
  std::int64_t logits_stride = 0;
  const std::int64_t* labels = nullptr;
  void* losses = nullptr;   ///< float, double for float64
  void* dlogits = nullptr;  ///< null: no gradient
  std::int64_t dlogits_stride = 0;
  double grad_scale = 1;
};

// rows and classes are at least 1.
namespace cpu {
void cross_entropy(const CrossEntropyArguments& arguments);
}
namespace cuda {
void cross_entropy(const CrossEntropyArguments& arguments, StreamRef stream);
}

}  // namespace rowan
