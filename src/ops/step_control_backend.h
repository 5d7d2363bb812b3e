// Private backend of the step control: the same calls for both devices.
#pragma once

#include <cstdint>
#include <span>

#include "rowan/core/dtype.h"
#include "rowan/core/stream.h"

namespace rowan {

/// Elements of one gradient; chunks of kSquareSumChunk elements are numbered through all gradients.
struct SquareSumPiece {
  const void* gradient = nullptr;
  const std::int32_t* active = nullptr;  ///< null: always
  std::int64_t cols = 0;
  std::int64_t stride = 0;
  std::int64_t elements = 0;
  std::int64_t first_chunk = 0;
};
inline constexpr std::int64_t kSquareSumChunk = 16384;

struct SquareSumArguments {
  const SquareSumPiece* pieces = nullptr;  ///< on the device
  std::int64_t piece_count = 0;
  std::int64_t chunks = 0;
  double* partial = nullptr;  ///< [chunks]
  DType dtype = DType::kFloat32;
  double* control = nullptr;
  bool accumulate = false;
};

struct AdvanceArguments {
  const double* control = nullptr;
  const std::int32_t* active = nullptr;
  std::int64_t* steps = nullptr;
  double* controls = nullptr;
  std::int64_t count = 0;
};

namespace cpu {
void grad_square_sum(const SquareSumArguments& arguments);
void finish_step_control(double* control, double max_norm);
void count_skipped_step(double* control);
void advance_steps(const AdvanceArguments& arguments);
}  // namespace cpu

namespace cuda {
void grad_square_sum(const SquareSumArguments& arguments, StreamRef stream);
void finish_step_control(double* control, double max_norm, StreamRef stream);
void count_skipped_step(double* control, StreamRef stream);
void advance_steps(const AdvanceArguments& arguments, StreamRef stream);
void write_values(double* destination, std::span<const double> values, StreamRef stream);
void write_values(std::int32_t* destination, std::span<const std::int32_t> values, StreamRef stream);
}  // namespace cuda

}  // namespace rowan
