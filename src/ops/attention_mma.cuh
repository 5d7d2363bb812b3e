// Attention in bfloat16 and float16 on tensor cores (mma.sync m16n8k16, compute capability 8.0 and later), after
// FlashAttention-2: a warp holds 16 rows of a tile; scores, weights and sums stay in its registers in float32.
#pragma once

#include "ops/attention_tiles.cuh"
#include "ops/row_reduce.cuh"

namespace rowan::cuda {

namespace {

namespace mma {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr int kRows = 16 * kWarps;  // of the tile that a block owns
constexpr int kPad = 8;             // rows of an odd number of 16-byte units: ldmatrix meets no bank conflicts
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

/// Sizes for heads of up to kDim elements.
template <int kDim>
struct Config {
  static constexpr int kStride = kDim + kPad;
  static constexpr int kKeys = kDim <= 128 ? 64 : 32;    // keys of a round, for a block that owns queries
  static constexpr int kQueries = kDim <= 64 ? 64 : 32;  // queries of a round, for a block that owns keys
  static constexpr bool kSplitGradients = kDim > 128;    // dk and dv together do not fit the registers: two launches
  static constexpr int kForwardElements = (kRows + 2 * kKeys) * kStride;
  static constexpr int kQueryGradientElements = 2 * (kRows + kKeys) * kStride;
  static constexpr int kKeyGradientElements = 2 * (kRows + kQueries) * kStride;
};

__device__ inline std::uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}
__device__ inline std::uint32_t pack(float low, float high, __half) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}

/// c[16 x 8] += a[16 x 16] b[16 x 8]. In lane l, with g = l / 4 and t = l % 4: c holds (g, 2t), (g, 2t + 1), (g + 8,
/// 2t), (g + 8, 2t + 1).
__device__ inline void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                                __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void multiply(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                                __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Four 8 x 8 matrices; lanes 8i … 8i + 7 name the rows of matrix i.
__device__ inline void load_matrices(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ inline void load_matrices_transposed(std::uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

/// A warp's product with kColumns columns: 8 of them per entry.
template <int kColumns>
using Accumulator = float[kColumns / 8][4];

/// acc[16 x kColumns] += a[16 x kDepth] b[kColumns x kDepth]^T, both in shared memory.
template <class T, int kColumns, int kDepth, int kStride>
__device__ void multiply_nt(Accumulator<kColumns>& acc, const T* a, const T* b, int lane) {
  const T* const a_row = a + (lane % 16) * kStride + lane / 16 * 8;
  const T* const b_row = b + (lane % 8 + lane / 16 * 8) * kStride + lane / 8 % 2 * 8;
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    std::uint32_t left[4];
    load_matrices(left, a_row + k);
#pragma unroll
    for (int j = 0; j < kColumns; j += 16) {
      std::uint32_t right[4];
      load_matrices(right, b_row + j * kStride + k);
      multiply(acc[j / 8], left, right[0], right[1], T());
      multiply(acc[j / 8 + 1], left, right[2], right[3], T());
    }
  }
}

/// acc[16 x kColumns] += weights[16 x kDepth] b[kDepth x kColumns]: weights, an accumulator, are rounded to T; b is in
/// shared memory.
template <class T, int kColumns, int kDepth, int kStride>
__device__ void multiply_nn(Accumulator<kColumns>& acc, const Accumulator<kDepth>& weights, const T* b, int lane) {
  const T* const b_row = b + (lane % 16) * kStride + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    const float(&low)[4] = weights[k / 8];
    const float(&high)[4] = weights[k / 8 + 1];
    const std::uint32_t left[4] = {pack(low[0], low[1], T()), pack(low[2], low[3], T()), pack(high[0], high[1], T()),
                                   pack(high[2], high[3], T())};
#pragma unroll
    for (int j = 0; j < kColumns; j += 16) {
      std::uint32_t right[4];
      load_matrices_transposed(right, b_row + k * kStride + j);
      multiply(acc[j / 8], left, right[0], right[1], T());
      multiply(acc[j / 8 + 1], left, right[2], right[3], T());
    }
  }
}

/// Writes scale[h] acc as rows g + 8 h of the warp's 16 rows of a tile.
template <class T, int kColumns>
__device__ void store_rows(const HeadView& view, const Tile& tile, const Accumulator<kColumns>& acc, float low_scale,
                           float high_scale, std::int32_t head_dim, int warp, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::int32_t row = tile.first + warp * 16 + lane / 4 + 8 * h;
    if (row >= tile.length) continue;
    T* const out = head_pointer<T>(view, tile.begin + row, tile.head);
    const float scale = h == 0 ? low_scale : high_scale;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const int column = j * 8 + lane % 4 * 2;
      if (column >= head_dim) continue;  // head_dim is even
      out[column] = from_float<T>(acc[j][2 * h] * scale);
      out[column + 1] = from_float<T>(acc[j][2 * h + 1] * scale);
    }
  }
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads) forward_kernel(AttentionArguments a, bool packs) {
  using C = Config<kDim>;
  constexpr int kKeys = C::kKeys;
  const Tile tile = locate_tile<kRows>(a, a.query_heads, true);
  if (tile.first >= tile.length) return;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const q = reinterpret_cast<T*>(shared);
  T* const k = q + kRows * C::kStride;
  T* const v = k + kKeys * C::kStride;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto head_dim = static_cast<std::int32_t>(a.head_dim);
  const auto key_head = static_cast<std::int32_t>(tile.head / (a.query_heads / a.key_heads));
  const float scale = static_cast<float>(a.scale) * kLog2e;  // scores in units of ln 2
  load_tile<T, kRows, kDim, C::kStride, kThreads>(q, a.q, tile, tile.first, tile.head, head_dim, packs);

  Accumulator<kDim> out = {};
  float maximum[2] = {-infinity(), -infinity()}, sum[2] = {};
  const std::int32_t first_row = tile.first + warp * 16 + lane / 4;
  const std::int32_t keys = min(tile.first + kRows, tile.length);
  for (std::int32_t first = 0; first < keys; first += kKeys) {
    __syncthreads();  // the products of the last round are done
    load_tile<T, kKeys, kDim, C::kStride, kThreads>(k, a.k, tile, first, key_head, head_dim, packs);
    load_tile<T, kKeys, kDim, C::kStride, kThreads>(v, a.v, tile, first, key_head, head_dim, packs);
    __syncthreads();
    Accumulator<kKeys> score = {};
    multiply_nt<T, kKeys, kDim, C::kStride>(score, q + warp * 16 * C::kStride, k, lane);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int32_t row = first_row + 8 * h;
      float largest = maximum[h];
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& value = score[j][2 * h + c];
          value = first + j * 8 + lane % 4 * 2 + c <= row ? value * scale : -infinity();
          largest = fmaxf(largest, value);
        }
      }
      largest = combine_lanes<4>(largest, Maximum());
      const float base = finite_maximum(largest), shrink = exp2f(maximum[h] - base);
      maximum[h] = largest;
      sum[h] *= shrink;
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) out[j][2 * h] *= shrink, out[j][2 * h + 1] *= shrink;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          score[j][2 * h + c] = exp2f(score[j][2 * h + c] - base);
          sum[h] += score[j][2 * h + c];
        }
      }
    }
    multiply_nn<T, kDim, kKeys, C::kStride>(out, score, v, lane);
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
  store_rows<T, kDim>(a.out, tile, out, inverse[0], inverse[1], head_dim, warp, lane);
}

template <class T, int kDim>
__global__ void __launch_bounds__(kThreads) query_gradient_kernel(AttentionArguments a, bool packs) {
  using C = Config<kDim>;
  constexpr int kKeys = C::kKeys;
  const Tile tile = locate_tile<kRows>(a, a.query_heads, true);
  if (tile.first >= tile.length) return;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const q = reinterpret_cast<T*>(shared);
  T* const dout = q + kRows * C::kStride;
  T* const k = dout + kRows * C::kStride;
  T* const v = k + kKeys * C::kStride;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto head_dim = static_cast<std::int32_t>(a.head_dim);
  const auto key_head = static_cast<std::int32_t>(tile.head / (a.query_heads / a.key_heads));
  const float scale = static_cast<float>(a.scale) * kLog2e;
  load_tile<T, kRows, kDim, C::kStride, kThreads>(q, a.q, tile, tile.first, tile.head, head_dim, packs);
  load_tile<T, kRows, kDim, C::kStride, kThreads>(dout, a.dout, tile, tile.first, tile.head, head_dim, packs);

  Accumulator<kDim> dq = {};
  const std::int32_t first_row = tile.first + warp * 16 + lane / 4;
  float lse[2], delta[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const std::int32_t row = first_row + 8 * h;
    const std::int64_t at = tile.head * a.tokens + tile.begin + row;
    lse[h] = row < tile.length ? static_cast<const float*>(a.lse)[at] * kLog2e : infinity();  // infinity: weights of 0
    delta[h] = row < tile.length ? static_cast<const float*>(a.delta)[at] : 0.0f;
  }
  const std::int32_t keys = min(tile.first + kRows, tile.length);
  for (std::int32_t first = 0; first < keys; first += kKeys) {
    __syncthreads();  // the products of the last round are done
    load_tile<T, kKeys, kDim, C::kStride, kThreads>(k, a.k, tile, first, key_head, head_dim, packs);
    load_tile<T, kKeys, kDim, C::kStride, kThreads>(v, a.v, tile, first, key_head, head_dim, packs);
    __syncthreads();
    Accumulator<kKeys> score = {}, dweight = {};
    multiply_nt<T, kKeys, kDim, C::kStride>(score, q + warp * 16 * C::kStride, k, lane);
    multiply_nt<T, kKeys, kDim, C::kStride>(dweight, dout + warp * 16 * C::kStride, v, lane);
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int h = c / 2;
        const bool visible = first + j * 8 + lane % 4 * 2 + c % 2 <= first_row + 8 * h;
        const float weight = visible ? exp2f(score[j][c] * scale - lse[h]) : 0.0f;
        score[j][c] = visible ? weight * (dweight[j][c] - delta[h]) : 0.0f;
      }
    }
    multiply_nn<T, kDim, kKeys, C::kStride>(dq, score, k, lane);
  }
  const auto out_scale = static_cast<float>(a.scale);
  store_rows<T, kDim>(a.dq, tile, dq, out_scale, out_scale, head_dim, warp, lane);
}

/// One tile of keys a block, against the later queries of all heads that share them. Its products are transposed: rows
/// are keys.
template <class T, int kDim, bool kWithKey, bool kWithValue>
__global__ void __launch_bounds__(kThreads) key_value_gradient_kernel(AttentionArguments a, bool packs) {
  using C = Config<kDim>;
  constexpr int kQueries = C::kQueries;
  const Tile tile = locate_tile<kRows>(a, a.key_heads, false);
  if (tile.first >= tile.length) return;
  extern __shared__ __align__(16) unsigned char shared[];
  T* const k = reinterpret_cast<T*>(shared);
  T* const v = k + kRows * C::kStride;
  T* const q = v + kRows * C::kStride;
  T* const dout = q + kQueries * C::kStride;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto head_dim = static_cast<std::int32_t>(a.head_dim);
  const auto group = static_cast<std::int32_t>(a.query_heads / a.key_heads);
  const float scale = static_cast<float>(a.scale) * kLog2e;
  load_tile<T, kRows, kDim, C::kStride, kThreads>(k, a.k, tile, tile.first, tile.head, head_dim, packs);
  if constexpr (kWithKey) {
    load_tile<T, kRows, kDim, C::kStride, kThreads>(v, a.v, tile, tile.first, tile.head, head_dim, packs);
  }

  Accumulator<kWithKey ? kDim : 8> dk = {};
  Accumulator<kWithValue ? kDim : 8> dv = {};
  const std::int32_t first_key = tile.first + warp * 16 + lane / 4;
  for (std::int32_t head = tile.head * group; head < (tile.head + 1) * group; ++head) {
    const float* const lse = static_cast<const float*>(a.lse) + head * a.tokens + tile.begin;
    const float* const delta = static_cast<const float*>(a.delta) + head * a.tokens + tile.begin;
    for (std::int32_t first = tile.first; first < tile.length; first += kQueries) {
      __syncthreads();  // the products of the last round are done
      load_tile<T, kQueries, kDim, C::kStride, kThreads>(q, a.q, tile, first, head, head_dim, packs);
      load_tile<T, kQueries, kDim, C::kStride, kThreads>(dout, a.dout, tile, first, head, head_dim, packs);
      __syncthreads();
      Accumulator<kQueries> weight = {};
      multiply_nt<T, kQueries, kDim, C::kStride>(weight, k + warp * 16 * C::kStride, q, lane);
#pragma unroll
      for (int j = 0; j < kQueries / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const std::int32_t query = first + j * 8 + lane % 4 * 2 + c % 2;
          const bool visible = query < tile.length && first_key + c / 2 * 8 <= query;
          weight[j][c] = visible ? exp2f(weight[j][c] * scale - lse[query] * kLog2e) : 0.0f;
        }
      }
      if constexpr (kWithValue) multiply_nn<T, kDim, kQueries, C::kStride>(dv, weight, dout, lane);
      if constexpr (kWithKey) {
        Accumulator<kQueries> dscore = {};
        multiply_nt<T, kQueries, kDim, C::kStride>(dscore, v + warp * 16 * C::kStride, dout, lane);
#pragma unroll
        for (int j = 0; j < kQueries / 8; ++j) {
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const std::int32_t query = first + j * 8 + lane % 4 * 2 + c % 2;
            const bool visible = query < tile.length && first_key + c / 2 * 8 <= query;
            dscore[j][c] = visible ? weight[j][c] * (dscore[j][c] - delta[query]) : 0.0f;
          }
        }
        multiply_nn<T, kDim, kQueries, C::kStride>(dk, dscore, q, lane);
      }
    }
  }
  if constexpr (kWithKey) {
    const auto out_scale = static_cast<float>(a.scale);
    store_rows<T, kDim>(a.dk, tile, dk, out_scale, out_scale, head_dim, warp, lane);
  }
  if constexpr (kWithValue) store_rows<T, kDim>(a.dv, tile, dv, 1.0f, 1.0f, head_dim, warp, lane);
}

}  // namespace mma

}  // namespace

}  // namespace rowan::cuda
