// Private backend of plain Muon: the same calls for both devices.
#pragma once

#include <cstdint>

#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

struct MuonPrepareArguments {
  const void* gradient = nullptr;
  std::int64_t gradient_stride = 0;
  void* momentum = nullptr;  // contiguous, as is update
  void* update = nullptr;
  std::int64_t cols = 0;
  std::int64_t elements = 0;
  const double* control = nullptr;  // null: factor 1, never skipped
  double mu = 0;
  bool nesterov = true;
  DType dtype = DType::kFloat32;  // of gradient and momentum
  DType update_dtype = DType::kBFloat16;
};

struct MuonFinishArguments {
  void* weight = nullptr;
  const void* update = nullptr;
  void* value = nullptr;  // may be null
  std::int64_t weight_stride = 0;
  std::int64_t update_stride = 0;
  std::int64_t value_stride = 0;
  std::int64_t cols = 0;
  std::int64_t elements = 0;
  const double* rates = nullptr;
  const double* control = nullptr;
  double scale = 0;
  DType dtype = DType::kFloat32;
  DType update_dtype = DType::kBFloat16;
  DType value_dtype = DType::kBFloat16;
};

namespace cpu {
void muon_prepare(const MuonPrepareArguments& arguments);
void muon_finish(const MuonFinishArguments& arguments);
}  // namespace cpu
namespace cuda {
void muon_prepare(const MuonPrepareArguments& arguments, StreamRef stream);
void muon_finish(const MuonFinishArguments& arguments, StreamRef stream);
}  // namespace cuda

}  // namespace rowan
