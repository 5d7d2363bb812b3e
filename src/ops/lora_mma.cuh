// The LoRA primitives for 16-bit types: tensor cores (mma.sync) fed from shared memory, which asynchronous copies keep
// several tiles ahead. For devices with thread block clusters and enough shared memory (compute capability 9.0 and
// later; lora_cuda.cu has the kernels for others). Each reads or writes the wide matrix once; what is small (factor,
// narrow matrix, partial sums) is meant to come from the L2 cache.
//
//   shrink   a block takes a tile of rows and walks along them; its sums stay in registers
//   reduce   a block takes a tile of columns and walks down them; its sums stay in registers
//   both     a block takes a tile of columns and a range of rows and walks down: gradients stay in registers, the sums
//            of the rows in shared memory
//   expand   a block takes a tile of columns of the result and walks down
//
// The long sums are split over blocks (lora_plan.h). Where clusters of all parts can run at once they add up through
// each other's shared memory; elsewhere each part writes a float32 result and a finishing kernel adds them. Always in
// order: equal calls give equal bits.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/cuda_check.h"
#include "ops/device_types.cuh"
#include "ops/dropout_mask.h"
#include "ops/lora_mma_launch.h"

namespace rowan::cuda::lora_mma {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kStep = 16;  ///< what one tensor-core product sums over
constexpr int kChunk = 8;  ///< elements of one copy (16 bytes), and the padding of a row in shared memory

// ---- instructions ---------------------------------------------------------------------------------------------------

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

/// Copies 16 bytes, of which `bytes` exist; the others become zero.
__device__ inline void copy_async(unsigned shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until all but the last kGroups groups of this thread's copies are done.
template <int kGroups>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

/// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(unsigned (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ inline void load_transposed(unsigned (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

/// sum (16 x 8) += a (16 x 16) b (16 x 8)
template <class T>
__device__ inline void multiply_add(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, "
        "%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// With launches that overlap (see launch): waits for the kernels before this one, whose results it may read; to be
/// called before anything in global memory is touched. Lets the next kernel's blocks come in as soon as all of this
/// kernel's blocks run.
__device__ inline void begin_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- tiles in shared memory
// -------------------------------------------------------------------------------------------

/// A matrix in global memory, its rows adjacent elements, zero beyond its ends.
template <class T>
struct Source {
  const T* data = nullptr;
  std::int64_t stride = 0;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  bool aligned = false;  ///< 16-byte copies are possible
};

template <class T>
Source<T> source(const void* data, std::int64_t stride, std::int64_t rows, std::int64_t cols) {
  return {static_cast<const T*>(data), stride, rows, cols,
          reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride * static_cast<std::int64_t>(sizeof(T)) % 16 == 0};
}

/// A kRows x kCols tile of a matrix, in rows of kPitch elements, copied by the whole block.
template <class T, int kRows, int kCols>
struct Tile {
  static constexpr int kPitch = kCols + kChunk;  ///< the extra chunk spreads rows over the banks
  static constexpr int kElements = kRows * kPitch;

  /// Starts to copy the tile at (row, col); rows from `row_end` and columns from `col_end` on read as zero.
  __device__ static void copy(T* tile, const Source<T>& from, std::int64_t row, std::int64_t col, std::int64_t row_end,
                              std::int64_t col_end) {
    const T* const origin = from.data + row * from.stride + col;
    const int rows_left = static_cast<int>(min(row_end - row, static_cast<std::int64_t>(kRows))),
              cols_left = static_cast<int>(min(col_end - col, static_cast<std::int64_t>(kCols)));
    if (from.aligned && cols_left == kCols) {
      copy_full_rows(tile, origin, from.stride, rows_left);
    } else {
      copy_any(tile, origin, from, rows_left, cols_left);
    }
  }

 private:
  static constexpr int kChunksPerRow = kCols / kChunk, kChunks = kRows * kChunksPerRow;

  /// The common case in few instructions: they, not memory, would set the pace otherwise.
  __device__ static void copy_full_rows(T* tile, const T* origin, std::int64_t stride, int rows_left) {
    constexpr int kRowsPerPass = kThreads / kChunksPerRow;
    static_assert(kThreads % kChunksPerRow == 0, "a thread's chunks lie below each other");
    const int first = static_cast<int>(threadIdx.x) / kChunksPerRow,
              col = static_cast<int>(threadIdx.x) % kChunksPerRow * kChunk;
    const T* at = origin + first * stride + col;
    const unsigned to = shared_address(tile + first * kPitch + col);
    const std::int64_t step = kRowsPerPass * stride;
#pragma unroll
    for (int i = 0; i < (kRows + kRowsPerPass - 1) / kRowsPerPass; ++i, at += step) {
      const int row = first + i * kRowsPerPass;
      if (kRows % kRowsPerPass != 0 && row >= kRows) break;
      const bool exists = row < rows_left;
      copy_async(to + static_cast<unsigned>(i * kRowsPerPass * kPitch * static_cast<int>(sizeof(T))),
                 exists ? at : origin, exists ? 16 : 0);
    }
  }

  __device__ static void copy_any(T* tile, const T* origin, const Source<T>& from, int rows_left, int cols_left) {
#pragma unroll 1
    for (int chunk = static_cast<int>(threadIdx.x); chunk < kChunks; chunk += kThreads) {
      const int r = chunk / kChunksPerRow, c = chunk % kChunksPerRow * kChunk;
      const T* const at = origin + r * from.stride + c;
      const int valid = r < rows_left ? min(max(cols_left - c, 0), kChunk) : 0;
      T* const to = tile + r * kPitch + c;
      if (from.aligned) {
        copy_async(shared_address(to), valid > 0 ? at : from.data, valid * static_cast<int>(sizeof(T)));
      } else {
        Pack<T, kChunk> pack;
#pragma unroll
        for (int e = 0; e < kChunk; ++e) pack.value[e] = e < valid ? at[e] : from_float<T>(0.0f);
        *reinterpret_cast<Pack<T, kChunk>*>(to) = pack;
      }
    }
  }

 public:
  /// Zeroes what the mask drops, in the chunks that this thread has copied.
  __device__ static void drop(T* tile, const MaskWords& words, std::int64_t row, std::int64_t col, std::int64_t width) {
#pragma unroll 1
    for (int chunk = static_cast<int>(threadIdx.x); chunk < kChunks; chunk += kThreads) {
      const int r = chunk / kChunksPerRow, c = chunk % kChunksPerRow * kChunk;
      auto* const at = reinterpret_cast<Pack<T, kChunk>*>(tile + r * kPitch + c);
      Pack<T, kChunk> pack = *at;
      const unsigned bits = words.keep_bits(static_cast<std::uint64_t>((row + r) * width + col + c), kChunk);
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        if ((bits >> e & 1u) == 0) pack.value[e] = from_float<T>(0.0f);
      }
      *at = pack;
    }
  }

  // Operands of multiply_add. Rows and columns are those of the tile; the operand's are in the comments.

  /// a (16 x 16): a's rows are the tile's rows from `row`, a's columns its columns from `col`.
  __device__ static void a_of_rows(unsigned (&a)[4], const T* tile, int row, int col) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_matrices(a, tile + (row + lane % 16) * kPitch + col + lane / 16 * 8);
  }
  /// a (16 x 16): a's rows are the tile's columns from `col`, a's columns its rows from `row`.
  __device__ static void a_of_columns(unsigned (&a)[4], const T* tile, int row, int col) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_transposed(a, tile + (row + lane / 16 * 8 + lane % 8) * kPitch + col + lane / 8 % 2 * 8);
  }
  /// b (16 x 16, two operands side by side): b's rows are the tile's rows, b's columns its columns.
  __device__ static void b_of_rows(unsigned (&b)[4], const T* tile, int row, int col) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_transposed(b, tile + (row + lane / 8 % 2 * 8 + lane % 8) * kPitch + col + lane / 16 * 8);
  }
  /// b (16 x 16, two operands side by side): b's rows are the tile's columns, b's columns its rows.
  __device__ static void b_of_columns(unsigned (&b)[4], const T* tile, int row, int col) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    load_matrices(b, tile + (row + lane / 16 * 8 + lane % 8) * kPitch + col + lane / 8 % 2 * 8);
  }
};

/// A tile of kRank ranks and kColumns columns of a factor, in the orientation it has in memory: [ranks, columns], or
/// [columns, ranks] when transposed.
template <class T, int kRank, int kColumns, bool kTransposed>
struct FactorTile {
  using Stored = std::conditional_t<kTransposed, Tile<T, kColumns, kRank>, Tile<T, kRank, kColumns>>;
  static constexpr int kElements = Stored::kElements;

  __device__ static void copy(T* tile, const Source<T>& from, std::int64_t rank, std::int64_t col,
                              std::int64_t col_end) {
    if constexpr (kTransposed) {
      Stored::copy(tile, from, col, rank, col_end, from.cols);
    } else {
      Stored::copy(tile, from, rank, col, from.rows, col_end);
    }
  }
  /// b (16 x 16): rows are columns of the factor, columns its ranks.
  __device__ static void b_by_rank(unsigned (&b)[4], const T* tile, int rank, int col) {
    if constexpr (kTransposed) {
      Stored::b_of_rows(b, tile, col, rank);
    } else {
      Stored::b_of_columns(b, tile, rank, col);
    }
  }
  /// b (16 x 16): rows are ranks of the factor, columns its columns.
  __device__ static void b_by_column(unsigned (&b)[4], const T* tile, int rank, int col) {
    if constexpr (kTransposed) {
      Stored::b_of_columns(b, tile, col, rank);
    } else {
      Stored::b_of_rows(b, tile, rank, col);
    }
  }
};

/// Runs `steps` steps: copy(step, stage) starts the copies of a step, arrive(step, stage) may change what this thread
/// has copied, use(step, stage) works on the tiles of the whole block.
template <int kStages, class Copy, class Arrive, class Use>
__device__ inline void pipeline(int steps, Copy copy, Arrive arrive, Use use) {
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) copy(s, s);
    commit_copies();
  }
  int stage = 0, ahead = kStages - 1;
  for (int s = 0; s < steps; ++s) {
    wait_copies<kStages - 2>();
    arrive(s, stage);
    __syncthreads();  // this step's tiles are there, and the stage that is copied to next is no longer read
    if (s + kStages - 1 < steps) copy(s + kStages - 1, ahead);
    commit_copies();
    use(s, stage);
    stage = stage + 1 == kStages ? 0 : stage + 1;
    ahead = ahead + 1 == kStages ? 0 : ahead + 1;
  }
}

extern __shared__ __align__(128) unsigned char dynamic_shared[];

// ---- sums over the blocks of a cluster
// ----------------------------------------------------------------------------------

struct Cluster {
  unsigned rank = 0, size = 1;
  __device__ static Cluster get() {
    Cluster cluster;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(cluster.rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(cluster.size));
#endif
    return cluster;
  }
  /// All threads of all blocks have written what the others read afterwards.
  __device__ void sync() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (size > 1) {
      asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
      return;
    }
#endif
    __syncthreads();
  }
  /// Four floats of block `from`, at the place that `local` has in this block's shared memory.
  __device__ float4 read(const float* local, unsigned from) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    unsigned address;
    float4 value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(local)), "r"(from));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
#else
    return *reinterpret_cast<const float4*>(local);
#endif
  }
};

/// Adds up tiles of `outer` x kInner floats (rows of kPitch): kTiles of them one after the other in each block of the
/// cluster. Every block calls emit(outer, inner, four sums) for its share.
template <int kInner, int kPitch, int kTiles, class Emit>
__device__ inline void sum_tiles(const Cluster& cluster, const float* tiles, int tile_floats, int outer, Emit emit) {
  cluster.sync();
  const int count = outer * (kInner / 4);
#pragma unroll 1
  for (int i = static_cast<int>(cluster.rank * kThreads + threadIdx.x); i < count;
       i += static_cast<int>(cluster.size) * kThreads) {
    const int o = i / (kInner / 4), n = i % (kInner / 4) * 4;
    const float* const at = tiles + o * kPitch + n;
    float4 sum = {0, 0, 0, 0};
#pragma unroll 4
    for (unsigned block = 0; block < cluster.size; ++block) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float4 value = cluster.size > 1 ? cluster.read(at + tile * tile_floats, block)
                                              : *reinterpret_cast<const float4*>(at + tile * tile_floats);
        sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
      }
    }
    emit(o, n, sum);
  }
  if (cluster.size > 1) cluster.sync();  // no block leaves while others read its shared memory
}

// ---- results
// ------------------------------------------------------------------------------------------------------------

/// Where the sums of a shrink go: scaled and rounded to out, or as one of several parts to be added.
template <class T>
struct ShrinkResult {
  T* out = nullptr;
  std::int64_t stride = 0;
  std::int64_t rows = 0;
  int rank = 0, padded_rank = 0;  ///< columns from rank on become zero
  float scale = 1;
  float* partial = nullptr;  ///< [parts, rows, pitch]; null: there is one part
  int pitch = 0;             ///< a multiple of 4
  bool aligned = false;      ///< four elements of out can be written at once

  /// Columns k to k + 3 of a row; sums of ranks that do not exist are zero.
  __device__ void put(std::int64_t part, std::int64_t row, int k, float4 sum) const {
    if (partial != nullptr) {
      *reinterpret_cast<float4*>(partial + (part * rows + row) * pitch + k) = sum;
      return;
    }
    const Pack<T, 4> four = {from_float<T>(scale * sum.x), from_float<T>(scale * sum.y), from_float<T>(scale * sum.z),
                             from_float<T>(scale * sum.w)};
    T* const at = out + row * stride + k;
    if (aligned && k + 4 <= padded_rank) {
      *reinterpret_cast<Pack<T, 4>*>(at) = four;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (k + e < padded_rank) at[e] = four.value[e];
      }
    }
  }
  /// Zeroes columns [begin, padded_rank) of `count` rows.
  __device__ void clear(std::int64_t row, int count, int begin) const {
    const int columns = padded_rank - begin;
    for (int i = static_cast<int>(threadIdx.x); i < count * columns; i += kThreads)
      out[(row + i / columns) * stride + begin + i % columns] = from_float<T>(0.0f);
  }
};

/// Where the sums of a reduce go: to the gradient, added to it or not, or as one of several parts, which are laid out
/// as the gradient is (its short or its long side adjacent) without gaps.
struct ReduceResult {
  LoraFactor grad;
  std::int64_t rank = 0, width = 0;
  float scale = 1;
  bool accumulate = false;
  float* partial = nullptr;  ///< null: there is one part
  bool aligned = false;      ///< four adjacent elements can be written at once

  __device__ std::int64_t inner() const { return grad.transposed ? rank : width; }
  /// Four elements that are adjacent in the gradient, from (outer, inner) on.
  __device__ void put(std::int64_t part, std::int64_t outer, std::int64_t first, float4 sum) const {
    const std::int64_t outer_end = grad.transposed ? width : rank, inner_end = inner();
    if (outer >= outer_end) return;
    const bool parts = partial != nullptr;
    float* const at = parts ? partial + (part * outer_end + outer) * inner_end + first
                            : static_cast<float*>(grad.data) + outer * grad.stride + first;
    const float factor = parts ? 1.0f : scale;
    const bool adds = accumulate && !parts;
    sum.x *= factor, sum.y *= factor, sum.z *= factor, sum.w *= factor;
    if (aligned && first + 4 <= inner_end) {
      if (adds) {
        const float4 before = *reinterpret_cast<const float4*>(at);
        sum.x += before.x, sum.y += before.y, sum.z += before.z, sum.w += before.w;
      }
      *reinterpret_cast<float4*>(at) = sum;
      return;
    }
    const float four[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (first + e < inner_end) at[e] = adds ? at[e] + four[e] : four[e];
    }
  }
};

/// Adds the parts of a shrink, of a reduce, or of both (`rows` or `parts` 0: none).
template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_kernel(ShrinkResult<T> shrunk, std::int64_t shrink_parts, ReduceResult reduced, std::int64_t reduce_parts) {
  begin_kernel();
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t shrink_count = shrink_parts > 1 ? shrunk.rows * shrunk.pitch / 4 : 0;
  const std::int64_t size = reduced.rank * reduced.width, inner = reduced.inner();
  const bool shrinks = i < shrink_count;
  const float* from = nullptr;
  std::int64_t step = 0, parts = 0, row = 0, column = 0;
  if (shrinks) {
    const int fours = shrunk.pitch / 4;
    row = i / fours, column = i % fours * 4;
    from = shrunk.partial + row * shrunk.pitch + column;
    step = shrunk.rows * shrunk.pitch, parts = shrink_parts;
  } else {
    i -= shrink_count;
    const std::int64_t fours = (inner + 3) / 4;
    if (reduce_parts <= 1 || i >= fours * (size / inner)) return;
    row = i / fours, column = i % fours * 4;
    from = reduced.partial + row * inner + column;
    step = size, parts = reduce_parts;
  }
  float4 sum = {0, 0, 0, 0};
  if (shrinks || reduced.aligned) {
#pragma unroll 8
    for (std::int64_t part = 0; part < parts; ++part, from += step) {
      const float4 value = *reinterpret_cast<const float4*>(from);
      sum.x += value.x, sum.y += value.y, sum.z += value.z, sum.w += value.w;
    }
  } else {
    const auto left = inner - column;
    for (std::int64_t part = 0; part < parts; ++part, from += step) {
      sum.x += from[0];
      if (left > 1) sum.y += from[1];
      if (left > 2) sum.z += from[2];
      if (left > 3) sum.w += from[3];
    }
  }
  if (shrinks) {
    shrunk.partial = nullptr;
    if (column < shrunk.padded_rank) shrunk.put(0, row, static_cast<int>(column), sum);
  } else {
    reduced.partial = nullptr;
    reduced.put(0, row, column, sum);
  }
}

// ---- shrink
// -------------------------------------------------------------------------------------------------------------

/// A block's tile: kRows rows, kDepth columns a step.
template <class T, int kRows, int kRank, bool kTransposed>
struct ShrinkTiles {
  static constexpr int kDepth = static_cast<int>(shrink_step(kRows)), kStages = 4;
  static constexpr int kRowWarps = kRows / 16 < kWarps ? kRows / 16 : kWarps, kWarpRows = kRows / kRowWarps;
  static constexpr int kDepthWarps = kWarps / kRowWarps, kWarpDepth = kDepth / kDepthWarps;
  static constexpr int kSumPitch = kRank + 4, kSumFloats = kRows * kSumPitch;
  using Wide = Tile<T, kRows, kDepth>;
  using Factor = FactorTile<T, kRank, kDepth, kTransposed>;
  static constexpr int kStageElements = Wide::kElements + Factor::kElements;
  static constexpr int kBytes = kStages * kStageElements * static_cast<int>(sizeof(T));
  static_assert(kBytes >= kDepthWarps * kSumFloats * 4, "the sums fit where the tiles were");
};

/// Block b takes part b % parts of row tile b / parts % row_tiles and of rank tile b / parts / row_tiles; the cluster's
/// size divides `parts`.
template <class T, int kRows, int kRank, bool kTransposed>
__global__ void __launch_bounds__(kThreads, 1) shrink_kernel(Source<T> wide, Source<T> factor, ShrinkResult<T> result,
                                                             int parts, std::int64_t length, MaskArguments mask) {
  using Tiles = ShrinkTiles<T, kRows, kRank, kTransposed>;
  begin_kernel();
  const std::int64_t row_tiles = (wide.rows + kRows - 1) / kRows;
  const int part = static_cast<int>(blockIdx.x % parts);
  const std::int64_t row = blockIdx.x / parts % row_tiles * kRows;
  const int rank = static_cast<int>(blockIdx.x / parts / row_tiles) * kRank;
  const std::int64_t begin = min(part * length, wide.cols), end = min(begin + length, wide.cols);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp % Tiles::kRowWarps * Tiles::kWarpRows,
            warp_depth = warp / Tiles::kRowWarps * Tiles::kWarpDepth;
  T* const shared = reinterpret_cast<T*>(dynamic_shared);
  const MaskWords words(mask);

  // Row tiles begin at different steps, so that not all of them ask for one piece of the factor at once.
  const int steps = static_cast<int>((end - begin + Tiles::kDepth - 1) / Tiles::kDepth);
  const int first = steps > 0 ? static_cast<int>(row / kRows % steps) : 0;
  const auto column = [&](int step) {
    return begin +
           static_cast<std::int64_t>(step + first < steps ? step + first : step + first - steps) * Tiles::kDepth;
  };

  float sum[Tiles::kWarpRows / 16][kRank / 8][4] = {};
  pipeline<Tiles::kStages>(
      steps,
      [&](int step, int stage) {
        T* const tile = shared + stage * Tiles::kStageElements;
        const std::int64_t col = column(step);
        Tiles::Wide::copy(tile, wide, row, col, wide.rows, end);
        Tiles::Factor::copy(tile + Tiles::Wide::kElements, factor, rank, col, end);
      },
      [&](int step, int stage) {
        if (mask.active) {
          Tiles::Wide::drop(shared + stage * Tiles::kStageElements, words, row, column(step), wide.cols);
        }
      },
      [&](int, int stage) {
        const T* const tile = shared + stage * Tiles::kStageElements;
#pragma unroll
        for (int k = 0; k < Tiles::kWarpDepth; k += kStep) {
          unsigned a[Tiles::kWarpRows / 16][4];
#pragma unroll
          for (int m = 0; m < Tiles::kWarpRows / 16; ++m)
            Tiles::Wide::a_of_rows(a[m], tile, warp_row + m * 16, warp_depth + k);
#pragma unroll
          for (int n = 0; n < kRank; n += 16) {
            unsigned b[4];
            Tiles::Factor::b_by_rank(b, tile + Tiles::Wide::kElements, n, warp_depth + k);
#pragma unroll
            for (int m = 0; m < Tiles::kWarpRows / 16; ++m) {
              multiply_add<T>(sum[m][n / 8], a[m], b[0], b[1]);
              multiply_add<T>(sum[m][n / 8 + 1], a[m], b[2], b[3]);
            }
          }
        }
      });

  float* const sums = reinterpret_cast<float*>(dynamic_shared);
  wait_copies<0>();
  __syncthreads();
#pragma unroll
  for (int m = 0; m < Tiles::kWarpRows / 16; ++m) {
#pragma unroll
    for (int n = 0; n < kRank / 8; ++n) {
      float* const at = sums + warp / Tiles::kRowWarps * Tiles::kSumFloats +
                        (warp_row + m * 16 + lane / 4) * Tiles::kSumPitch + n * 8 + lane % 4 * 2;
      *reinterpret_cast<float2*>(at) = {sum[m][n][0], sum[m][n][1]};
      *reinterpret_cast<float2*>(at + 8 * Tiles::kSumPitch) = {sum[m][n][2], sum[m][n][3]};
    }
  }
  const int rows = static_cast<int>(min(static_cast<std::int64_t>(kRows), wide.rows - row));
  const Cluster cluster = Cluster::get();
  const int group = part / static_cast<int>(cluster.size);
  sum_tiles<kRank, Tiles::kSumPitch, Tiles::kDepthWarps>(
      cluster, sums, Tiles::kSumFloats, rows,
      [&](int r, int k, float4 total) { result.put(group, row + r, rank + k, total); });
  const bool last = part == 0 && rank + kRank >= result.rank;
  if (last && result.partial == nullptr && rank + kRank < result.padded_rank) result.clear(row, rows, rank + kRank);
}

// ---- reduce
// -------------------------------------------------------------------------------------------------------------

/// sum[k tile][column tile] += narrow^T wide over kRows rows, for kColumns columns from `col` on.
template <class T, int kRank, int kRows, int kColumns, class NarrowTile, class Wide>
__device__ inline void add_gradient(float (&sum)[kRank / 16][kColumns / 8][4], const T* narrow, const T* wide,
                                    int col) {
#pragma unroll
  for (int m = 0; m < kRows; m += kStep) {
    unsigned a[kRank / 16][4];
#pragma unroll
    for (int k = 0; k < kRank / 16; ++k) NarrowTile::a_of_columns(a[k], narrow, m, k * 16);
#pragma unroll
    for (int c = 0; c < kColumns; c += 16) {
      unsigned b[4];
      Wide::b_of_rows(b, wide, m, col + c);
#pragma unroll
      for (int k = 0; k < kRank / 16; ++k) {
        multiply_add<T>(sum[k][c / 8], a[k], b[0], b[1]);
        multiply_add<T>(sum[k][c / 8 + 1], a[k], b[2], b[3]);
      }
    }
  }
}

/// Adds the gradients of a cluster's blocks (kAcross columns, of which this warp has kColumns from `warp_col` on) and
/// puts them; `tile` is shared memory for kRank * (kAcross + 4) or kAcross * (kRank + 4) floats.
template <int kRank, int kAcross, int kColumns>
__device__ inline void put_gradient(const Cluster& cluster, const ReduceResult& result,
                                    const float (&sum)[kRank / 16][kColumns / 8][4], int warp_col, float* tile,
                                    std::int64_t part, std::int64_t rank, std::int64_t col) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool by_column = result.grad.transposed;
  const int k_step = by_column ? 1 : kAcross + 4, c_step = by_column ? kRank + 4 : 1;
  float* const mine = tile + lane / 4 * k_step + (warp_col + lane % 4 * 2) * c_step;
#pragma unroll
  for (int k = 0; k < kRank / 16; ++k) {
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c) {
      float* const at = mine + k * 16 * k_step + c * 8 * c_step;
      at[0] = sum[k][c][0], at[c_step] = sum[k][c][1];
      at[8 * k_step] = sum[k][c][2], at[8 * k_step + c_step] = sum[k][c][3];
    }
  }
  if (by_column) {
    sum_tiles<kRank, kRank + 4, 1>(cluster, tile, 0, kAcross, [&](int c, int k, float4 total) {
      if (rank + k < result.rank) result.put(part, col + c, rank + k, total);
    });
  } else {
    sum_tiles<kAcross, kAcross + 4, 1>(cluster, tile, 0, kRank, [&](int k, int c, float4 total) {
      if (col + c < result.width) result.put(part, rank + k, col + c, total);
    });
  }
}

template <class T, int kRank>
struct ReduceTiles {
  static constexpr int kColumns = static_cast<int>(kReduceColumns), kRows = static_cast<int>(kReduceRows), kStages = 5;
  using Wide = Tile<T, kRows, kColumns>;
  using NarrowTile = Tile<T, kRows, kRank>;
  static constexpr int kStageElements = Wide::kElements + NarrowTile::kElements;
  static constexpr int kBytes = kStages * kStageElements * static_cast<int>(sizeof(T));
  static_assert(kBytes >= kRank * (kColumns + 4) * 4 && kBytes >= kColumns * (kRank + 4) * 4, "the sums fit");
};

/// Block b takes part b % parts of column tile b / parts % col_tiles and of rank tile b / parts / col_tiles.
template <class T, int kRank>
__global__ void __launch_bounds__(kThreads) reduce_kernel(Source<T> narrow, Source<T> wide, ReduceResult result,
                                                          int parts, std::int64_t length, MaskArguments mask) {
  using Tiles = ReduceTiles<T, kRank>;
  constexpr int kRows = Tiles::kRows, kColumns = Tiles::kColumns, kWarpColumns = kColumns / kWarps;
  begin_kernel();
  const std::int64_t col_tiles = (wide.cols + kColumns - 1) / kColumns;
  const int part = static_cast<int>(blockIdx.x % parts);
  const std::int64_t col = blockIdx.x / parts % col_tiles * kColumns, rank = blockIdx.x / parts / col_tiles * kRank;
  const std::int64_t begin = min(part * length, wide.rows), end = min(begin + length, wide.rows);
  const int warp_col = static_cast<int>(threadIdx.x) / 32 * kWarpColumns;
  T* const shared = reinterpret_cast<T*>(dynamic_shared);
  const MaskWords words(mask);

  float sum[kRank / 16][kWarpColumns / 8][4] = {};
  pipeline<Tiles::kStages>(
      static_cast<int>((end - begin + kRows - 1) / kRows),
      [&](int step, int stage) {
        T* const tile = shared + stage * Tiles::kStageElements;
        const std::int64_t row = begin + static_cast<std::int64_t>(step) * kRows;
        Tiles::Wide::copy(tile, wide, row, col, end, wide.cols);
        Tiles::NarrowTile::copy(tile + Tiles::Wide::kElements, narrow, row, rank, end, narrow.cols);
      },
      [&](int step, int stage) {
        if (mask.active) {
          Tiles::Wide::drop(shared + stage * Tiles::kStageElements, words,
                            begin + static_cast<std::int64_t>(step) * kRows, col, wide.cols);
        }
      },
      [&](int, int stage) {
        const T* const tile = shared + stage * Tiles::kStageElements;
        add_gradient<T, kRank, kRows, kWarpColumns, typename Tiles::NarrowTile, typename Tiles::Wide>(
            sum, tile + Tiles::Wide::kElements, tile, warp_col);
      });
  wait_copies<0>();
  __syncthreads();
  const Cluster cluster = Cluster::get();
  put_gradient<kRank, kColumns, kWarpColumns>(cluster, result, sum, warp_col, reinterpret_cast<float*>(dynamic_shared),
                                              part / static_cast<int>(cluster.size), rank, col);
}

// ---- shrink and reduce in one pass
// ----------------------------------------------------------------------------------------

template <class T, int kRank, bool kTransposed>
struct BothTiles {
  static constexpr int kColumns = static_cast<int>(kBothColumns), kRows = static_cast<int>(kBothRows);
  static constexpr int kStages = kRank <= 16 ? 4 : 3;
  static constexpr int kMostRows = static_cast<int>(both_most_rows(kRank));
  static constexpr int kRowWarps = kRows / 16, kDepthWarps = kWarps / kRowWarps, kWarpDepth = kColumns / kDepthWarps;
  static constexpr int kStepPitch = kRank + 4, kStepFloats = kDepthWarps * kRows * kStepPitch;
  using Wide = Tile<T, kRows, kColumns>;
  using NarrowTile = Tile<T, kRows, kRank>;
  using Factor = FactorTile<T, kRank, kColumns, kTransposed>;
  static constexpr int kStageElements = Wide::kElements + NarrowTile::kElements;
  static constexpr int kBytes = (kStages * kStageElements + Factor::kElements) * static_cast<int>(sizeof(T)) +
                                (2 * kStepFloats + kMostRows * kRank) * static_cast<int>(sizeof(float));
  static_assert(kStages * kStageElements * 2 >= kColumns * (kRank + 4) * 4, "the gradients fit where the tiles were");
};

/// Block b takes column tile b % col_tiles and row part b / col_tiles. A cluster's blocks have neighbouring column
/// tiles and add their sums of rows; its size divides col_tiles. One block holds all ranks.
template <class T, int kRank, bool kTransposed>
__global__ void __launch_bounds__(kThreads, 1)
    both_kernel(Source<T> wide, Source<T> factor, Source<T> narrow, ShrinkResult<T> shrunk, ReduceResult reduced,
                int col_tiles, int length, MaskArguments mask) {
  using Tiles = BothTiles<T, kRank, kTransposed>;
  constexpr int kRows = Tiles::kRows, kColumns = Tiles::kColumns, kWarpColumns = kColumns / kWarps;
  constexpr int kRowWarps = Tiles::kRowWarps, kDepthWarps = Tiles::kDepthWarps, kWarpDepth = Tiles::kWarpDepth;
  begin_kernel();
  const int col_tile = static_cast<int>(blockIdx.x) % col_tiles;
  const std::int64_t part = blockIdx.x / static_cast<unsigned>(col_tiles),
                     col = static_cast<std::int64_t>(col_tile) * kColumns;
  const std::int64_t begin = part * length, end = min(begin + length, wide.rows);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp % kRowWarps * 16, warp_depth = warp / kRowWarps * kWarpDepth;
  T *const shared = reinterpret_cast<T*>(dynamic_shared), *const factor_tile =
                                                              shared + Tiles::kStages * Tiles::kStageElements;
  float *const step_sums = reinterpret_cast<float*>(factor_tile + Tiles::Factor::kElements), *const sums =
                                                                                                 step_sums +
                                                                                                 2 * Tiles::kStepFloats;
  const MaskWords words(mask);
  const int steps = static_cast<int>((end - begin + kRows - 1) / kRows);

  // Adds what the warps left of a step's rows.
  const auto add_warps = [&](int step) {
    const float* const from = step_sums + step % 2 * Tiles::kStepFloats;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kRank / 2; i += kThreads) {
      const int r = i / (kRank / 2), k = i % (kRank / 2) * 2;
      float2 total = *reinterpret_cast<const float2*>(from + r * Tiles::kStepPitch + k);
#pragma unroll
      for (int w = 1; w < kDepthWarps; ++w) {
        const auto value = *reinterpret_cast<const float2*>(from + (w * kRows + r) * Tiles::kStepPitch + k);
        total.x += value.x, total.y += value.y;
      }
      *reinterpret_cast<float2*>(sums + (step * kRows + r) * kRank + k) = total;
    }
  };

  Tiles::Factor::copy(factor_tile, factor, 0, col, wide.cols);  // waited for with the first step
  float gradient[kRank / 16][kWarpColumns / 8][4] = {};
  pipeline<Tiles::kStages>(
      steps,
      [&](int step, int stage) {
        T* const tile = shared + stage * Tiles::kStageElements;
        const std::int64_t row = begin + static_cast<std::int64_t>(step) * kRows;
        Tiles::Wide::copy(tile, wide, row, col, end, wide.cols);
        Tiles::NarrowTile::copy(tile + Tiles::Wide::kElements, narrow, row, 0, end, narrow.cols);
      },
      [&](int step, int stage) {
        if (mask.active) {
          Tiles::Wide::drop(shared + stage * Tiles::kStageElements, words,
                            begin + static_cast<std::int64_t>(step) * kRows, col, wide.cols);
        }
      },
      [&](int step, int stage) {
        if (step > 0) add_warps(step - 1);
        const T* const tile = shared + stage * Tiles::kStageElements;
        float sum[kRank / 8][4] = {};
#pragma unroll
        for (int k = 0; k < kWarpDepth; k += kStep) {
          unsigned a[4];
          Tiles::Wide::a_of_rows(a, tile, warp_row, warp_depth + k);
#pragma unroll
          for (int n = 0; n < kRank; n += 16) {
            unsigned b[4];
            Tiles::Factor::b_by_rank(b, factor_tile, n, warp_depth + k);
            multiply_add<T>(sum[n / 8], a, b[0], b[1]);
            multiply_add<T>(sum[n / 8 + 1], a, b[2], b[3]);
          }
        }
        float* const to = step_sums + step % 2 * Tiles::kStepFloats +
                          (warp / kRowWarps * kRows + warp_row + lane / 4) * Tiles::kStepPitch + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < kRank / 8; ++n) {
          *reinterpret_cast<float2*>(to + n * 8) = {sum[n][0], sum[n][1]};
          *reinterpret_cast<float2*>(to + 8 * Tiles::kStepPitch + n * 8) = {sum[n][2], sum[n][3]};
        }
        add_gradient<T, kRank, kRows, kWarpColumns, typename Tiles::NarrowTile, typename Tiles::Wide>(
            gradient, tile + Tiles::Wide::kElements, tile, warp * kWarpColumns);
      });
  wait_copies<0>();
  __syncthreads();
  add_warps(steps - 1);
  const Cluster cluster = Cluster::get();
  const int rows = static_cast<int>(end - begin), group = col_tile / static_cast<int>(cluster.size);
  sum_tiles<kRank, kRank, 1>(cluster, sums, 0, rows,
                             [&](int r, int k, float4 total) { shrunk.put(group, begin + r, k, total); });
  if (col_tile == 0 && shrunk.partial == nullptr && kRank < shrunk.padded_rank) shrunk.clear(begin, rows, kRank);
  // Not summed over the cluster, whose blocks have other columns.
  put_gradient<kRank, kColumns, kWarpColumns>({}, reduced, gradient, warp * kWarpColumns,
                                              reinterpret_cast<float*>(dynamic_shared), part, 0, col);
}

// ---- expand
// ---------------------------------------------------------------------------------------------------------------

/// Two values rounded.
__device__ inline __nv_bfloat162 round_pair(__nv_bfloat16, float a, float b) { return __floats2bfloat162_rn(a, b); }
__device__ inline __half2 round_pair(__half, float a, float b) { return __floats2half2_rn(a, b); }

/// Stores kChunk adjacent results of one row, at an address that takes 16 bytes, or adds them to what is there.
template <class T>
__device__ inline void store_chunk(T* out, const float (&values)[kChunk], bool accumulate) {
  using Pair = decltype(round_pair(T(), 0.0f, 0.0f));
  Pack<T, kChunk> before = {};
  if (accumulate) before = *reinterpret_cast<const Pack<T, kChunk>*>(out);
  Pack<Pair, kChunk / 2> after;
#pragma unroll
  for (int e = 0; e < kChunk; e += 2) {
    after.value[e / 2] = accumulate ? round_pair(T(), to_float(before.value[e]) + values[e],
                                                 to_float(before.value[e + 1]) + values[e + 1])
                                    : round_pair(T(), values[e], values[e + 1]);
  }
  *reinterpret_cast<Pack<Pair, kChunk / 2>*>(out) = after;
}

/// The first `count` of them at any address and in any dtype; `at` is the first element's offset.
template <class Out>
__device__ inline void store_each(const LoraExpandArguments& a, std::int64_t at, int count,
                                  const float (&values)[kChunk]) {
  Out* const out = static_cast<Out*>(a.out.data) + at;
#pragma unroll
  for (int e = 0; e < kChunk; ++e) {
    if (e < count) out[e] = from_float<Out>(a.accumulate ? to_float(out[e]) + values[e] : values[e]);
  }
}
__device__ inline void store_any(const LoraExpandArguments& a, std::int64_t at, int count,
                                 const float (&values)[kChunk]) {
  switch (a.out_dtype) {
    case DType::kBFloat16:
      return store_each<__nv_bfloat16>(a, at, count, values);
    case DType::kFloat16:
      return store_each<__half>(a, at, count, values);
    default:
      return store_each<float>(a, at, count, values);
  }
}

template <class T, int kRank>
struct ExpandTiles {
  static constexpr int kColumns = static_cast<int>(kExpandColumns), kRows = static_cast<int>(kExpandRows), kStages = 3;
  static constexpr int kColumnWarps = kColumns / 64, kRowWarps = kWarps / kColumnWarps, kWarpRows = kRows / kRowWarps;
  using NarrowTile = Tile<T, kRows, kRank>;
  using Factor = Tile<T, kColumns, kRank>;  ///< [columns, ranks] whatever the factor's layout is
  static constexpr int kBytes = (kStages * NarrowTile::kElements + Factor::kElements) * static_cast<int>(sizeof(T));
};

/// Where column c of a factor goes in the tile of expand: in each 64 columns a thread's kChunk adjacent columns of a
/// result, 8 g + 2 m + e, become row 8 e + g of operand m.
__device__ inline int expand_row(int c) { return c / 64 * 64 + c % 8 / 2 * 16 + c % 2 * 8 + c % 64 / 8; }

/// Columns [col, col + kColumns) of ranks [rank, rank + kRank) of a factor as rows of ranks.
template <class T, int kRank, bool kTransposed>
__device__ inline void copy_columns(T* tile, const Source<T>& factor, std::int64_t rank, std::int64_t col,
                                    std::int64_t width) {
  using Tiles = ExpandTiles<T, kRank>;
  constexpr int kPitch = Tiles::Factor::kPitch;
  const int columns = static_cast<int>(min(width - col, static_cast<std::int64_t>(Tiles::kColumns))),
            ranks = static_cast<int>(
                min((kTransposed ? factor.cols : factor.rows) - rank, static_cast<std::int64_t>(kRank)));
  if constexpr (kTransposed) {
    constexpr int kChunksPerColumn = kRank / kChunk;
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < Tiles::kColumns * kChunksPerColumn; i += kThreads) {
      const int c = i / kChunksPerColumn, k = i % kChunksPerColumn * kChunk;
      const T* const from = factor.data + (col + c) * factor.stride + rank + k;
      const int valid = c < columns ? min(max(ranks - k, 0), kChunk) : 0;
      T* const to = tile + expand_row(c) * kPitch + k;
      if (factor.aligned) {
        copy_async(shared_address(to), valid > 0 ? from : factor.data, valid * static_cast<int>(sizeof(T)));
      } else {
#pragma unroll
        for (int e = 0; e < kChunk; ++e) to[e] = e < valid ? from[e] : from_float<T>(0.0f);
      }
    }
  } else {
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < kRank * (Tiles::kColumns / kChunk); i += kThreads) {
      const int k = i % kRank, c = i / kRank * kChunk;
      const T* const from = factor.data + (rank + k) * factor.stride + col + c;
      const int valid = k < ranks ? columns - c : 0;
      Pack<T, kChunk> chunk;
      if (factor.aligned && valid >= kChunk) {
        chunk = *reinterpret_cast<const Pack<T, kChunk>*>(from);
      } else {
#pragma unroll
        for (int e = 0; e < kChunk; ++e) chunk.value[e] = e < valid ? from[e] : from_float<T>(0.0f);
      }
#pragma unroll
      for (int e = 0; e < kChunk; ++e) tile[expand_row(c + e) * kPitch + k] = chunk.value[e];
    }
  }
}

/// Block b takes column tile b % col_tiles and `length` rows. The products are taken transposed, factor^T narrow^T,
/// with the columns of the tile dealt so that a thread has kChunk adjacent ones of a row.
template <class T, int kRank, bool kTransposed>
__global__ void __launch_bounds__(kThreads, 2)
    expand_kernel(Source<T> narrow, Source<T> factor, LoraExpandArguments a, std::int64_t length, bool aligned_out) {
  using Tiles = ExpandTiles<T, kRank>;
  constexpr int kRows = Tiles::kRows, kColumns = Tiles::kColumns, kWarpRows = Tiles::kWarpRows;
  begin_kernel();
  const std::int64_t col_tiles = (a.width + kColumns - 1) / kColumns;
  const std::int64_t col = blockIdx.x % col_tiles * kColumns, begin = blockIdx.x / col_tiles * length,
                     end = min(begin + length, a.rows);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int warp_row = warp % Tiles::kRowWarps * kWarpRows, warp_col = warp / Tiles::kRowWarps * 64;
  T *const factor_tile = reinterpret_cast<T*>(dynamic_shared), *const shared = factor_tile + Tiles::Factor::kElements;
  const MaskWords words(a.mask);
  const auto scale = static_cast<float>(a.mask.factor);
  const int blocks_of_rank = static_cast<int>((a.rank + kRank - 1) / kRank);
  const int steps = static_cast<int>((end - begin + kRows - 1) / kRows) * blocks_of_rank;
  const bool plain = aligned_out && !a.mask.active && col + kColumns <= a.width;

  copy_columns<T, kRank, kTransposed>(factor_tile, factor, 0, col, a.width);
  float sum[kWarpRows / 8][4][4];
  pipeline<Tiles::kStages>(
      steps,
      [&](int step, int stage) {
        Tiles::NarrowTile::copy(shared + stage * Tiles::NarrowTile::kElements, narrow,
                                begin + static_cast<std::int64_t>(step / blocks_of_rank) * kRows,
                                static_cast<std::int64_t>(step % blocks_of_rank) * kRank, end, narrow.cols);
      },
      [](int, int) {},
      [&](int step, int stage) {
        const int rank_block = step % blocks_of_rank;
        if (blocks_of_rank > 1 && step > 0) {  // more ranks than one tile holds: the factor is read again
          copy_columns<T, kRank, kTransposed>(factor_tile, factor, static_cast<std::int64_t>(rank_block) * kRank, col,
                                              a.width);
          commit_copies();
          wait_copies<0>();
          __syncthreads();
        }
        if (rank_block == 0) {
#pragma unroll
          for (int n = 0; n < kWarpRows / 8; ++n) {
#pragma unroll
            for (int m = 0; m < 4; ++m) sum[n][m][0] = sum[n][m][1] = sum[n][m][2] = sum[n][m][3] = 0;
          }
        }
        const T* const tile = shared + stage * Tiles::NarrowTile::kElements;
#pragma unroll
        for (int k = 0; k < kRank; k += kStep) {
          unsigned rows[kWarpRows / 16][4];
#pragma unroll
          for (int n = 0; n < kWarpRows / 16; ++n) Tiles::NarrowTile::b_of_columns(rows[n], tile, warp_row + n * 16, k);
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            unsigned columns[4];
            Tiles::Factor::a_of_rows(columns, factor_tile, warp_col + m * 16, k);
#pragma unroll
            for (int n = 0; n < kWarpRows / 16; ++n) {
              multiply_add<T>(sum[2 * n][m], columns, rows[n][0], rows[n][1]);
              multiply_add<T>(sum[2 * n + 1][m], columns, rows[n][2], rows[n][3]);
            }
          }
        }
        if (blocks_of_rank > 1) __syncthreads();
        if (rank_block + 1 < blocks_of_rank) return;
        const std::int64_t row = begin + static_cast<std::int64_t>(step / blocks_of_rank) * kRows + warp_row +
                                 lane % 4 * 2,
                           to_col = col + warp_col + lane / 4 * 8;
        const std::int64_t out = row * a.out.stride + to_col;
        const int rows_left = static_cast<int>(min(end - row, static_cast<std::int64_t>(kRows)));
        const auto for_rows = [&](auto f) {
#pragma unroll
          for (int n = 0; n < kWarpRows / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if (n * 8 + e >= rows_left) continue;
              float values[kChunk];
#pragma unroll
              for (int m = 0; m < 4; ++m) values[2 * m] = sum[n][m][e], values[2 * m + 1] = sum[n][m][2 + e];
              f(n * 8 + e, values);
            }
          }
        };
        if (plain) {
          T* const at = static_cast<T*>(a.out.data) + out;
          for_rows(
              [&](int r, const float(&values)[kChunk]) { store_chunk(at + r * a.out.stride, values, a.accumulate); });
          return;
        }
        const int count = static_cast<int>(min(static_cast<std::int64_t>(kChunk), a.width - to_col));
        for_rows([&](int r, float(&values)[kChunk]) {
          if (a.mask.active) {
            const unsigned bits =
                count > 0 ? words.keep_bits(static_cast<std::uint64_t>((row + r) * a.width + to_col), kChunk) : 0;
#pragma unroll
            for (int i = 0; i < kChunk; ++i) values[i] = (bits >> i & 1u) != 0 ? scale * values[i] : 0.0f;
          }
          store_any(a, out + r * a.out.stride, count, values);
        });
      });
}

// ---- launches
// -------------------------------------------------------------------------------------------------------------

/// Launches kKernel with `shared` bytes in clusters of `cluster` blocks. It may begin while the kernel before it in the
/// stream ends (see begin_kernel).
template <auto kKernel, class... Arguments>
void launch(std::int64_t blocks, int shared, int cluster, cudaStream_t stream, const Arguments&... arguments) {
  check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "lora: shared memory");
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared);
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  check(cudaLaunchKernelEx(&config, kKernel, arguments...), "lora: launch");
}

inline bool fours_aligned(const void* data, std::int64_t stride, std::size_t element) {
  return reinterpret_cast<std::uintptr_t>(data) % (4 * element) == 0 && stride % 4 == 0;
}

template <class T>
Source<T> factor_source(const LoraFactor& factor, std::int64_t rank, std::int64_t width) {
  return factor.transposed ? source<T>(factor.data, factor.stride, width, rank)
                           : source<T>(factor.data, factor.stride, rank, width);
}

/// `partial`: room for `parts` results when parts > 1.
template <class T>
ShrinkResult<T> shrink_result(const LoraShrinkArguments& a, std::int64_t parts, float* partial) {
  ShrinkResult<T> result;
  result.out = static_cast<T*>(a.out.data);
  result.stride = a.out.stride;
  result.rows = a.rows;
  result.rank = static_cast<int>(a.rank);
  result.padded_rank = static_cast<int>(a.padded_rank);
  result.scale = static_cast<float>(a.scale * a.mask.factor);
  result.partial = parts > 1 ? partial : nullptr;
  result.pitch = static_cast<int>(detail::round_to(a.rank, lora_rank_tile(a.rank)));
  result.aligned = fours_aligned(a.out.data, a.out.stride, sizeof(T));
  return result;
}

inline ReduceResult reduce_result(const LoraReduceArguments& a, std::int64_t parts, float* partial) {
  ReduceResult result;
  result.grad = a.grad;
  result.rank = a.rank;
  result.width = a.width;
  result.scale = static_cast<float>(a.mask.factor);
  result.accumulate = a.accumulate;
  result.partial = parts > 1 ? partial : nullptr;
  result.aligned =
      fours_aligned(a.grad.data, a.grad.stride, sizeof(float)) && (a.grad.transposed ? a.rank : a.width) % 4 == 0;
  return result;
}

template <class F>
void with_rank_tile(std::int64_t rank, F&& f) {
  switch (lora_rank_tile(rank)) {
    case 16:
      return f(std::integral_constant<int, 16>());
    case 32:
      return f(std::integral_constant<int, 32>());
    default:
      return f(std::integral_constant<int, 64>());
  }
}

template <class F>
void with_bool(bool value, F&& f) {
  if (value) {
    f(std::true_type());
  } else {
    f(std::false_type());
  }
}

/// Adds up what the blocks left in parts.
template <class T>
void finish(const ShrinkResult<T>& shrunk, std::int64_t shrink_groups, const ReduceResult& reduced,
            std::int64_t reduce_groups, cudaStream_t stream) {
  if (shrink_groups <= 1 && reduce_groups <= 1) return;
  const std::int64_t shrink_threads = shrink_groups > 1 ? shrunk.rows * shrunk.pitch / 4 : 0;
  const std::int64_t inner = reduced.grad.transposed ? reduced.rank : reduced.width,
                     outer = reduced.grad.transposed ? reduced.width : reduced.rank;
  const std::int64_t reduce_threads = reduce_groups > 1 ? detail::divide_up(inner, 4) * outer : 0;
  launch<finish_kernel<T>>(detail::divide_up(shrink_threads + reduce_threads, kThreads), 0, 1, stream, shrunk,
                           shrink_groups, reduced, reduce_groups);
}

template <class T>
void shrink(const LoraShrinkArguments& a, const LoraPlan& plan, float* workspace, cudaStream_t stream) {
  const std::int64_t groups = plan.parts / plan.cluster;
  const auto result = shrink_result<T>(a, groups, workspace);
  const auto wide = source<T>(a.wide.data, a.wide.stride, a.rows, a.width);
  const auto factor = factor_source<T>(a.factor, a.rank, a.width);
  with_rank_tile(a.rank, [&](auto rank) {
    with_bool(a.factor.transposed, [&](auto transposed) {
      const auto go = [&](auto rows) {
        constexpr int kRows = decltype(rows)::value, kRank = decltype(rank)::value;
        constexpr bool kTransposed = decltype(transposed)::value;
        launch<shrink_kernel<T, kRows, kRank, kTransposed>>(
            plan.tiles * plan.parts, ShrinkTiles<T, kRows, kRank, kTransposed>::kBytes, plan.cluster, stream, wide,
            factor, result, static_cast<int>(plan.parts), plan.length, a.mask);
      };
      if (plan.row_tile == 128) {
        go(std::integral_constant<int, 128>());
      } else {
        go(std::integral_constant<int, 32>());
      }
    });
  });
  finish<T>(result, groups, {}, 1, stream);
}

template <class T>
void reduce(const LoraReduceArguments& a, const LoraPlan& plan, float* workspace, cudaStream_t stream) {
  const std::int64_t groups = plan.parts / plan.cluster;
  const auto narrow = source<T>(a.narrow.data, a.narrow.stride, a.rows, a.rank),
             wide = source<T>(a.wide.data, a.wide.stride, a.rows, a.width);
  const ReduceResult result = reduce_result(a, groups, workspace);
  with_rank_tile(a.rank, [&](auto rank) {
    constexpr int kRank = decltype(rank)::value;
    launch<reduce_kernel<T, kRank>>(plan.tiles * plan.parts, ReduceTiles<T, kRank>::kBytes, plan.cluster, stream,
                                    narrow, wide, result, static_cast<int>(plan.parts), plan.length, a.mask);
  });
  finish<T>({}, 1, result, groups, stream);
}

template <class T>
void both(const LoraShrinkArguments& s, const LoraReduceArguments& r, const LoraPlan& plan, float* workspace,
          cudaStream_t stream) {
  const std::int64_t groups = plan.tiles / plan.cluster;
  const auto shrunk = shrink_result<T>(s, groups, workspace);
  const ReduceResult reduced = reduce_result(r, plan.parts, workspace + shrink_floats(s, groups));
  const auto wide = source<T>(s.wide.data, s.wide.stride, s.rows, s.width),
             narrow = source<T>(r.narrow.data, r.narrow.stride, r.rows, r.rank);
  const auto factor = factor_source<T>(s.factor, s.rank, s.width);
  const auto go = [&](auto rank) {
    with_bool(s.factor.transposed, [&](auto transposed) {
      constexpr int kRank = decltype(rank)::value;
      constexpr bool kTransposed = decltype(transposed)::value;
      launch<both_kernel<T, kRank, kTransposed>>(plan.tiles * plan.parts, BothTiles<T, kRank, kTransposed>::kBytes,
                                                 plan.cluster, stream, wide, factor, narrow, shrunk, reduced,
                                                 static_cast<int>(plan.tiles), static_cast<int>(plan.length), s.mask);
    });
  };
  if (lora_rank_tile(s.rank) == 16) {
    go(std::integral_constant<int, 16>());
  } else {
    go(std::integral_constant<int, 32>());
  }
  finish<T>(shrunk, groups, reduced, plan.parts, stream);
}

template <class T>
void expand(const LoraExpandArguments& a, const LoraPlan& plan, cudaStream_t stream) {
  const auto narrow = source<T>(a.narrow.data, a.narrow.stride, a.rows, a.rank);
  const auto factor = factor_source<T>(a.factor, a.rank, a.width);
  const bool aligned =
      a.out_dtype == a.dtype && reinterpret_cast<std::uintptr_t>(a.out.data) % 16 == 0 && a.out.stride % kChunk == 0;
  with_rank_tile(a.rank, [&](auto rank) {
    with_bool(a.factor.transposed, [&](auto transposed) {
      constexpr int kRank = decltype(rank)::value;
      constexpr bool kTransposed = decltype(transposed)::value;
      launch<expand_kernel<T, kRank, kTransposed>>(plan.tiles * plan.parts, ExpandTiles<T, kRank>::kBytes, 1, stream,
                                                   narrow, factor, a, plan.length, aligned);
    });
  });
}

}  // namespace rowan::cuda::lora_mma
