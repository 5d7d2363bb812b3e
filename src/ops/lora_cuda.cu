// The LoRA primitives as tiled products with one long and one short side: float32 on fused multiply-adds (IEEE
// float32), and 16-bit types on tensor cores with float32 sums, where the device does not run the streaming kernels of
// lora_mma.cuh. Any rank, size, row stride and alignment.
#include <mma.h>

#include <algorithm>
#include <type_traits>

#include "core/cuda_check.h"
#include "ops/device_types.cuh"
#include "ops/lora_backend.h"
#include "ops/lora_mma.h"
#include "ops/lora_plan.h"
#include "ops/tile_order.h"

namespace rowan::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kRowTile = 64;                     ///< rows of an activation that a block takes in shrink and expand
constexpr int kColumnTile = 64;                  ///< columns of the wide matrix that a block takes in reduce and expand
constexpr int kNarrowRank = 16, kWideRank = 64;  ///< rank tiles: the first where the whole rank fits in it
constexpr int kExpandDepth = 16;
constexpr std::int64_t kTilesPerGroup = 8;

/// Elements of a long sum that are in shared memory at a time.
template <class T>
constexpr int kSumDepth = sizeof(T) == 2 ? 64 : 32;

/// Which index of an operand runs through adjacent memory: the one that is summed over, or the row or column of the
/// result.
enum class Adjacent { kSum, kSide };

/// An operand in global memory: rows of adjacent elements.
template <class T>
struct Source {
  const T* data = nullptr;
  std::int64_t stride = 0;
  std::int64_t outer_end = 0;  ///< rows to read
  std::int64_t inner_end = 0;  ///< elements of each row to read
  bool aligned = false;        ///< 16-byte loads are possible

  Source(const void* pointer, std::int64_t row_stride, std::int64_t outer, std::int64_t inner)
      : data(static_cast<const T*>(pointer)),
        stride(row_stride),
        outer_end(outer),
        inner_end(inner),
        aligned(reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0 &&
                row_stride * static_cast<std::int64_t>(sizeof(T)) % 16 == 0) {}
};

/// A tile of kSide x kDepth elements (result index x summed index) on its way from global to shared memory, where it
/// keeps the orientation it has in global memory. Elements outside the operand read as zero.
template <class T, Adjacent kAdjacent, int kSide, int kDepth>
class Tile {
 public:
  static constexpr bool kAlongSum = kAdjacent == Adjacent::kSum;
  static constexpr int kOuter = kAlongSum ? kSide : kDepth, kInner = kAlongSum ? kDepth : kSide;
  static constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
  static constexpr int kPitch = kInner + kChunk;  ///< the extra chunk spreads rows over the banks
  static constexpr int kElements = kOuter * kPitch;

  /// Reads the tile at (side, sum) into registers.
  __device__ void fetch(const Source<T>& source, std::int64_t side, std::int64_t sum) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const std::int64_t outer = (kAlongSum ? side : sum) + outer_of(i), inner = (kAlongSum ? sum : side) + inner_of(i);
      const T* const from = source.data + outer * source.stride + inner;
      if (source.aligned && outer < source.outer_end && inner + kChunk <= source.inner_end) {
        held_[i] = *reinterpret_cast<const Pack<T, kChunk>*>(from);
      } else {
#pragma unroll
        for (int e = 0; e < kChunk; ++e) {
          held_[i].value[e] = outer < source.outer_end && inner + e < source.inner_end ? from[e] : from_float<T>(0.0f);
        }
      }
    }
  }

  /// Zeroes what the mask drops: the operand is the masked matrix, `width` columns wide.
  __device__ void drop(const MaskWords& words, std::int64_t side, std::int64_t sum, std::int64_t width) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const std::int64_t outer = (kAlongSum ? side : sum) + outer_of(i), inner = (kAlongSum ? sum : side) + inner_of(i);
      const unsigned bits = words.keep_bits(static_cast<std::uint64_t>(outer * width + inner), kChunk);
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        if ((bits >> e & 1u) == 0) held_[i].value[e] = from_float<T>(0.0f);
      }
    }
  }

  __device__ void put(T* shared) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      *reinterpret_cast<Pack<T, kChunk>*>(shared + outer_of(i) * kPitch + inner_of(i)) = held_[i];
    }
  }

  /// Element (side, sum) of a tile in shared memory.
  __device__ static T at(const T* shared, int side, int sum) {
    return kAlongSum ? shared[side * kPitch + sum] : shared[sum * kPitch + side];
  }
  /// Where that element is.
  __device__ static const T* address(const T* shared, int side, int sum) {
    return shared + (kAlongSum ? side * kPitch + sum : sum * kPitch + side);
  }

 private:
  static constexpr int kChunksPerRow = kInner / kChunk;
  static constexpr int kPerThread = kOuter * kChunksPerRow / kThreads;
  static_assert(kPerThread * kThreads == kOuter * kChunksPerRow, "chunks are dealt evenly to the threads");

  __device__ static int outer_of(int i) { return (static_cast<int>(threadIdx.x) + i * kThreads) / kChunksPerRow; }
  __device__ static int inner_of(int i) {
    return (static_cast<int>(threadIdx.x) + i * kThreads) % kChunksPerRow * kChunk;
  }

  Pack<T, kChunk> held_[kPerThread];
};

/// Sums of a kRows x kCols tile of a b, in float32 on fused multiply-adds.
template <class T, int kRows, int kCols, class TileA, class TileB, int kDepth>
class Sums {
  static constexpr int kThreadRows = kRows >= 64 ? 16 : 8, kThreadCols = kThreads / kThreadRows;
  static constexpr int kDown = kRows / kThreadRows, kAcross = kCols / kThreadCols;

 public:
  __device__ void add(const T* a, const T* b) {
    const int row = static_cast<int>(threadIdx.x) / kThreadCols, col = static_cast<int>(threadIdx.x) % kThreadCols;
#pragma unroll 8
    for (int k = 0; k < kDepth; ++k) {
      float left[kDown], right[kAcross];
#pragma unroll
      for (int i = 0; i < kDown; ++i) left[i] = TileA::at(a, row + i * kThreadRows, k);
#pragma unroll
      for (int j = 0; j < kAcross; ++j) right[j] = TileB::at(b, col + j * kThreadCols, k);
#pragma unroll
      for (int i = 0; i < kDown; ++i) {
#pragma unroll
        for (int j = 0; j < kAcross; ++j) sum_[i][j] = fmaf(left[i], right[j], sum_[i][j]);
      }
    }
  }

  __device__ void put(float* out, int pitch) const {
    const int row = static_cast<int>(threadIdx.x) / kThreadCols, col = static_cast<int>(threadIdx.x) % kThreadCols;
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int j = 0; j < kAcross; ++j) out[(row + i * kThreadRows) * pitch + col + j * kThreadCols] = sum_[i][j];
    }
  }

 private:
  float sum_[kDown][kAcross] = {};
};

/// The same on tensor cores.
template <class T, int kRows, int kCols, class TileA, class TileB, int kDepth>
requires(sizeof(T) == 2) class Sums<T, kRows, kCols, TileA, TileB, kDepth> {
  static constexpr int kSize = 16;
  static constexpr int kWarpsDown = kRows / kSize < kWarps ? kRows / kSize : kWarps, kWarpsAcross = kWarps / kWarpsDown;
  static constexpr int kDown = kRows / kWarpsDown / kSize, kAcross = kCols / kWarpsAcross / kSize;
  using LayoutA = std::conditional_t<TileA::kAlongSum, nvcuda::wmma::row_major, nvcuda::wmma::col_major>;
  using LayoutB = std::conditional_t<TileB::kAlongSum, nvcuda::wmma::col_major, nvcuda::wmma::row_major>;

 public:
  __device__ Sums() {
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int j = 0; j < kAcross; ++j) nvcuda::wmma::fill_fragment(sum_[i][j], 0.0f);
    }
  }

  __device__ void add(const T* a, const T* b) {
#pragma unroll
    for (int k = 0; k < kDepth; k += kSize) {
      nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, kSize, kSize, kSize, T, LayoutA> left[kDown];
#pragma unroll
      for (int i = 0; i < kDown; ++i)
        nvcuda::wmma::load_matrix_sync(left[i], TileA::address(a, row() + i * kSize, k), TileA::kPitch);
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, kSize, kSize, kSize, T, LayoutB> right;
        nvcuda::wmma::load_matrix_sync(right, TileB::address(b, col() + j * kSize, k), TileB::kPitch);
#pragma unroll
        for (int i = 0; i < kDown; ++i) nvcuda::wmma::mma_sync(sum_[i][j], left[i], right, sum_[i][j]);
      }
    }
  }

  __device__ void put(float* out, int pitch) const {
#pragma unroll
    for (int i = 0; i < kDown; ++i) {
#pragma unroll
      for (int j = 0; j < kAcross; ++j) {
        float* const at = out + (row() + i * kSize) * pitch + col() + j * kSize;
        nvcuda::wmma::store_matrix_sync(at, sum_[i][j], static_cast<unsigned>(pitch), nvcuda::wmma::mem_row_major);
      }
    }
  }

 private:
  __device__ static int row() { return static_cast<int>(threadIdx.x) / 32 / kWarpsAcross * kDown * kSize; }
  __device__ static int col() { return static_cast<int>(threadIdx.x) / 32 % kWarpsAcross * kAcross * kSize; }

  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, kSize, kSize, kSize, float> sum_[kDown][kAcross];
};

/// One block's product: result (kRows x kCols, float32) of a's tile rows and b's tile columns over the sum [begin,
/// end).
template <class T, int kRows, int kCols, int kDepth, Adjacent kAdjacentA, Adjacent kAdjacentB>
class BlockProduct {
  using TileA = Tile<T, kAdjacentA, kRows, kDepth>;
  using TileB = Tile<T, kAdjacentB, kCols, kDepth>;

 public:
  static constexpr int kPitch = kCols + 4;
  /// The tiles during the sum, the result afterwards.
  union Shared {
    struct {
      alignas(128) unsigned char a[TileA::kElements * sizeof(T)];
      alignas(128) unsigned char b[TileB::kElements * sizeof(T)];
    } tiles;
    alignas(128) float result[kRows * kPitch];
  };
  enum class Masked { kNone, kA, kB };

  /// Leaves the sums in shared.result; all threads may read them on return.
  template <Masked kMasked>
  __device__ static void run(const Source<T>& a, const Source<T>& b, std::int64_t row, std::int64_t col,
                             std::int64_t begin, std::int64_t end, const MaskArguments& mask, std::int64_t mask_width,
                             Shared& shared) {
    T *const shared_a = reinterpret_cast<T*>(shared.tiles.a), *const shared_b = reinterpret_cast<T*>(shared.tiles.b);
    TileA tile_a;
    TileB tile_b;
    const MaskWords words(mask);
    const auto fetch = [&](std::int64_t sum) {
      tile_a.fetch(a, row, sum);
      tile_b.fetch(b, col, sum);
      if (kMasked == Masked::kA && mask.active) tile_a.drop(words, row, sum, mask_width);
      if (kMasked == Masked::kB && mask.active) tile_b.drop(words, col, sum, mask_width);
    };
    Sums<T, kRows, kCols, TileA, TileB, kDepth> sums;
    fetch(begin);
    for (std::int64_t sum = begin; sum < end; sum += kDepth) {
      tile_a.put(shared_a);
      tile_b.put(shared_b);
      __syncthreads();
      if (sum + kDepth < end) fetch(sum + kDepth);  // in flight while the tiles in shared memory are used
      sums.add(shared_a, shared_b);
      __syncthreads();
    }
    sums.put(shared.result, kPitch);
    __syncthreads();
  }
};

__host__ __device__ std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// Parts of a long sum: enough blocks to keep the device's memory busy, each with at least `least` elements.
LoraSplit split_sum(std::int64_t tiles, std::int64_t length, std::int64_t depth, std::int64_t result_elements,
                    Device device) {
  const std::int64_t processors = multiprocessor_count(device);
  LoraSplit split{1, length, 0};
  if (tiles >= 2 * processors) return split;
  const std::int64_t wanted = std::min(ceil_div(4 * processors, tiles), ceil_div(length, 4 * depth));
  if (wanted <= 1) return split;
  split.length = ceil_div(ceil_div(length, wanted), depth) * depth;
  split.parts = ceil_div(length, split.length);
  split.workspace_floats = split.parts > 1 ? split.parts * result_elements : 0;
  return split;
}

std::int64_t rank_tile(std::int64_t rank) { return rank <= kNarrowRank ? kNarrowRank : kWideRank; }

dim3 blocks(std::int64_t count) { return dim3(static_cast<unsigned>(count)); }

// ---- shrink: out[M, r] = scale (mask o wide)[M, C] factor^T[C, r] --------------------------------------------------

template <class T>
__device__ void clear_padding(const LoraShrinkArguments& a, std::int64_t row, std::int64_t rows) {
  const std::int64_t padding = a.padded_rank - a.rank;
  for (std::int64_t i = threadIdx.x; i < rows * padding; i += kThreads) {
    static_cast<T*>(a.out.data)[(row + i / padding) * a.out.stride + a.rank + i % padding] = from_float<T>(0.0f);
  }
}

template <class T, int kRank, Adjacent kAdjacentFactor>
__global__ void __launch_bounds__(kThreads)
    shrink_kernel(LoraShrinkArguments a, Source<T> wide, Source<T> factor, LoraSplit split, float* partial) {
  using Product = BlockProduct<T, kRowTile, kRank, kSumDepth<T>, Adjacent::kSum, kAdjacentFactor>;
  __shared__ typename Product::Shared shared;
  const std::int64_t rank_tiles = ceil_div(a.rank, kRank), row_tiles = ceil_div(a.rows, kRowTile);
  const std::int64_t rank = blockIdx.x % rank_tiles * kRank;
  const std::int64_t row = blockIdx.x / rank_tiles % row_tiles * kRowTile;
  const std::int64_t part = blockIdx.x / (rank_tiles * row_tiles);
  const std::int64_t begin = part * split.length, end = min(begin + split.length, a.width);
  wide.inner_end = end;
  (kAdjacentFactor == Adjacent::kSum ? factor.inner_end : factor.outer_end) = end;
  Product::template run<Product::Masked::kA>(wide, factor, row, rank, begin, end, a.mask, a.width, shared);

  const std::int64_t rows = min(static_cast<std::int64_t>(kRowTile), a.rows - row),
                     ranks = min(static_cast<std::int64_t>(kRank), a.rank - rank);
  const auto scale = static_cast<float>(a.scale * a.mask.factor);
  for (int i = static_cast<int>(threadIdx.x); i < kRowTile * kRank; i += kThreads) {
    const int r = i / kRank, k = i % kRank;
    if (r >= rows || k >= ranks) continue;
    const float sum = shared.result[r * Product::kPitch + k];
    if (split.parts > 1) {
      partial[(part * a.rows + row + r) * a.rank + rank + k] = sum;
    } else {
      static_cast<T*>(a.out.data)[(row + r) * a.out.stride + rank + k] = from_float<T>(scale * sum);
    }
  }
  if (split.parts == 1 && rank + kRank >= a.rank) clear_padding<T>(a, row, rows);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_shrink_kernel(LoraShrinkArguments a, std::int64_t parts, const float* partial) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.rows * a.padded_rank) return;
  const std::int64_t row = i / a.padded_rank, k = i % a.padded_rank;
  float sum = 0;
  if (k < a.rank) {
    for (std::int64_t part = 0; part < parts; ++part) sum += partial[(part * a.rows + row) * a.rank + k];
    sum *= static_cast<float>(a.scale * a.mask.factor);
  }
  static_cast<T*>(a.out.data)[row * a.out.stride + k] = from_float<T>(sum);
}

template <class T, int kRank>
void launch_shrink(const LoraShrinkArguments& a, const LoraSplit& split, float* workspace, cudaStream_t stream) {
  const dim3 grid = blocks(split.parts * ceil_div(a.rows, kRowTile) * ceil_div(a.rank, kRank));
  const Source<T> wide(a.wide.data, a.wide.stride, a.rows, a.width);
  if (a.factor.transposed) {
    const Source<T> factor(a.factor.data, a.factor.stride, a.width, a.rank);
    shrink_kernel<T, kRank, Adjacent::kSide><<<grid, kThreads, 0, stream>>>(a, wide, factor, split, workspace);
  } else {
    const Source<T> factor(a.factor.data, a.factor.stride, a.rank, a.width);
    shrink_kernel<T, kRank, Adjacent::kSum><<<grid, kThreads, 0, stream>>>(a, wide, factor, split, workspace);
  }
}

// ---- expand: out[M, C] = mask o (narrow[M, r] factor[r, C]) + beta out
// -----------------------------------------------

/// Writes `count` adjacent results of one row.
template <class Out>
__device__ void write_run(const LoraExpandArguments& a, std::int64_t row, std::int64_t col, int count,
                          const float* values, bool aligned) {
  constexpr int kRun = 4;
  Out* const out = static_cast<Out*>(a.out.data) + row * a.out.stride + col;
  if (aligned && count == kRun) {
    auto* const pack = reinterpret_cast<Pack<Out, kRun>*>(out);
    Pack<Out, kRun> result;
    if (a.accumulate) result = *pack;
#pragma unroll
    for (int e = 0; e < kRun; ++e)
      result.value[e] = from_float<Out>(a.accumulate ? to_float(result.value[e]) + values[e] : values[e]);
    *pack = result;
  } else {
    for (int e = 0; e < count; ++e) out[e] = from_float<Out>(a.accumulate ? to_float(out[e]) + values[e] : values[e]);
  }
}

template <class T, Adjacent kAdjacentFactor>
__global__ void __launch_bounds__(kThreads)
    expand_kernel(LoraExpandArguments a, Source<T> narrow, Source<T> factor, bool aligned_out) {
  using Product = BlockProduct<T, kRowTile, kColumnTile, kExpandDepth, Adjacent::kSum, kAdjacentFactor>;
  __shared__ typename Product::Shared shared;
  const TilePosition tile =
      grouped_tile_order(blockIdx.x, ceil_div(a.rows, kRowTile), ceil_div(a.width, kColumnTile), kTilesPerGroup);
  const std::int64_t row = tile.row * kRowTile, col = tile.col * kColumnTile;
  Product::template run<Product::Masked::kNone>(narrow, factor, row, col, 0, a.rank, a.mask, a.width, shared);

  constexpr int kRun = 4, kRuns = kColumnTile / kRun;
  const MaskWords words(a.mask);
  const auto scale = static_cast<float>(a.mask.factor);
  for (int i = static_cast<int>(threadIdx.x); i < kRowTile * kRuns; i += kThreads) {
    const int r = i / kRuns, c = i % kRuns * kRun;
    if (row + r >= a.rows || col + c >= a.width) continue;
    float values[kRun];
    const unsigned bits =
        a.mask.active ? words.keep_bits(static_cast<std::uint64_t>((row + r) * a.width + col + c), kRun) : ~0u;
#pragma unroll
    for (int e = 0; e < kRun; ++e) {
      values[e] = (bits >> e & 1u) != 0 ? scale * shared.result[r * Product::kPitch + c + e] : 0.0f;
    }
    const int count = static_cast<int>(min(static_cast<std::int64_t>(kRun), a.width - col - c));
    switch (a.out_dtype) {
      case DType::kBFloat16:
        write_run<__nv_bfloat16>(a, row + r, col + c, count, values, aligned_out);
        break;
      case DType::kFloat16:
        write_run<__half>(a, row + r, col + c, count, values, aligned_out);
        break;
      default:
        write_run<float>(a, row + r, col + c, count, values, aligned_out);
        break;
    }
  }
}

// ---- reduce: grad[r, C] = narrow^T[r, M] (mask o wide)[M, C] + beta grad
// ---------------------------------------------

__device__ float* gradient(const LoraFactor& grad, std::int64_t k, std::int64_t c) {
  return static_cast<float*>(grad.data) + (grad.transposed ? c * grad.stride + k : k * grad.stride + c);
}

template <class T, int kRank>
__global__ void __launch_bounds__(kThreads)
    reduce_kernel(LoraReduceArguments a, Source<T> narrow, Source<T> wide, LoraSplit split, float* partial) {
  using Product = BlockProduct<T, kRank, kColumnTile, kSumDepth<T>, Adjacent::kSide, Adjacent::kSide>;
  __shared__ typename Product::Shared shared;
  const std::int64_t rank_tiles = ceil_div(a.rank, kRank), column_tiles = ceil_div(a.width, kColumnTile);
  const std::int64_t rank = blockIdx.x % rank_tiles * kRank;
  const std::int64_t col = blockIdx.x / rank_tiles % column_tiles * kColumnTile;
  const std::int64_t part = blockIdx.x / (rank_tiles * column_tiles);
  const std::int64_t begin = part * split.length, end = min(begin + split.length, a.rows);
  narrow.outer_end = end;
  wide.outer_end = end;
  Product::template run<Product::Masked::kB>(narrow, wide, rank, col, begin, end, a.mask, a.width, shared);

  const auto scale = static_cast<float>(a.mask.factor);
  for (int i = static_cast<int>(threadIdx.x); i < kRank * kColumnTile; i += kThreads) {
    const int k = i / kColumnTile, c = i % kColumnTile;
    if (rank + k >= a.rank || col + c >= a.width) continue;
    const float sum = shared.result[k * Product::kPitch + c];
    if (split.parts > 1) {
      partial[(part * a.rank + rank + k) * a.width + col + c] = sum;
    } else {
      float* const grad = gradient(a.grad, rank + k, col + c);
      *grad = a.accumulate ? *grad + scale * sum : scale * sum;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    finish_reduce_kernel(LoraReduceArguments a, std::int64_t parts, const float* partial) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.rank * a.width) return;
  const std::int64_t k = a.grad.transposed ? i % a.rank : i / a.width, c = a.grad.transposed ? i / a.rank : i % a.width;
  float sum = 0;
  for (std::int64_t part = 0; part < parts; ++part) sum += partial[(part * a.rank + k) * a.width + c];
  sum *= static_cast<float>(a.mask.factor);
  float* const grad = gradient(a.grad, k, c);
  *grad = a.accumulate ? *grad + sum : sum;
}

template <class T, int kRank>
void launch_reduce(const LoraReduceArguments& a, const LoraSplit& split, float* workspace, cudaStream_t stream) {
  const dim3 grid = blocks(split.parts * ceil_div(a.rank, kRank) * ceil_div(a.width, kColumnTile));
  const Source<T> narrow(a.narrow.data, a.narrow.stride, a.rows, a.rank),
      wide(a.wide.data, a.wide.stride, a.rows, a.width);
  reduce_kernel<T, kRank><<<grid, kThreads, 0, stream>>>(a, narrow, wide, split, workspace);
}

bool plain_preferred = false;

bool streams(DType dtype, Device device) { return !plain_preferred && lora_mma::serves(dtype, device); }

}  // namespace

void prefer_plain_lora_kernels(bool prefer) noexcept { plain_preferred = prefer; }

LoraSplit lora_shrink_split(const LoraShrinkArguments& a, Device device) {
  if (streams(a.dtype, device)) return {1, a.width, lora_mma::shrink_workspace(a, device)};
  const std::int64_t depth = size_of(a.dtype) == 2 ? kSumDepth<__half> : kSumDepth<float>;
  return split_sum(ceil_div(a.rows, kRowTile) * ceil_div(a.rank, rank_tile(a.rank)), a.width, depth, a.rows * a.rank,
                   device);
}

LoraSplit lora_reduce_split(const LoraReduceArguments& a, Device device) {
  if (streams(a.dtype, device)) return {1, a.rows, lora_mma::reduce_workspace(a, device)};
  const std::int64_t depth = size_of(a.dtype) == 2 ? kSumDepth<__half> : kSumDepth<float>;
  return split_sum(ceil_div(a.width, kColumnTile) * ceil_div(a.rank, rank_tile(a.rank)), a.rows, depth,
                   a.rank * a.width, device);
}

void lora_shrink(const LoraShrinkArguments& a, const LoraSplit& split, float* workspace, StreamRef stream) {
  if (streams(a.dtype, stream.device())) return lora_mma::run_shrink(a, workspace, stream);
  const DeviceGuard guard(stream.device());
  dispatch_device_type(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.rank <= kNarrowRank) {
      launch_shrink<T, kNarrowRank>(a, split, workspace, to_cuda(stream));
    } else {
      launch_shrink<T, kWideRank>(a, split, workspace, to_cuda(stream));
    }
    check_launch("lora_shrink");
    if (split.parts > 1) {
      finish_shrink_kernel<T><<<blocks(ceil_div(a.rows * a.padded_rank, kThreads)), kThreads, 0, to_cuda(stream)>>>(
          a, split.parts, workspace);
      check_launch("lora_shrink");
    }
  });
}

void lora_expand(const LoraExpandArguments& a, StreamRef stream) {
  if (streams(a.dtype, stream.device())) return lora_mma::run_expand(a, stream);
  const DeviceGuard guard(stream.device());
  const dim3 grid = blocks(ceil_div(a.rows, kRowTile) * ceil_div(a.width, kColumnTile));
  const std::size_t run_bytes = 4 * size_of(a.out_dtype);
  const bool aligned_out = reinterpret_cast<std::uintptr_t>(a.out.data) % run_bytes == 0 && a.out.stride % 4 == 0;
  dispatch_device_type(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const Source<T> narrow(a.narrow.data, a.narrow.stride, a.rows, a.rank);
    if (a.factor.transposed) {
      const Source<T> factor(a.factor.data, a.factor.stride, a.width, a.rank);
      expand_kernel<T, Adjacent::kSum><<<grid, kThreads, 0, to_cuda(stream)>>>(a, narrow, factor, aligned_out);
    } else {
      const Source<T> factor(a.factor.data, a.factor.stride, a.rank, a.width);
      expand_kernel<T, Adjacent::kSide><<<grid, kThreads, 0, to_cuda(stream)>>>(a, narrow, factor, aligned_out);
    }
  });
  check_launch("lora_expand");
}

void lora_reduce(const LoraReduceArguments& a, const LoraSplit& split, float* workspace, StreamRef stream) {
  if (streams(a.dtype, stream.device())) return lora_mma::run_reduce(a, workspace, stream);
  const DeviceGuard guard(stream.device());
  dispatch_device_type(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (a.rank <= kNarrowRank) {
      launch_reduce<T, kNarrowRank>(a, split, workspace, to_cuda(stream));
    } else {
      launch_reduce<T, kWideRank>(a, split, workspace, to_cuda(stream));
    }
  });
  check_launch("lora_reduce");
  if (split.parts > 1) {
    finish_reduce_kernel<<<blocks(ceil_div(a.rank * a.width, kThreads)), kThreads, 0, to_cuda(stream)>>>(a, split.parts,
                                                                                                         workspace);
    check_launch("lora_reduce");
  }
}

bool lora_shares_pass(const LoraShrinkArguments& shrink, Device device) {
  return streams(shrink.dtype, device) && lora_both_fits(shrink.rank);
}

std::int64_t lora_shrink_reduce_workspace(const LoraShrinkArguments& shrink, const LoraReduceArguments& reduce,
                                          Device device) {
  return lora_mma::both_workspace(shrink, reduce, device);
}

void lora_shrink_reduce(const LoraShrinkArguments& shrink, const LoraReduceArguments& reduce, float* workspace,
                        StreamRef stream) {
  lora_mma::run_both(shrink, reduce, workspace, stream);
}

}  // namespace rowan::cuda
