// Attention in float32 with IEEE arithmetic: tiles in shared memory, products on the plain cores. A block is 16 x 16
// threads; thread (y, x) holds rows y, y + 16, … and columns x, x + 16, … of each product.
#pragma once

#include "ops/attention_tiles.cuh"
#include "ops/row_reduce.cuh"

namespace rowan::cuda {

namespace {

namespace fp32 {

constexpr int kSide = 16;
constexpr int kThreads = kSide * kSide;
constexpr int kPad = 4;  // keeps rows 16-byte aligned and spreads a column over the banks

/// Sizes for heads of up to kDim elements.
template <int kDim>
struct Config {
  static constexpr int kRows = kDim <= 64 ? 64 : 32;  // queries and keys of a tile
  static constexpr int kPerThread = kRows / kSide;
  static constexpr int kColumns = kDim / kSide;
  static constexpr int kStride = kDim + kPad;
  static constexpr int kTile = kRows * kStride;
  static constexpr int kScoreStride = kRows + kPad;
  static constexpr int kScores = kRows * kScoreStride;
  static constexpr int kForwardFloats = 3 * kTile + kScores;
  static constexpr int kBackwardFloats = 4 * kTile + kScores;
};

/// acc[i][j] += a[row y + 16 i] . b[row x + 16 j], both tiles of kDepth columns.
template <int kRows, int kColumns, int kDepth>
__device__ void multiply_nt(float (&acc)[kRows][kColumns], const float* a, int a_stride, const float* b, int b_stride,
                            int y, int x) {
#pragma unroll 4
  for (int k = 0; k < kDepth; k += 4) {
    float4 left[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) left[i] = *reinterpret_cast<const float4*>(a + (y + kSide * i) * a_stride + k);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const float4 right = *reinterpret_cast<const float4*>(b + (x + kSide * j) * b_stride + k);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        acc[i][j] += left[i].x * right.x;
        acc[i][j] += left[i].y * right.y;
        acc[i][j] += left[i].z * right.z;
        acc[i][j] += left[i].w * right.w;
      }
    }
  }
}

/// acc[i][j] += sum over k of a[row y + 16 i][k] b[k][column x + 16 j], for kDepth rows of b.
template <int kRows, int kColumns, int kDepth>
__device__ void multiply_nn(float (&acc)[kRows][kColumns], const float* a, int a_stride, const float* b, int b_stride,
                            int y, int x) {
#pragma unroll 2
  for (int k = 0; k < kDepth; k += 4) {
    float left[kRows][4];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      *reinterpret_cast<float4*>(left[i]) = *reinterpret_cast<const float4*>(a + (y + kSide * i) * a_stride + k);
    }
#pragma unroll
    for (int l = 0; l < 4; ++l) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const float right = b[(k + l) * b_stride + x + kSide * j];
#pragma unroll
        for (int i = 0; i < kRows; ++i) acc[i][j] += left[i][l] * right;
      }
    }
  }
}

/// Writes scale[i] acc as rows y + 16 i of a tile of a head.
template <int kRows, int kColumns>
__device__ void store_rows(const HeadView& view, const Tile& tile, const float (&acc)[kRows][kColumns],
                           const float (&scale)[kRows], std::int32_t head_dim, int y, int x) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const std::int32_t row = tile.first + y + kSide * i;
    if (row >= tile.length) continue;
    float* const out = head_pointer<float>(view, tile.begin + row, tile.head);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      if (x + kSide * j < head_dim) out[x + kSide * j] = acc[i][j] * scale[i];
    }
  }
}

template <int kDim>
__global__ void __launch_bounds__(kThreads) forward_kernel(AttentionArguments a, bool packs) {
  using C = Config<kDim>;
  const Tile tile = locate_tile<C::kRows>(a, a.query_heads, true);
  if (tile.first >= tile.length) return;
  extern __shared__ __align__(16) float shared[];
  float* const q = shared;
  float* const k = q + C::kTile;
  float* const v = k + C::kTile;
  float* const weights = v + C::kTile;
  const int y = static_cast<int>(threadIdx.x) / kSide, x = static_cast<int>(threadIdx.x) % kSide;
  const auto head_dim = static_cast<std::int32_t>(a.head_dim);
  const auto key_head = static_cast<std::int32_t>(tile.head / (a.query_heads / a.key_heads));
  const auto scale = static_cast<float>(a.scale);
  const auto load = [&](float* to, const HeadView& view, std::int32_t first, std::int32_t head) {
    load_tile<float, C::kRows, kDim, C::kStride, kThreads>(to, view, tile, first, head, head_dim, packs);
  };

  load(q, a.q, tile.first, tile.head);
  float out[C::kPerThread][C::kColumns] = {};
  float maximum[C::kPerThread], sum[C::kPerThread];
#pragma unroll
  for (int i = 0; i < C::kPerThread; ++i) maximum[i] = -infinity(), sum[i] = 0;
  for (std::int32_t first = 0; first <= tile.first; first += C::kRows) {
    __syncthreads();  // the products of the last round are done
    load(k, a.k, first, key_head);
    load(v, a.v, first, key_head);
    __syncthreads();
    float score[C::kPerThread][C::kPerThread] = {};
    multiply_nt<C::kPerThread, C::kPerThread, kDim>(score, q, C::kStride, k, C::kStride, y, x);
#pragma unroll
    for (int i = 0; i < C::kPerThread; ++i) {
      const int row = y + kSide * i;
      float largest = maximum[i];
#pragma unroll
      for (int j = 0; j < C::kPerThread; ++j) {
        const bool visible = first + x + kSide * j <= tile.first + row;
        score[i][j] = visible ? score[i][j] * scale : -infinity();
        largest = fmaxf(largest, score[i][j]);
      }
      largest = combine_lanes<kSide>(largest, Maximum());
      const float base = finite_maximum(largest), shrink = expf(maximum[i] - base);
      maximum[i] = largest;
      sum[i] *= shrink;
#pragma unroll
      for (int j = 0; j < C::kColumns; ++j) out[i][j] *= shrink;
#pragma unroll
      for (int j = 0; j < C::kPerThread; ++j) {
        const float weight = expf(score[i][j] - base);
        sum[i] += weight;
        weights[row * C::kScoreStride + x + kSide * j] = weight;
      }
    }
    __syncwarp();  // a row's weights are written and read by one warp
    multiply_nn<C::kPerThread, C::kColumns, C::kRows>(out, weights, C::kScoreStride, v, C::kStride, y, x);
  }
  float inverse[C::kPerThread];
#pragma unroll
  for (int i = 0; i < C::kPerThread; ++i) {
    const float total = combine_lanes<kSide>(sum[i], Sum());
    inverse[i] = 1.0f / total;
    const std::int32_t row = tile.first + y + kSide * i;
    if (x == 0 && row < tile.length) {
      static_cast<float*>(a.lse)[tile.head * a.tokens + tile.begin + row] = finite_maximum(maximum[i]) + logf(total);
    }
  }
  store_rows(a.out, tile, out, inverse, head_dim, y, x);
}

template <int kDim>
__global__ void __launch_bounds__(kThreads) query_gradient_kernel(AttentionArguments a, bool packs) {
  using C = Config<kDim>;
  const Tile tile = locate_tile<C::kRows>(a, a.query_heads, true);
  if (tile.first >= tile.length) return;
  extern __shared__ __align__(16) float shared[];
  float* const q = shared;
  float* const dout = q + C::kTile;
  float* const k = dout + C::kTile;
  float* const v = k + C::kTile;
  float* const dscores = v + C::kTile;
  const int y = static_cast<int>(threadIdx.x) / kSide, x = static_cast<int>(threadIdx.x) % kSide;
  const auto head_dim = static_cast<std::int32_t>(a.head_dim);
  const auto key_head = static_cast<std::int32_t>(tile.head / (a.query_heads / a.key_heads));
  const auto scale = static_cast<float>(a.scale);
  const auto load = [&](float* to, const HeadView& view, std::int32_t first, std::int32_t head) {
    load_tile<float, C::kRows, kDim, C::kStride, kThreads>(to, view, tile, first, head, head_dim, packs);
  };

  load(q, a.q, tile.first, tile.head);
  load(dout, a.dout, tile.first, tile.head);
  float dq[C::kPerThread][C::kColumns] = {};
  float lse[C::kPerThread], delta[C::kPerThread], scales[C::kPerThread];
#pragma unroll
  for (int i = 0; i < C::kPerThread; ++i) {
    const std::int32_t row = tile.first + y + kSide * i;
    const std::int64_t at = tile.head * a.tokens + tile.begin + row;
    lse[i] = row < tile.length ? static_cast<const float*>(a.lse)[at] : infinity();  // infinity: weights of 0
    delta[i] = row < tile.length ? static_cast<const float*>(a.delta)[at] : 0.0f;
    scales[i] = scale;
  }
  for (std::int32_t first = 0; first <= tile.first; first += C::kRows) {
    __syncthreads();  // the products of the last round are done
    load(k, a.k, first, key_head);
    load(v, a.v, first, key_head);
    __syncthreads();
    float score[C::kPerThread][C::kPerThread] = {}, dweight[C::kPerThread][C::kPerThread] = {};
    multiply_nt<C::kPerThread, C::kPerThread, kDim>(score, q, C::kStride, k, C::kStride, y, x);
    multiply_nt<C::kPerThread, C::kPerThread, kDim>(dweight, dout, C::kStride, v, C::kStride, y, x);
#pragma unroll
    for (int i = 0; i < C::kPerThread; ++i) {
      const int row = y + kSide * i;
#pragma unroll
      for (int j = 0; j < C::kPerThread; ++j) {
        const bool visible = first + x + kSide * j <= tile.first + row;
        const float weight = visible ? expf(score[i][j] * scale - lse[i]) : 0.0f;
        dscores[row * C::kScoreStride + x + kSide * j] = visible ? weight * (dweight[i][j] - delta[i]) : 0.0f;
      }
    }
    __syncwarp();
    multiply_nn<C::kPerThread, C::kColumns, C::kRows>(dq, dscores, C::kScoreStride, k, C::kStride, y, x);
  }
  store_rows(a.dq, tile, dq, scales, head_dim, y, x);
}

/// One tile of keys a block, against the later queries of all heads that share them.
template <int kDim>
__global__ void __launch_bounds__(kThreads) key_value_gradient_kernel(AttentionArguments a, bool packs) {
  using C = Config<kDim>;
  const Tile tile = locate_tile<C::kRows>(a, a.key_heads, false);
  if (tile.first >= tile.length) return;
  extern __shared__ __align__(16) float shared[];
  float* const k = shared;
  float* const v = k + C::kTile;
  float* const q = v + C::kTile;
  float* const dout = q + C::kTile;
  float* const scores = dout + C::kTile;  // transposed weights, then transposed score gradients: rows are keys
  const int y = static_cast<int>(threadIdx.x) / kSide, x = static_cast<int>(threadIdx.x) % kSide;
  const auto head_dim = static_cast<std::int32_t>(a.head_dim);
  const auto group = static_cast<std::int32_t>(a.query_heads / a.key_heads);
  const auto scale = static_cast<float>(a.scale);
  const auto load = [&](float* to, const HeadView& view, std::int32_t first, std::int32_t head) {
    load_tile<float, C::kRows, kDim, C::kStride, kThreads>(to, view, tile, first, head, head_dim, packs);
  };

  load(k, a.k, tile.first, tile.head);
  load(v, a.v, tile.first, tile.head);
  float dk[C::kPerThread][C::kColumns] = {}, dv[C::kPerThread][C::kColumns] = {};
  for (std::int32_t head = tile.head * group; head < (tile.head + 1) * group; ++head) {
    for (std::int32_t first = tile.first; first < tile.length; first += C::kRows) {
      __syncthreads();  // the products of the last round are done
      load(q, a.q, first, head);
      load(dout, a.dout, first, head);
      __syncthreads();
      float score[C::kPerThread][C::kPerThread] = {}, dweight[C::kPerThread][C::kPerThread] = {};
      multiply_nt<C::kPerThread, C::kPerThread, kDim>(score, k, C::kStride, q, C::kStride, y, x);
      multiply_nt<C::kPerThread, C::kPerThread, kDim>(dweight, v, C::kStride, dout, C::kStride, y, x);
#pragma unroll
      for (int j = 0; j < C::kPerThread; ++j) {
        const std::int32_t query = first + x + kSide * j;
        const bool inside = query < tile.length;
        const std::int64_t at = head * a.tokens + tile.begin + query;
        const float lse = inside ? static_cast<const float*>(a.lse)[at] : 0.0f;
        const float delta = inside ? static_cast<const float*>(a.delta)[at] : 0.0f;
#pragma unroll
        for (int i = 0; i < C::kPerThread; ++i) {
          const int row = y + kSide * i;
          const bool visible = inside && tile.first + row <= query;
          const float weight = visible ? expf(score[i][j] * scale - lse) : 0.0f;
          scores[row * C::kScoreStride + x + kSide * j] = weight;
          dweight[i][j] = visible ? weight * (dweight[i][j] - delta) : 0.0f;
        }
      }
      __syncwarp();
      multiply_nn<C::kPerThread, C::kColumns, C::kRows>(dv, scores, C::kScoreStride, dout, C::kStride, y, x);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < C::kPerThread; ++i) {
#pragma unroll
        for (int j = 0; j < C::kPerThread; ++j)
          scores[(y + kSide * i) * C::kScoreStride + x + kSide * j] = dweight[i][j];
      }
      __syncwarp();
      multiply_nn<C::kPerThread, C::kColumns, C::kRows>(dk, scores, C::kScoreStride, q, C::kStride, y, x);
    }
  }
  float scales[C::kPerThread], ones[C::kPerThread];
#pragma unroll
  for (int i = 0; i < C::kPerThread; ++i) scales[i] = scale, ones[i] = 1.0f;
  store_rows(a.dk, tile, dk, scales, head_dim, y, x);
  store_rows(a.dv, tile, dv, ones, head_dim, y, x);
}

}  // namespace fp32

}  // namespace

}  // namespace rowan::cuda
