#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/cuda_check.h"
#include "ops/adamw_backend.h"
#include "ops/piece_search.cuh"
#include "rowan/ops/step_control.h"

namespace rowan::cuda {

namespace {

constexpr int kThreads = 256;

/// The scalars of one parameter's step, made in float64 by one thread of each block.
struct Coefficients {
  float factor, decay, step_size, inverse_root;
};

__device__ Coefficients coefficients(const AdamwPiece& piece) {
  const double lr = piece.rates[0];
  const double t = static_cast<double>(*piece.step);
  Coefficients c;
  c.factor = piece.control ? static_cast<float>(piece.control[StepControl::kFactor]) : 1.0f;
  c.decay = static_cast<float>(lr * piece.rates[1]);
  c.step_size = static_cast<float>(lr / (1.0 - pow(piece.beta1, t)));
  c.inverse_root = static_cast<float>(1.0 / sqrt(1.0 - pow(piece.beta2, t)));
  return c;
}

__global__ void __launch_bounds__(kThreads) adamw_kernel(const AdamwPiece* pieces, std::int64_t piece_count) {
  __shared__ Coefficients shared;
  const std::int64_t chunk = blockIdx.x;
  const AdamwPiece piece = pieces[find_piece(pieces, piece_count, chunk)];
  if (piece.control != nullptr && piece.control[StepControl::kSkip] != 0) return;
  if (threadIdx.x == 0) shared = coefficients(piece);
  __syncthreads();
  const Coefficients c = shared;
  const std::int64_t begin = (chunk - piece.first_chunk) * kAdamwChunk;
  const std::int64_t end = min(begin + kAdamwChunk, piece.elements);
  float* const master = static_cast<float*>(piece.master);
  const float* const gradient = static_cast<const float*>(piece.gradient);
  float* const first_moment = static_cast<float*>(piece.first_moment);
  float* const second_moment = static_cast<float*>(piece.second_moment);
  const float beta1 = static_cast<float>(piece.beta1), one_minus_beta1 = static_cast<float>(1.0 - piece.beta1);
  const float beta2 = static_cast<float>(piece.beta2), one_minus_beta2 = static_cast<float>(1.0 - piece.beta2);
  const float epsilon = static_cast<float>(piece.epsilon);
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    float& p = master[row_offset(i, piece.cols, piece.master_stride)];
    const float g = c.factor * gradient[row_offset(i, piece.cols, piece.gradient_stride)];
    const float m = fmaf(beta1, first_moment[i], one_minus_beta1 * g);
    const float v = fmaf(beta2, second_moment[i], one_minus_beta2 * g * g);
    first_moment[i] = m;
    second_moment[i] = v;
    const float update = c.step_size * m / fmaf(sqrtf(v), c.inverse_root, epsilon);
    const float updated = p - fmaf(c.decay, p, update);
    p = updated;
    if (piece.value == nullptr) continue;
    const std::int64_t offset = row_offset(i, piece.cols, piece.value_stride);
    if (piece.value_is_bfloat16) {
      static_cast<__nv_bfloat16*>(piece.value)[offset] = __float2bfloat16_rn(updated);
    } else {
      static_cast<__half*>(piece.value)[offset] = __float2half_rn(updated);
    }
  }
}

}  // namespace

void adamw(const AdamwBatchArguments& a, StreamRef stream) {
  if (a.chunks == 0) return;
  const DeviceGuard guard(stream.device());
  adamw_kernel<<<static_cast<unsigned>(a.chunks), kThreads, 0, to_cuda(stream)>>>(a.pieces, a.piece_count);
  check_launch("adamw");
}

}  // namespace rowan::cuda
