#include "core/cuda_check.h"
#include "ops/adamw_backend.h"
#include "ops/device_types.cuh"
#include "ops/piece_search.cuh"
#include "rowan/ops/step_control.h"

namespace rowan::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kQuad = 4;

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

/// One parameter as its threads step it.
struct Step {
  const AdamwPiece& piece;
  Coefficients c;
  float beta1, one_minus_beta1, beta2, one_minus_beta2, epsilon;

  __device__ Step(const AdamwPiece& p, const Coefficients& coefficients)
      : piece(p),
        c(coefficients),
        beta1(static_cast<float>(p.beta1)),
        one_minus_beta1(static_cast<float>(1.0 - p.beta1)),
        beta2(static_cast<float>(p.beta2)),
        one_minus_beta2(static_cast<float>(1.0 - p.beta2)),
        epsilon(static_cast<float>(p.epsilon)) {}

  /// Updates the moments; returns the new weight.
  __device__ float element(float weight, float gradient, float& m, float& v) const {
    const float g = c.factor * gradient;
    m = fmaf(beta1, m, one_minus_beta1 * g);
    v = fmaf(beta2, v, one_minus_beta2 * g * g);
    const float update = c.step_size * m / fmaf(sqrtf(v), c.inverse_root, epsilon);
    return weight - fmaf(c.decay, weight, update);
  }

  /// kCount adjacent elements of a row, from element i on.
  template <int kCount>
  struct Group {
    Pack<float, kCount> weight, gradient, m, v;
  };
  template <int kCount>
  __device__ Pack<float, kCount>& pack_at(void* data, std::int64_t offset) const {
    return *reinterpret_cast<Pack<float, kCount>*>(static_cast<float*>(data) + offset);
  }
  template <int kCount>
  __device__ Group<kCount> load(std::int64_t i) const {
    const std::int64_t offset = row_offset(i, piece.cols, piece.gradient_stride);
    Group<kCount> x;
    x.weight = pack_at<kCount>(piece.master, row_offset(i, piece.cols, piece.master_stride));
    x.gradient = *reinterpret_cast<const Pack<float, kCount>*>(static_cast<const float*>(piece.gradient) + offset);
    x.m = pack_at<kCount>(piece.first_moment, i);
    x.v = pack_at<kCount>(piece.second_moment, i);
    return x;
  }
  template <int kCount>
  __device__ void run(std::int64_t i, Group<kCount>& x) const {
#pragma unroll
    for (int e = 0; e < kCount; ++e)
      x.weight.value[e] = element(x.weight.value[e], x.gradient.value[e], x.m.value[e], x.v.value[e]);
    pack_at<kCount>(piece.master, row_offset(i, piece.cols, piece.master_stride)) = x.weight;
    pack_at<kCount>(piece.first_moment, i) = x.m;
    pack_at<kCount>(piece.second_moment, i) = x.v;
    if (piece.value == nullptr) return;
    if (piece.value_is_bfloat16) {
      store_value<__nv_bfloat16, kCount>(i, x.weight);
    } else {
      store_value<__half, kCount>(i, x.weight);
    }
  }
  template <class T, int kCount>
  __device__ void store_value(std::int64_t i, const Pack<float, kCount>& weight) const {
    Pack<T, kCount> value;
#pragma unroll
    for (int e = 0; e < kCount; ++e) value.value[e] = from_float<T>(weight.value[e]);
    T* const to = static_cast<T*>(piece.value) + row_offset(i, piece.cols, piece.value_stride);
    *reinterpret_cast<Pack<T, kCount>*>(to) = value;
  }
};

/// Whether groups of four of every row lie in one row and where they can be moved at once.
__device__ bool fits_quads(const AdamwPiece& p) {
  const auto fits = [](const void* data, std::int64_t stride, std::uintptr_t bytes) {
    return reinterpret_cast<std::uintptr_t>(data) % bytes == 0 && stride % kQuad == 0;
  };
  return p.cols % kQuad == 0 && fits(p.master, p.master_stride, 16) && fits(p.gradient, p.gradient_stride, 16) &&
         fits(p.first_moment, 0, 16) && fits(p.second_moment, 0, 16) &&
         (p.value == nullptr || fits(p.value, p.value_stride, 8));
}

__global__ void __launch_bounds__(kThreads) adamw_kernel(const AdamwPiece* pieces, std::int64_t piece_count) {
  __shared__ Coefficients shared;
  const std::int64_t chunk = blockIdx.x;
  const AdamwPiece piece = pieces[find_piece(pieces, piece_count, chunk)];
  if (piece.control != nullptr && piece.control[StepControl::kSkip] != 0) return;
  if (threadIdx.x == 0) shared = coefficients(piece);
  __syncthreads();
  const Step step(piece, shared);
  const std::int64_t begin = (chunk - piece.first_chunk) * kAdamwChunk;
  const std::int64_t end = min(begin + kAdamwChunk, piece.elements);
  if (fits_quads(piece)) {  // the chunk's bounds are multiples of four then
    constexpr std::int64_t kStride = kThreads * kQuad;
    for (std::int64_t i = begin + threadIdx.x * kQuad; i < end; i += 2 * kStride) {
      auto first = step.load<kQuad>(i);
      const bool two = i + kStride < end;
      auto second = step.load<kQuad>(two ? i + kStride : i);  // both are on their way before the first is stepped
      step.run(i, first);
      if (two) step.run(i + kStride, second);
    }
  } else {
    for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
      auto one = step.load<1>(i);
      step.run(i, one);
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
