#include <initializer_list>
#include <type_traits>

#include "core/cuda_check.h"
#include "ops/head_view.cuh"
#include "ops/rms_norm_backend.h"
#include "ops/row_reduce.cuh"

namespace rowan::cuda {

namespace {

constexpr int kBlockThreads = 256;
constexpr std::int64_t kWidthOfWarpRows = 4096;  // up to here a warp takes a row, above it a block

/// Calls f(row) for the rows of this thread's group of kThreads.
template <int kThreads, class F>
__device__ void for_rows(std::int64_t rows, F f) {
  constexpr int kRows = kBlockThreads / kThreads;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * kRows + threadIdx.x / kThreads;
  for (std::int64_t row = first; row < rows; row += static_cast<std::int64_t>(gridDim.x) * kRows) f(row);
}

template <class T, int kThreads, int kPack>
__global__ void __launch_bounds__(kBlockThreads) forward_kernel(RmsNormArguments a) {
  __shared__ float shared[kBlockThreads / 32];
  const T* const weight = static_cast<const T*>(a.weight);
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  for_rows<kThreads>(a.tokens * a.heads, [&](std::int64_t row) {
    const T* const x = head_pointer<T>(a.x, row / a.heads, row % a.heads);
    T* const y = head_pointer<T>(a.y, row / a.heads, row % a.heads);
    float squares = 0;
    for (std::int64_t j = thread * kPack; j < a.width; j += kThreads * kPack) {
      const auto in = load_pack<T, kPack>(x + j);
#pragma unroll
      for (int i = 0; i < kPack; ++i) squares += to_float(in.value[i]) * to_float(in.value[i]);
    }
    squares = combine_row<kThreads>(squares, shared, Sum());
    const float rstd = 1.0f / sqrtf(squares / static_cast<float>(a.width) + static_cast<float>(a.eps));
    if (thread == 0) static_cast<float*>(a.rstd)[row] = rstd;
    for (std::int64_t j = thread * kPack; j < a.width; j += kThreads * kPack) {
      auto in = load_pack<T, kPack>(x + j);
      const auto w = load_pack<T, kPack>(weight + j);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        in.value[i] = from_float<T>(to_float(in.value[i]) * rstd * to_float(w.value[i]));
      }
      store_pack<T, kPack>(y + j, in);
    }
  });
}

template <class T, int kThreads, int kPack>
__global__ void __launch_bounds__(kBlockThreads) input_gradient_kernel(RmsNormArguments a) {
  __shared__ float shared[kBlockThreads / 32];
  const T* const weight = static_cast<const T*>(a.weight);
  const int thread = static_cast<int>(threadIdx.x) % kThreads;
  const auto beta = static_cast<float>(a.dx_beta);
  for_rows<kThreads>(a.tokens * a.heads, [&](std::int64_t row) {
    const T* const x = head_pointer<T>(a.x, row / a.heads, row % a.heads);
    const T* const dy = head_pointer<T>(a.dy, row / a.heads, row % a.heads);
    T* const dx = head_pointer<T>(a.dx, row / a.heads, row % a.heads);
    const float rstd = static_cast<const float*>(a.rstd)[row];
    float mean = 0;
    for (std::int64_t j = thread * kPack; j < a.width; j += kThreads * kPack) {
      const auto in = load_pack<T, kPack>(x + j);
      const auto grad = load_pack<T, kPack>(dy + j);
      const auto w = load_pack<T, kPack>(weight + j);
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        mean += to_float(grad.value[i]) * to_float(w.value[i]) * (to_float(in.value[i]) * rstd);
      }
    }
    mean = combine_row<kThreads>(mean, shared, Sum()) / static_cast<float>(a.width);
    for (std::int64_t j = thread * kPack; j < a.width; j += kThreads * kPack) {
      const auto in = load_pack<T, kPack>(x + j);
      auto grad = load_pack<T, kPack>(dy + j);
      const auto w = load_pack<T, kPack>(weight + j);
      float out[kPack];
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        out[i] = rstd * (to_float(grad.value[i]) * to_float(w.value[i]) - to_float(in.value[i]) * rstd * mean);
      }
      if (beta != 0) {
        const auto before = load_pack<T, kPack>(dx + j);
#pragma unroll
        for (int i = 0; i < kPack; ++i) out[i] += beta * to_float(before.value[i]);
      }
#pragma unroll
      for (int i = 0; i < kPack; ++i) grad.value[i] = from_float<T>(out[i]);
      store_pack<T, kPack>(dx + j, grad);
    }
  });
}

constexpr int kColumns = 32;
constexpr int kRowLanes = kBlockThreads / kColumns;

/// One chunk of rows and kColumns columns a block: partials[chunk, column] = sum over the chunk of dy x rstd.
template <class T>
__global__ void __launch_bounds__(kBlockThreads) weight_partial_kernel(RmsNormArguments a, std::int64_t chunk_rows) {
  __shared__ float sums[kRowLanes][kColumns];
  const std::int64_t column_tiles = (a.width + kColumns - 1) / kColumns;
  const std::int64_t chunk = blockIdx.x / column_tiles;
  const int lane = static_cast<int>(threadIdx.x) / kColumns, local = static_cast<int>(threadIdx.x) % kColumns;
  const std::int64_t column = blockIdx.x % column_tiles * kColumns + local;
  const std::int64_t rows = a.tokens * a.heads;
  const std::int64_t end = (chunk + 1) * chunk_rows < rows ? (chunk + 1) * chunk_rows : rows;
  float sum = 0;
  if (column < a.width) {
    for (std::int64_t row = chunk * chunk_rows + lane; row < end; row += kRowLanes) {
      const float x = to_float(head_pointer<T>(a.x, row / a.heads, row % a.heads)[column]);
      const float dy = to_float(head_pointer<T>(a.dy, row / a.heads, row % a.heads)[column]);
      sum += dy * (x * static_cast<const float*>(a.rstd)[row]);
    }
  }
  sums[lane][local] = sum;
  __syncthreads();
  if (lane != 0 || column >= a.width) return;
  for (int l = 1; l < kRowLanes; ++l) sum += sums[l][local];
  static_cast<float*>(a.partials)[chunk * a.width + column] = sum;
}

__global__ void __launch_bounds__(kBlockThreads)
    weight_sum_kernel(const float* partials, std::int64_t chunks, std::int64_t width, float* dweight) {
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * kBlockThreads + threadIdx.x;
  if (column >= width) return;
  double sum = dweight[column];
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) sum += partials[chunk * width + column];
  dweight[column] = static_cast<float>(sum);
}

/// Calls f(constant threads per row, constant pack size).
template <class T, class F>
void with_row_shape(std::int64_t width, bool packs, F&& f) {
  const auto with_pack = [&](auto threads) {
    if (packs) {
      f(threads, std::integral_constant<int, kPackOf<T>>());
    } else {
      f(threads, std::integral_constant<int, 1>());
    }
  };
  if (width <= kWidthOfWarpRows) {
    with_pack(std::integral_constant<int, 32>());
  } else {
    with_pack(std::integral_constant<int, kBlockThreads>());
  }
}

template <class T>
bool packable(const RmsNormArguments& a, std::initializer_list<const HeadView*> views) {
  return allows_packs<T>(a.width, views) && allows_packs<T>(a.weight, {});
}

}  // namespace

void rms_norm_forward(const RmsNormArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  dispatch_device_type(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    with_row_shape<T>(a.width, packable<T>(a, {&a.x, &a.y}), [&](auto threads, auto pack) {
      constexpr int kThreads = decltype(threads)::value, kPack = decltype(pack)::value;
      const unsigned blocks = row_blocks(a.rows(), kBlockThreads / kThreads);
      forward_kernel<T, kThreads, kPack><<<blocks, kBlockThreads, 0, to_cuda(stream)>>>(a);
      check_launch("rms_norm_forward");
    });
  });
}

void rms_norm_backward(const RmsNormArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  dispatch_device_type(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.dweight != nullptr) {  // first: dx may overwrite dy
      const std::int64_t chunks = rms_norm_chunks(a.rows());
      const auto blocks = static_cast<unsigned>(chunks * ((a.width + kColumns - 1) / kColumns));
      weight_partial_kernel<T><<<blocks, kBlockThreads, 0, to_cuda(stream)>>>(a, rms_norm_chunk_rows(a.rows()));
      check_launch("rms_norm_backward");
      const auto sum_blocks = static_cast<unsigned>((a.width + kBlockThreads - 1) / kBlockThreads);
      weight_sum_kernel<<<sum_blocks, kBlockThreads, 0, to_cuda(stream)>>>(
          static_cast<const float*>(a.partials), chunks, a.width, static_cast<float*>(a.dweight));
      check_launch("rms_norm_backward");
    }
    with_row_shape<T>(a.width, packable<T>(a, {&a.x, &a.dy, &a.dx}), [&](auto threads, auto pack) {
      constexpr int kThreads = decltype(threads)::value, kPack = decltype(pack)::value;
      const unsigned blocks = row_blocks(a.rows(), kBlockThreads / kThreads);
      input_gradient_kernel<T, kThreads, kPack><<<blocks, kBlockThreads, 0, to_cuda(stream)>>>(a);
      check_launch("rms_norm_backward");
    });
  });
}

}  // namespace rowan::cuda
