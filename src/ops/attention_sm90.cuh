// Attention in bfloat16 and float16 on Hopper's warpgroup products, after FlashAttention-2 and -3 (arXiv 2407.08608): a
// warpgroup holds 64 rows of a tile; scores, weights and sums stay in its registers in float32, and weights go on as a
// product's operand from there. Tiles of the other side come through two buffers, copied while the last is multiplied.
// Blocks are small, so that several of them share a multiprocessor: while one works out exponentials, others multiply.
#pragma once

#include <type_traits>

#include "ops/attention_tiles.cuh"
#include "ops/row_reduce.cuh"
#include "ops/warpgroup_sm90.cuh"

namespace rowan::cuda {

namespace {

namespace warpgroup {

using namespace sm90;

constexpr int kRows = 64;                      // of a tile: a warpgroup's own, and a round's of the other side
constexpr int kTileBytes = kRows * kRowBytes;  // of 64 columns
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

/// Sizes for heads of up to kDim elements, 64 or 128.
template <int kDim>
struct Config {
  static constexpr int kParts = kDim / 64;  // a tile is laid out as kParts tiles of 64 columns
  static constexpr int kBytes = kParts * kTileBytes;
  static constexpr int kWarpgroups = kDim == 64 ? 2 : 3;  // of a block that owns queries
  static constexpr int kQueries = kWarpgroups * kRows;
  static constexpr int kQueryThreads = kWarpgroups * kWarpgroup;
  static constexpr int kForwardBlocks = kDim == 64 ? 2 : 1;  // a multiprocessor
  static constexpr int kKeyBlocks = kDim == 64 ? 3 : 2;
  static constexpr int kAlign = 1024;
  static constexpr int kForwardBytes = kAlign + kWarpgroups * kBytes + 2 * 2 * kBytes;
  static constexpr int kQueryGradientBytes = kAlign + 2 * kWarpgroups * kBytes + 2 * 2 * kBytes;
  static constexpr int kKeyGradientBytes = kAlign + 2 * kBytes + 2 * (2 * kBytes + 2 * kRows * 4);
};

/// A thread's part of 64 x 64 results: of its warp's 16 rows, row g + 8 h and column 8 j + 2 t + c at [4 j + 2 h + c],
/// g = lane / 4 and t = lane % 4.
using Results = float[32];

template <class T>
__device__ T* aligned_shared(unsigned char* shared) {
  return reinterpret_cast<T*>((reinterpret_cast<std::uintptr_t>(shared) + 1023) / 1024 * 1024);
}

__device__ inline void copy_async_16(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
__device__ inline void copy_async_4(std::uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}
__device__ inline float power_of_two(float x) {  // one instruction; results below 2^-126 are 0
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ inline void copies_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// One thread's share in copying tiles of a head's rows; what lies beyond the sequence or beyond head_dim becomes zero.
template <class T, int kDim, int kThreads>
class TileCopy {
 public:
  __device__ TileCopy(const HeadView& view, const Tile& tile, std::int32_t head_dim, int thread)
      : row_stride_(view.row_stride), head_stride_(view.head_stride) {
    const int chunk = thread % kChunks;
    row_ = thread / kChunks;
    place_ = static_cast<std::uint32_t>(chunk / 8 * kTileBytes + row_ * kRowBytes + ((chunk % 8) ^ (row_ % 8)) * 16);
    from_ = head_pointer<T>(view, tile.begin + row_, 0) + chunk * 8;
    end_ = thread < kCopying && chunk * 8 < head_dim ? tile.length - row_ : 0;
    copies_ = thread < kCopying;
  }
  /// Starts to copy rows [first, first + 64) of the sequence.
  __device__ void start(std::uint32_t to, std::int32_t head, std::int32_t first) const {
    if (!copies_) return;
    const T* from = from_ + head * head_stride_ + first * row_stride_;
    const std::int64_t step = kRowsAtOnce * row_stride_;
#pragma unroll
    for (int r = 0; r < kRows; r += kRowsAtOnce, from += step)
      copy_async_16(to + place_ + static_cast<std::uint32_t>(r * kRowBytes), from, first + r < end_);
  }

 private:
  static constexpr int kCopying = kThreads <= 256 ? kThreads : 256;
  static constexpr int kChunks = kDim / 8, kRowsAtOnce = kCopying / kChunks;
  static_assert(kRowsAtOnce % 8 == 0, "all of a thread's chunks are swizzled alike");
  std::int64_t row_stride_, head_stride_;
  const T* from_;
  std::uint32_t place_;
  std::int32_t row_, end_;
  bool copies_;
};

/// results = A B^T over heads of kDim elements: A and B are tiles in shared memory.
template <class T, int kDim>
__device__ void multiply_nt(Results& results, std::uint32_t a, std::uint32_t b) {
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    const std::uint32_t offset = k / 4 * kTileBytes + k % 4 * 32;
    multiply(results, operand_descriptor(a + offset), operand_descriptor(b + offset), k != 0, T());
  }
}

/// 64 x 64 weights as the left operand of a product.
template <class T>
struct Weights {
  std::uint32_t part[4][4];  // of 16 columns each

  __device__ explicit Weights(const Results& from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) part[i][r] = packed(from[8 * i + 2 * r], from[8 * i + 2 * r + 1], T());
    }
  }
};

/// results [64 x kDim] += weights B, B a tile.
template <class T, int kDim>
__device__ void multiply_nn(Results (&results)[kDim / 64], const Weights<T>& weights, std::uint32_t b) {
#pragma unroll
  for (int p = 0; p < kDim / 64; ++p) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      multiply<true>(results[p], weights.part[i], operand_descriptor(b + p * kTileBytes + i * 16 * kRowBytes), 1, T());
    }
  }
}

/// Writes scale[h] results as rows g + 8 h of the warp's 16 rows.
template <class T, int kDim>
__device__ void store_results(const HeadView& view, const Tile& tile, std::int32_t first_row,
                              const Results (&results)[kDim / 64], float low_scale, float high_scale,
                              std::int32_t head_dim, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::int32_t row = first_row + 8 * h;
    if (row >= tile.length) continue;
    T* const out = head_pointer<T>(view, tile.begin + row, tile.head);
    const float scale = h == 0 ? low_scale : high_scale;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) {
      const int column = j * 8 + lane % 4 * 2;
      if (column >= head_dim) continue;  // head_dim is a multiple of 8
      const float* const pair = &results[j / 8][j % 8 * 4 + 2 * h];
      *reinterpret_cast<std::uint32_t*>(out + column) = packed(pair[0] * scale, pair[1] * scale, T());
    }
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(Config<kDim>::kQueryThreads, Config<kDim>::kForwardBlocks)
    forward_kernel(AttentionArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Config<kDim>;
  const Tile tile = locate_tile<C::kQueries>(a, a.query_heads, true);
  if (tile.first >= tile.length) return;
  extern __shared__ __align__(16) unsigned char shared[];
  const std::uint32_t q = shared_address(aligned_shared<T>(shared)), ring = q + C::kWarpgroups * C::kBytes;
  const int thread = static_cast<int>(threadIdx.x), warpgroup = thread / kWarpgroup, lane = thread % 32;
  const auto head_dim = static_cast<std::int32_t>(a.head_dim);
  const auto key_head = static_cast<std::int32_t>(tile.head / (a.query_heads / a.key_heads));
  const float scale = static_cast<float>(a.scale) * kLog2e;  // scores in units of ln 2
  using Copy = TileCopy<T, kDim, C::kQueryThreads>;
  const Copy keys_copy(a.k, tile, head_dim, thread), values_copy(a.v, tile, head_dim, thread);
  const auto start_keys = [&](std::int32_t first, int buffer) {
    const std::uint32_t to = ring + buffer * 2 * C::kBytes;
    keys_copy.start(to, key_head, first);
    values_copy.start(to + C::kBytes, key_head, first);
  };
  const Copy queries_copy(a.q, tile, head_dim, thread);
#pragma unroll
  for (int w = 0; w < C::kWarpgroups; ++w) queries_copy.start(q + w * C::kBytes, tile.head, tile.first + w * kRows);
  start_keys(0, 0);

  Results out[C::kParts] = {};
  float maximum[2] = {-infinity(), -infinity()}, sum[2] = {};
  const std::int32_t own = tile.first + warpgroup * kRows;  // the warpgroup's first row
  const std::int32_t first_row = own + thread % kWarpgroup / 32 * 16 + lane / 4;
  const std::int32_t keys = min(tile.first + C::kQueries, tile.length);
  for (std::int32_t first = 0, buffer = 0; first < keys; first += kRows, buffer ^= 1) {
    copies_wait();
    publish_shared();
    __syncthreads();  // this round's tiles are there, and the products of the last round are done
    if (first + kRows < keys) start_keys(first + kRows, buffer ^ 1);
    if (first > own) continue;
    const std::uint32_t k = ring + buffer * 2 * C::kBytes, v = k + C::kBytes;
    Results score;
    multiplies_begin();
    multiply_nt<T, kDim>(score, q + warpgroup * C::kBytes, k);
    multiplies_commit();
    multiplies_wait<0>(score);
#pragma unroll
    for (int i = 0; i < 32; ++i) score[i] *= scale;
    if (first == own) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (first + i / 4 * 8 + lane % 4 * 2 + i % 2 > first_row + i % 4 / 2 * 8) score[i] = -infinity();
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float largest = maximum[h];
#pragma unroll
      for (int j = 0; j < 8; ++j) largest = fmaxf(largest, fmaxf(score[4 * j + 2 * h], score[4 * j + 2 * h + 1]));
      largest = combine_lanes<4>(largest, Maximum());
      const float base = finite_maximum(largest), shrink = power_of_two(maximum[h] - base);
      maximum[h] = largest;
      sum[h] *= shrink;
#pragma unroll
      for (int p = 0; p < C::kParts; ++p) {
#pragma unroll
        for (int j = 0; j < 8; ++j) out[p][4 * j + 2 * h] *= shrink, out[p][4 * j + 2 * h + 1] *= shrink;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& value = score[4 * j + 2 * h + c];
          value = power_of_two(value - base);
          sum[h] += value;
        }
      }
    }
    const Weights<T> weights(score);
    multiplies_begin(out);
    multiply_nn<T, kDim>(out, weights, v);
    multiplies_commit();
    multiplies_wait<0>(out);
  }
  float inverse[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = combine_lanes<4>(sum[h], Sum());
    inverse[h] = 1.0f / total;
    const std::int32_t row = first_row + 8 * h;
    if (lane % 4 == 0 && row < tile.length) {
      static_cast<float*>(a.lse)[tile.head * a.tokens + tile.begin + row] =
          finite_maximum(maximum[h]) * kLn2 + logf(total);
    }
  }
  store_results<T, kDim>(a.out, tile, first_row, out, inverse[0], inverse[1], head_dim, lane);
#endif
}

template <class T, int kDim>
__global__ void __launch_bounds__(Config<kDim>::kQueryThreads, Config<kDim>::kForwardBlocks)
    query_gradient_kernel(AttentionArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Config<kDim>;
  const Tile tile = locate_tile<C::kQueries>(a, a.query_heads, true);
  if (tile.first >= tile.length) return;
  extern __shared__ __align__(16) unsigned char shared[];
  const std::uint32_t q = shared_address(aligned_shared<T>(shared)), dout = q + C::kWarpgroups * C::kBytes,
                      ring = dout + C::kWarpgroups * C::kBytes;
  const int thread = static_cast<int>(threadIdx.x), warpgroup = thread / kWarpgroup, lane = thread % 32;
  const auto head_dim = static_cast<std::int32_t>(a.head_dim);
  const auto key_head = static_cast<std::int32_t>(tile.head / (a.query_heads / a.key_heads));
  const float scale = static_cast<float>(a.scale) * kLog2e;
  using Copy = TileCopy<T, kDim, C::kQueryThreads>;
  const Copy keys_copy(a.k, tile, head_dim, thread), values_copy(a.v, tile, head_dim, thread);
  const auto start_keys = [&](std::int32_t first, int buffer) {
    const std::uint32_t to = ring + buffer * 2 * C::kBytes;
    keys_copy.start(to, key_head, first);
    values_copy.start(to + C::kBytes, key_head, first);
  };
  const Copy queries_copy(a.q, tile, head_dim, thread), douts_copy(a.dout, tile, head_dim, thread);
#pragma unroll
  for (int w = 0; w < C::kWarpgroups; ++w) {
    queries_copy.start(q + w * C::kBytes, tile.head, tile.first + w * kRows);
    douts_copy.start(dout + w * C::kBytes, tile.head, tile.first + w * kRows);
  }
  start_keys(0, 0);

  Results dq[C::kParts] = {};
  const std::int32_t own = tile.first + warpgroup * kRows;
  const std::int32_t first_row = own + thread % kWarpgroup / 32 * 16 + lane / 4;
  float lse[2], delta[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::int32_t row = first_row + 8 * h;
    const std::int64_t at = tile.head * a.tokens + tile.begin + row;
    lse[h] = row < tile.length ? static_cast<const float*>(a.lse)[at] * kLog2e : infinity();  // infinity: weights of 0
    delta[h] = row < tile.length ? static_cast<const float*>(a.delta)[at] : 0.0f;
  }
  const std::int32_t keys = min(tile.first + C::kQueries, tile.length);
  for (std::int32_t first = 0, buffer = 0; first < keys; first += kRows, buffer ^= 1) {
    copies_wait();
    publish_shared();
    __syncthreads();  // this round's tiles are there, and the products of the last round are done
    if (first + kRows < keys) start_keys(first + kRows, buffer ^ 1);
    if (first > own) continue;
    const std::uint32_t k = ring + buffer * 2 * C::kBytes, v = k + C::kBytes;
    Results score, dweight;
    multiplies_begin();
    multiply_nt<T, kDim>(score, q + warpgroup * C::kBytes, k);
    multiplies_commit();
    multiply_nt<T, kDim>(dweight, dout + warpgroup * C::kBytes, v);
    multiplies_commit();
    multiplies_wait<1>(score);
#pragma unroll
    for (int i = 0; i < 32; ++i) score[i] = power_of_two(score[i] * scale - lse[i % 4 / 2]);
    multiplies_wait<0>(dweight);
#pragma unroll
    for (int i = 0; i < 32; ++i) score[i] *= dweight[i] - delta[i % 4 / 2];
    if (first == own) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (first + i / 4 * 8 + lane % 4 * 2 + i % 2 > first_row + i % 4 / 2 * 8) score[i] = 0.0f;
      }
    }
    const Weights<T> dscore(score);
    multiplies_begin(dq);
    multiply_nn<T, kDim>(dq, dscore, k);
    multiplies_commit();
    multiplies_wait<0>(dq);
  }
  const auto out_scale = static_cast<float>(a.scale);
  store_results<T, kDim>(a.dq, tile, first_row, dq, out_scale, out_scale, head_dim, lane);
#endif
}

/// One tile of keys a block, against the later queries of all heads that share them. Its products are transposed: rows
/// are keys.
template <class T, int kDim>
__global__ void __launch_bounds__(kWarpgroup, Config<kDim>::kKeyBlocks)
    key_value_gradient_kernel(AttentionArguments a) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using C = Config<kDim>;
  constexpr int kBufferBytes = 2 * C::kBytes;
  const Tile tile = locate_tile<kRows>(a, a.key_heads, false);
  if (tile.first >= tile.length) return;
  extern __shared__ __align__(16) unsigned char shared[];
  unsigned char* const base = aligned_shared<unsigned char>(shared);
  const std::uint32_t k = shared_address(base), v = k + C::kBytes, ring = v + C::kBytes;
  // Of each buffer's queries: lse, then delta.
  const float* const row_values = reinterpret_cast<const float*>(base + 2 * C::kBytes + 2 * kBufferBytes);
  const std::uint32_t row_values_address = shared_address(row_values);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const auto head_dim = static_cast<std::int32_t>(a.head_dim);
  const auto group = static_cast<std::int32_t>(a.query_heads / a.key_heads);
  const float scale = static_cast<float>(a.scale) * kLog2e;
  using Copy = TileCopy<T, kDim, kWarpgroup>;
  const Copy queries_copy(a.q, tile, head_dim, thread), douts_copy(a.dout, tile, head_dim, thread);
  const std::int32_t row_value = thread % kRows;
  const float* const row_values_from =
      static_cast<const float*>(thread < kRows ? a.lse : a.delta) + tile.begin + row_value;
  const auto start_queries = [&](std::int32_t head, std::int32_t first, int buffer) {
    const std::uint32_t to = ring + buffer * kBufferBytes;
    queries_copy.start(to, head, first);
    douts_copy.start(to + C::kBytes, head, first);
    copy_async_4(row_values_address + (buffer * 2 * kRows + thread) * 4, row_values_from + head * a.tokens + first,
                 first + row_value < tile.length);
  };
  Copy(a.k, tile, head_dim, thread).start(k, tile.head, tile.first);
  Copy(a.v, tile, head_dim, thread).start(v, tile.head, tile.first);
  std::int32_t head = tile.head * group, first = tile.first;
  start_queries(head, first, 0);

  Results dk[C::kParts] = {}, dv[C::kParts] = {};
  const std::int32_t first_key = tile.first + thread / 32 * 16 + lane / 4;
  const std::int32_t last_head = head + group;
  for (int buffer = 0; head < last_head; buffer ^= 1) {
    copies_wait();
    publish_shared();
    __syncthreads();  // this round's tiles are there, and the products of the last round are done
    const bool diagonal = first == tile.first;
    first += kRows;
    if (first >= tile.length) first = tile.first, ++head;
    if (head < last_head) start_queries(head, first, buffer ^ 1);

    const std::uint32_t q = ring + buffer * kBufferBytes, dout = q + C::kBytes;
    const float* const lse = row_values + buffer * 2 * kRows + lane % 4 * 2;
    const float* const delta = lse + kRows;
    Results weight, dscore;
    multiplies_begin();
    multiply_nt<T, kDim>(weight, k, q);
    multiply_nt<T, kDim>(dscore, v, dout);
    multiplies_commit();
    multiplies_wait<0>(weight, dscore);
    if (diagonal) {  // queries before a key have no weight for it
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (first_key + i % 4 / 2 * 8 > tile.first + i / 4 * 8 + lane % 4 * 2 + i % 2) weight[i] = -infinity();
      }
    }
    // Queries beyond the sequence are zero, and so are their lse and delta: they add nothing.
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 lse_pair = *reinterpret_cast<const float2*>(lse + 8 * j);
      const float2 delta_pair = *reinterpret_cast<const float2*>(delta + 8 * j);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int i = 4 * j + r;
        weight[i] = power_of_two(weight[i] * scale - (r % 2 == 0 ? lse_pair.x : lse_pair.y) * kLog2e);
        dscore[i] = weight[i] * (dscore[i] - (r % 2 == 0 ? delta_pair.x : delta_pair.y));
      }
    }
    const Weights<T> weights(weight), dscores(dscore);
    multiplies_begin(dv, dk);
    multiply_nn<T, kDim>(dv, weights, dout);
    multiply_nn<T, kDim>(dk, dscores, q);
    multiplies_commit();
    multiplies_wait<0>(dv, dk);
  }
  const auto out_scale = static_cast<float>(a.scale);
  store_results<T, kDim>(a.dk, tile, first_key, dk, out_scale, out_scale, head_dim, lane);
  store_results<T, kDim>(a.dv, tile, first_key, dv, 1.0f, 1.0f, head_dim, lane);
#endif
}

}  // namespace warpgroup

}  // namespace

}  // namespace rowan::cuda
