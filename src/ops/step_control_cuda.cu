#include <algorithm>

#include "core/cuda_check.h"
#include "ops/block_sum.cuh"
#include "ops/device_types.cuh"
#include "ops/piece_search.cuh"
#include "ops/step_control_backend.h"
#include "ops/step_control_math.h"

namespace rowan::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kQuad = 4;

__device__ double square(double x) { return x * x; }

/// Whether groups of four lie in one row, where they can be read at once.
__device__ bool fits_quads(const SquareSumPiece& p) {
  return p.cols % kQuad == 0 && p.stride % kQuad == 0 &&
         reinterpret_cast<std::uintptr_t>(p.gradient) % sizeof(Pack<float, kQuad>) == 0;
}

__global__ void __launch_bounds__(kThreads)
    square_sum_kernel(const SquareSumPiece* pieces, std::int64_t piece_count, double* partial) {
  const std::int64_t chunk = blockIdx.x;
  const SquareSumPiece piece = pieces[find_piece(pieces, piece_count, chunk)];
  double sum = 0;
  if (piece.active == nullptr || *piece.active != 0) {
    const float* const gradient = static_cast<const float*>(piece.gradient);
    const std::int64_t begin = (chunk - piece.first_chunk) * kSquareSumChunk;
    const std::int64_t end = min(begin + kSquareSumChunk, piece.elements);
    if (fits_quads(piece)) {
#pragma unroll 4
      for (std::int64_t i = begin + threadIdx.x * kQuad; i < end; i += kThreads * kQuad) {
        const auto g = *reinterpret_cast<const Pack<float, kQuad>*>(gradient + row_offset(i, piece.cols, piece.stride));
#pragma unroll
        for (int e = 0; e < kQuad; ++e) sum += square(g.value[e]);
      }
    } else {
      for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads)
        sum += square(gradient[row_offset(i, piece.cols, piece.stride)]);
    }
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) partial[chunk] = sum;
}

__global__ void __launch_bounds__(kThreads)
    total_kernel(const double* partial, std::int64_t chunks, double* control, bool accumulate) {
  double sum = 0;
  for (std::int64_t c = threadIdx.x; c < chunks; c += kThreads) sum += partial[c];
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) control[StepControl::kSquareSum] = (accumulate ? control[StepControl::kSquareSum] : 0.0) + sum;
}

__global__ void finish_kernel(double* control, double max_norm) { detail::finish_step_control(control, max_norm); }

__global__ void skip_kernel(double* control) { detail::count_skipped_step(control); }

__global__ void __launch_bounds__(kThreads) advance_kernel(AdvanceArguments a) {
  const std::int64_t p = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (p < a.count) detail::advance_step(a.control, a.active[p] != 0, a.steps + p, a.controls + 4 * p);
}

/// Kernel arguments may take 4 KiB; this leaves room for the others.
constexpr std::size_t kValueBytes = 2048;

template <class T>
struct Values {
  T value[kValueBytes / sizeof(T)];
};

template <class T>
__global__ void __launch_bounds__(kThreads) write_kernel(T* destination, Values<T> values, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) destination[i] = values.value[i];
}

template <class T>
void write(T* destination, std::span<const T> values, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  constexpr std::size_t kMost = kValueBytes / sizeof(T);
  for (std::size_t begin = 0; begin < values.size(); begin += kMost) {
    const std::size_t count = std::min(kMost, values.size() - begin);
    Values<T> part{};
    std::copy_n(values.data() + begin, count, part.value);
    write_kernel<<<1, kThreads, 0, to_cuda(stream)>>>(destination + begin, part, static_cast<int>(count));
    check_launch("write_values");
  }
}

}  // namespace

void grad_square_sum(const SquareSumArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  if (a.chunks > 0) {
    square_sum_kernel<<<static_cast<unsigned>(a.chunks), kThreads, 0, to_cuda(stream)>>>(a.pieces, a.piece_count,
                                                                                         a.partial);
    check_launch("grad_square_sum");
  }
  total_kernel<<<1, kThreads, 0, to_cuda(stream)>>>(a.partial, a.chunks, a.control, a.accumulate);
  check_launch("grad_square_sum");
}

void finish_step_control(double* control, double max_norm, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  finish_kernel<<<1, 1, 0, to_cuda(stream)>>>(control, max_norm);
  check_launch("finish_step_control");
}

void count_skipped_step(double* control, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  skip_kernel<<<1, 1, 0, to_cuda(stream)>>>(control);
  check_launch("count_skipped_step");
}

void advance_steps(const AdvanceArguments& a, StreamRef stream) {
  if (a.count == 0) return;
  const DeviceGuard guard(stream.device());
  advance_kernel<<<static_cast<unsigned>((a.count + kThreads - 1) / kThreads), kThreads, 0, to_cuda(stream)>>>(a);
  check_launch("advance_steps");
}

void write_values(double* destination, std::span<const double> values, StreamRef stream) {
  write(destination, values, stream);
}

void write_values(std::int32_t* destination, std::span<const std::int32_t> values, StreamRef stream) {
  write(destination, values, stream);
}

}  // namespace rowan::cuda
