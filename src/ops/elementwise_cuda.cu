#include <algorithm>
#include <initializer_list>

#include "core/cuda_check.h"
#include "ops/block_sum.cuh"
#include "ops/device_types.cuh"
#include "ops/elementwise_backend.h"

namespace rowan::cuda {

namespace {

constexpr int kThreads = 256;

/// Rows and columns in units of packs. Where cols * rows fits 32 bits the division is a 32-bit one.
struct Grid {
  std::int64_t cols = 0;
  std::int64_t total = 0;
};

__device__ inline void locate(const Grid& grid, std::int64_t index, std::int64_t* row, std::int64_t* col) {
  if (grid.total <= 0xFFFFFFFFll) {
    const auto i = static_cast<std::uint32_t>(index), cols = static_cast<std::uint32_t>(grid.cols);
    *row = i / cols;
    *col = i % cols;
  } else {
    *row = index / grid.cols;
    *col = index % grid.cols;
  }
}

template <class T, int kPack>
__device__ inline T* address(const MatrixRef& t, std::int64_t row, std::int64_t col) {
  return static_cast<T*>(t.data) + row * t.row_stride + col * kPack * t.col_stride;
}

/// Calls f(row, pack column) for every pack, grid-strided.
template <class F>
__global__ void __launch_bounds__(kThreads) for_each_kernel(Grid grid, F f) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < grid.total; i += step) {
    std::int64_t row, col;
    locate(grid, i, &row, &col);
    f(row, col);
  }
}

template <class F>
void for_each(std::int64_t rows, std::int64_t cols, const char* op, StreamRef stream, const F& f) {
  const DeviceGuard guard(stream.device());
  const Grid grid{cols, rows * cols};
  const std::int64_t wanted = (grid.total + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(wanted, 32 * multiprocessor_count(stream.device())));
  for_each_kernel<<<blocks, kThreads, 0, to_cuda(stream)>>>(grid, f);
  check_launch(op);
}

constexpr int kPackSize = 4;

/// Whether all matrices can be walked in packs of kPackSize.
bool packable(std::initializer_list<const MatrixRef*> all) {
  for (const MatrixRef* t : all) {
    const std::size_t bytes = kPackSize * size_of(t->dtype);
    if (t->cols % kPackSize != 0 || t->col_stride != 1 || (t->rows > 1 && t->row_stride % kPackSize != 0) ||
        reinterpret_cast<std::uintptr_t>(t->data) % bytes != 0) {
      return false;
    }
  }
  return true;
}

template <class From, class To, int kPack>
struct Cast {
  MatrixRef src, dst;
  __device__ void operator()(std::int64_t row, std::int64_t col) const {
    const auto in = *reinterpret_cast<const Pack<From, kPack>*>(address<From, kPack>(src, row, col));
    Pack<To, kPack> out;
#pragma unroll
    for (int i = 0; i < kPack; ++i) out.value[i] = from_float<To>(to_float(in.value[i]));
    *reinterpret_cast<Pack<To, kPack>*>(address<To, kPack>(dst, row, col)) = out;
  }
};

template <class T, int kPack>
struct Add {
  MatrixRef a, b, out;
  __device__ void operator()(std::int64_t row, std::int64_t col) const {
    const auto left = *reinterpret_cast<const Pack<T, kPack>*>(address<T, kPack>(a, row, col));
    const auto right = *reinterpret_cast<const Pack<T, kPack>*>(address<T, kPack>(b, row, col));
    Pack<T, kPack> result;
#pragma unroll
    for (int i = 0; i < kPack; ++i) result.value[i] = from_float<T>(to_float(left.value[i]) + to_float(right.value[i]));
    *reinterpret_cast<Pack<T, kPack>*>(address<T, kPack>(out, row, col)) = result;
  }
};

template <class T>
struct Fill {
  MatrixRef t;
  float value;
  __device__ void operator()(std::int64_t row, std::int64_t col) const {
    *address<T, 1>(t, row, col) = from_float<T>(value);
  }
};

template <class T>
struct Scale {
  MatrixRef t;
  float factor;
  __device__ void operator()(std::int64_t row, std::int64_t col) const {
    T* const at = address<T, 1>(t, row, col);
    *at = from_float<T>(factor * to_float(*at));
  }
};

template <class T, bool kAdd>
struct RowVector {
  MatrixRef y;
  const T* vector;
  __device__ void operator()(std::int64_t row, std::int64_t col) const {
    T* const at = address<T, 1>(y, row, col);
    *at = kAdd ? from_float<T>(to_float(*at) + to_float(vector[col])) : vector[col];
  }
};

constexpr int kColumns = 32;
constexpr int kRowThreads = kThreads / kColumns;

/// Partial sums of kSumRowsChunk rows: each thread adds every eighth row, then eight threads are added in order.
template <class T>
__global__ void __launch_bounds__(kThreads) sum_rows_kernel(MatrixRef x, std::int64_t column_tiles, float* partial) {
  __shared__ float shared[kRowThreads][kColumns];
  const std::int64_t chunk = blockIdx.x / column_tiles;
  const int lane = static_cast<int>(threadIdx.x) % kColumns, group = static_cast<int>(threadIdx.x) / kColumns;
  const std::int64_t col = blockIdx.x % column_tiles * kColumns + lane;
  const std::int64_t end = min((chunk + 1) * kSumRowsChunk, x.rows);
  float sum = 0;
  if (col < x.cols) {
    for (std::int64_t row = chunk * kSumRowsChunk + group; row < end; row += kRowThreads)
      sum += to_float(*address<T, 1>(x, row, col));
  }
  shared[group][lane] = sum;
  __syncthreads();
  if (group == 0 && col < x.cols) {
    for (int g = 1; g < kRowThreads; ++g) sum += shared[g][lane];
    partial[chunk * x.cols + col] = sum;
  }
}

__global__ void __launch_bounds__(kThreads)
    finish_sum_rows_kernel(const float* partial, std::int64_t chunks, std::int64_t cols, float* out, float beta) {
  const std::int64_t col = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (col >= cols) return;
  float sum = 0;
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) sum += partial[chunk * cols + col];
  out[col] = beta == 0 ? sum : beta * out[col] + sum;
}

template <class T>
__global__ void __launch_bounds__(kThreads) sum_kernel(MatrixRef x, Grid grid, double* partial) {
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kSumChunk,
                     end = min(begin + kSumChunk, grid.total);
  double sum = 0;
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    std::int64_t row, col;
    locate(grid, i, &row, &col);
    sum += to_float(*address<T, 1>(x, row, col));
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) finish_sum_kernel(const double* partial, std::int64_t chunks, double* out) {
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < chunks; i += kThreads) sum += partial[i];
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) *out = sum;
}

}  // namespace

void cast(const MatrixRef& src, const MatrixRef& dst, StreamRef stream) {
  dispatch_device_type(src.dtype, [&](auto from) {
    using From = typename decltype(from)::type;
    dispatch_device_type(dst.dtype, [&](auto to) {
      using To = typename decltype(to)::type;
      if (packable({&src, &dst})) {
        for_each(dst.rows, dst.cols / kPackSize, "cast", stream, Cast<From, To, kPackSize>{src, dst});
      } else {
        for_each(dst.rows, dst.cols, "cast", stream, Cast<From, To, 1>{src, dst});
      }
    });
  });
}

void add(const MatrixRef& a, const MatrixRef& b, const MatrixRef& out, StreamRef stream) {
  dispatch_device_type(out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (packable({&a, &b, &out})) {
      for_each(out.rows, out.cols / kPackSize, "add", stream, Add<T, kPackSize>{a, b, out});
    } else {
      for_each(out.rows, out.cols, "add", stream, Add<T, 1>{a, b, out});
    }
  });
}

void fill(const MatrixRef& t, double value, StreamRef stream) {
  dispatch_device_type(t.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each(t.rows, t.cols, "fill", stream, Fill<T>{t, static_cast<float>(value)});
  });
}

void scale(const MatrixRef& t, double factor, StreamRef stream) {
  dispatch_device_type(t.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each(t.rows, t.cols, "scale", stream, Scale<T>{t, static_cast<float>(factor)});
  });
}

void add_row_vector(const MatrixRef& y, const void* vector, StreamRef stream) {
  dispatch_device_type(y.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each(y.rows, y.cols, "add_row_vector", stream, RowVector<T, true>{y, static_cast<const T*>(vector)});
  });
}

void broadcast_row(const void* vector, const MatrixRef& y, StreamRef stream) {
  dispatch_device_type(y.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_each(y.rows, y.cols, "broadcast_row", stream, RowVector<T, false>{y, static_cast<const T*>(vector)});
  });
}

void sum_rows(const MatrixRef& x, float* partial, float* out, double beta, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  const std::int64_t chunks = sum_rows_chunks(x.rows), tiles = (x.cols + kColumns - 1) / kColumns;
  dispatch_device_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    sum_rows_kernel<T><<<static_cast<unsigned>(chunks * tiles), kThreads, 0, to_cuda(stream)>>>(x, tiles, partial);
  });
  check_launch("sum_rows");
  finish_sum_rows_kernel<<<static_cast<unsigned>((x.cols + kThreads - 1) / kThreads), kThreads, 0, to_cuda(stream)>>>(
      partial, chunks, x.cols, out, static_cast<float>(beta));
  check_launch("sum_rows");
}

void sum(const MatrixRef& x, double* partial, double* out, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  const Grid grid{x.cols, x.rows * x.cols};
  const std::int64_t chunks = sum_chunks(grid.total);
  dispatch_device_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    sum_kernel<T><<<static_cast<unsigned>(chunks), kThreads, 0, to_cuda(stream)>>>(x, grid, partial);
  });
  check_launch("sum");
  finish_sum_kernel<<<1, kThreads, 0, to_cuda(stream)>>>(partial, chunks, out);
  check_launch("sum");
}

}  // namespace rowan::cuda
