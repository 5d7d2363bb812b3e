// The parts of Newton-Schulz that are not products: norms, scaling, triangles, and the whole of the skinny path.
#include <algorithm>
#include <type_traits>

#include "core/cuda_check.h"
#include "ops/block_sum.cuh"
#include "ops/device_types.cuh"
#include "ops/newton_schulz_backend.h"

namespace rowan::cuda {

namespace {

constexpr int kThreads = 256;

/// Calls f with a value of the element type.
template <class F>
void with_type(DType dtype, F&& f) {
  if (dtype == DType::kFloat32) {
    f(0.0f);
  } else if (dtype == DType::kFloat16) {
    f(__half{});
  } else {
    f(__nv_bfloat16{});
  }
}

template <class T>
__device__ T* row_of(const NewtonSchulzMatrix& m, std::int64_t batch, std::int64_t row) {
  return static_cast<T*>(m.data) + batch * m.batch_stride + row * m.row_stride;
}

// ---- norms
// -----------------------------------------------------------------------------------------------------------

constexpr std::int64_t kNormElements = 16384;  // a block

std::int64_t norm_chunks(const NewtonSchulzMatrix& u) { return (u.rows * u.cols + kNormElements - 1) / kNormElements; }

/// kPack adjacent elements of a row at a time.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads)
    square_sums(const NewtonSchulzMatrix u, std::int64_t chunks, double* partials) {
  const std::int64_t batch = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const std::int64_t end = min((chunk + 1) * kNormElements, u.rows * u.cols);
  double sum = 0;
#pragma unroll 4
  for (std::int64_t i = chunk * kNormElements + threadIdx.x * kPack; i < end; i += kThreads * kPack) {
    const std::int64_t row = i / u.cols;
    const auto pack = *reinterpret_cast<const Pack<T, kPack>*>(row_of<const T>(u, batch, row) + (i - row * u.cols));
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      const double x = to_float(pack.value[e]);
      sum += x * x;
    }
  }
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) invert_norms(const InverseNormArguments n) {
  const double* const sums = n.square_sums + blockIdx.x * n.square_sum_stride;
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < n.square_sum_count; i += kThreads) sum += sums[i];
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) n.inverse[blockIdx.x] = detail::inverse_norm(sum, n.factor, n.epsilon, n.round_to_bfloat16);
}

// ---- element kernels: each block takes a piece of one row
// ---------------------------------------------------------------

constexpr int kPiece = 4 * kThreads;

template <class T>
__global__ void __launch_bounds__(kThreads) identity_kernel(const NewtonSchulzMatrix q, float factor) {
  const std::int64_t line = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (line >= q.batches * q.rows) return;
  const std::int64_t row = line % q.rows;
  T& diagonal = row_of<T>(q, line / q.rows, row)[row];
  diagonal = from_float<T>(to_float(diagonal) + factor);
}

// ---- copies that scale and convert
// -------------------------------------------------------------------------------------

/// to = from scale inverse[b] in the part that both have; zeros in the rest of `to`.
struct ScaledCopy {
  NewtonSchulzMatrix from, to;
  const double* inverse;  // null: 1
  double scale;
  bool from_quads = false, to_quads = false;
};

/// A factor that float32 cannot hold where a norm is tiny or huge: its rest, between 1/2 and 1, and a power of two in
/// two pieces, which scale exactly.
struct SplitScale {
  float rest, power, more;

  __device__ SplitScale(const ScaledCopy& c, std::int64_t batch) {
    int exponent = 0;
    const double factor = c.inverse ? c.inverse[batch] * c.scale : c.scale;
    rest = static_cast<float>(frexp(factor, &exponent));
    power = ldexpf(1.0f, exponent / 2);
    more = ldexpf(1.0f, exponent - exponent / 2);
  }
  __device__ float operator()(float x) const { return x * rest * power * more; }
};

constexpr int kQuad = 4;

template <class T>
bool moves_in_quads(const NewtonSchulzMatrix& m) {
  constexpr std::uintptr_t kAlign = kQuad * sizeof(T);
  return reinterpret_cast<std::uintptr_t>(m.data) % kAlign == 0 && m.row_stride % kQuad == 0 &&
         (m.batches == 1 || m.batch_stride % kQuad == 0);
}

/// Elements [col, col + 4) of a row, zeros where there are none. Zeros are not scaled: 0 times an infinite factor.
template <class To, class From>
__device__ Pack<To, kQuad> read_scaled(const ScaledCopy& c, const SplitScale& scale, std::int64_t batch,
                                       std::int64_t row, std::int64_t col) {
  Pack<To, kQuad> out{};
  if (row >= c.from.rows) return out;
  const From* const from = row_of<const From>(c.from, batch, row) + col;
  if (c.from_quads && col + kQuad <= c.from.cols) {
    const auto in = *reinterpret_cast<const Pack<From, kQuad>*>(from);
#pragma unroll
    for (int e = 0; e < kQuad; ++e) out.value[e] = from_float<To>(scale(to_float(in.value[e])));
    return out;
  }
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    if (col + e < c.from.cols) out.value[e] = from_float<To>(scale(to_float(from[e])));
  }
  return out;
}

template <class To>
__device__ void write_quad(const ScaledCopy& c, std::int64_t batch, std::int64_t row, std::int64_t col,
                           const Pack<To, kQuad>& quad) {
  if (row >= c.to.rows) return;
  To* const to = row_of<To>(c.to, batch, row) + col;
  if (c.to_quads && col + kQuad <= c.to.cols) {
    *reinterpret_cast<Pack<To, kQuad>*>(to) = quad;
    return;
  }
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    if (col + e < c.to.cols) to[e] = quad.value[e];
  }
}

constexpr int kCopyRows = 8;  // of a block, one after the other

template <class From, class To>
__global__ void __launch_bounds__(kThreads) copy_kernel(const ScaledCopy c, unsigned row_pieces, unsigned row_groups) {
  const unsigned group = blockIdx.x / row_pieces, batch = group / row_groups;
  const std::int64_t row = std::int64_t{group % row_groups} * kCopyRows;
  const std::int64_t col = std::int64_t{blockIdx.x % row_pieces} * kPiece + threadIdx.x * kQuad;
  if (col >= c.to.cols) return;
  const SplitScale scale(c, batch);
  Pack<To, kQuad> quads[kCopyRows];
#pragma unroll
  for (int i = 0; i < kCopyRows; ++i) quads[i] = read_scaled<To, From>(c, scale, batch, row + i, col);
#pragma unroll
  for (int i = 0; i < kCopyRows; ++i) write_quad(c, batch, row + i, col, quads[i]);
}

constexpr int kSquare = 64;  // side of the tiles that are transposed

/// The same with the transpose of `from`.
template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const ScaledCopy c, unsigned row_tiles, unsigned col_tiles) {
  constexpr int kAcross = kSquare / kQuad, kDown = kThreads / kAcross;
  __shared__ To tile[kSquare][kSquare + 4 / sizeof(To)];
  const unsigned square = blockIdx.x / col_tiles, batch = square / row_tiles;
  const std::int64_t row = std::int64_t{square % row_tiles} * kSquare,
                     col = std::int64_t{blockIdx.x % col_tiles} * kSquare;
  const int x = static_cast<int>(threadIdx.x) % kAcross * kQuad, y = static_cast<int>(threadIdx.x) / kAcross;
  const SplitScale scale(c, batch);
  Pack<To, kQuad> quads[kSquare / kDown];
#pragma unroll
  for (int i = 0; i < kSquare / kDown; ++i)
    quads[i] = read_scaled<To, From>(c, scale, batch, col + y + i * kDown, row + x);
#pragma unroll
  for (int i = 0; i < kSquare / kDown; ++i) {
#pragma unroll
    for (int e = 0; e < kQuad; ++e) tile[y + i * kDown][x + e] = quads[i].value[e];
  }
  __syncthreads();
#pragma unroll
  for (int i = y; i < kSquare; i += kDown) {
    Pack<To, kQuad> quad;
#pragma unroll
    for (int e = 0; e < kQuad; ++e) quad.value[e] = tile[x + e][i];
    if (col + x < c.to.cols) write_quad(c, batch, row + i, col + x, quad);
  }
}

template <class From, class To>
void launch_copy(ScaledCopy c, bool transposed, StreamRef stream) {
  const auto up = [](std::int64_t n, std::int64_t step) { return static_cast<unsigned>((n + step - 1) / step); };
  const auto batches = static_cast<unsigned>(c.to.batches);
  c.from_quads = moves_in_quads<From>(c.from);
  c.to_quads = moves_in_quads<To>(c.to);
  if (transposed) {
    const unsigned rows = up(c.to.rows, kSquare), cols = up(c.to.cols, kSquare);
    transpose_kernel<From, To><<<batches * rows * cols, kThreads, 0, to_cuda(stream)>>>(c, rows, cols);
  } else {
    const unsigned groups = up(c.to.rows, kCopyRows), row_pieces = up(c.to.cols, kPiece);
    copy_kernel<From, To><<<batches * groups * row_pieces, kThreads, 0, to_cuda(stream)>>>(c, row_pieces, groups);
  }
  check_launch("newton_schulz");
}

// ---- skinny: short sides up to 64, padded with zeros to kSide = 16, 32 or 64
// ---------------------------------------------------------------------------

constexpr int kGrid = 16;  // 16 x 16 threads hold kSide/16 x kSide/16 entries each
constexpr int kWarps = kThreads / 32;
constexpr int kStrip = 64;                // positions on the long side that a block holds at a time
constexpr std::int64_t kGramLong = 2048;  // positions that a block sums before the sums of blocks are added
constexpr std::int64_t kApplyLong = 512;  // positions of a block
static_assert(kGrid * kGrid == kThreads && kGramLong % kStrip == 0);

int padded_side(std::int64_t p) { return p <= 16 ? 16 : p <= 32 ? 32 : 64; }
__host__ __device__ std::int64_t gram_chunks(const NewtonSchulzMatrix& u) {
  return (u.long_side() + kGramLong - 1) / kGramLong;
}
__host__ __device__ std::int64_t apply_chunks(const NewtonSchulzMatrix& u) {
  return (u.long_side() + kApplyLong - 1) / kApplyLong;
}

/// This block's stack, copied to shared memory: one of the table, or `single` where there is none.
__device__ void take_stack(const SkinnyStack& single, const SkinnyStack* stacks, const std::int32_t* stack_of_block,
                           SkinnyStack& mine) {
  const SkinnyStack* const from = stacks ? stacks + stack_of_block[blockIdx.x] : &single;
  constexpr unsigned kWords = sizeof(SkinnyStack) / sizeof(std::int64_t);
  for (unsigned i = threadIdx.x; i < kWords; i += kThreads)
    reinterpret_cast<std::int64_t*>(&mine)[i] = reinterpret_cast<const std::int64_t*>(from)[i];
  __syncthreads();
}

__global__ void __launch_bounds__(kThreads) skinny_norms(const SkinnyTable table, double factor, double epsilon) {
  __shared__ SkinnyStack s;
  take_stack({}, table.stacks, table.stack_of_matrix, s);
  const double* const sums = s.square_sums + (blockIdx.x - s.first_matrix) * s.square_sum_stride;
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < s.square_sum_count; i += kThreads) sum += sums[i];
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) table.inverse[blockIdx.x] = detail::inverse_norm(sum, factor, epsilon, false);
}

/// A factor as a power of two, which scales exactly, and the rest, between 1/2 and 1.
struct SplitFactor {
  double rest = 0;
  int exponent = 0;

  __device__ explicit SplitFactor(double factor) { rest = frexp(factor, &exponent); }
};

/// What the sums of gram_kernel still lack: bfloat16 operands are scaled by the power of two alone.
template <class T>
__device__ double rest_of_square(double inverse) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const double rest = SplitFactor(inverse).rest;
    return rest * rest;
  }
  return 1;
}

/// Calls f(short index, position in the strip, offset) for the elements of positions [begin, begin + kStrip) of the
/// long side, adjacent elements of memory on adjacent threads.
template <class F>
__device__ void for_each_in_strip(const NewtonSchulzMatrix& m, bool wide, std::int64_t begin, F&& f) {
  const int p = static_cast<int>(wide ? m.rows : m.cols);
  const int count = static_cast<int>(min(static_cast<std::int64_t>(kStrip), (wide ? m.cols : m.rows) - begin));
  if (wide) {
    for (int e = static_cast<int>(threadIdx.x); e < p * kStrip; e += kThreads) {
      const int i = e / kStrip, l = e % kStrip;
      if (l < count) f(i, l, i * m.row_stride + begin + l);
    }
  } else {
    for (int e = static_cast<int>(threadIdx.x); e < p * count; e += kThreads) {
      const int l = e / p, i = e - l * p;
      f(i, l, (begin + l) * m.row_stride + i);
    }
  }
}

/// The sum over positions [begin, end) in float32 arithmetic, for float32 operands.
template <int kSide>
__device__ void gram_of(const NewtonSchulzMatrix& u, std::int64_t batch, double inverse, std::int64_t begin,
                        std::int64_t end, float* out, float) {
  constexpr int kPer = kSide / kGrid;
  __shared__ float strip[kSide][kStrip + 1];
  const bool wide = u.is_wide();
  const float* const matrix = row_of<const float>(u, batch, 0);
  const int ti = static_cast<int>(threadIdx.x) / kGrid, tj = static_cast<int>(threadIdx.x) % kGrid;
  float sum[kPer][kPer] = {};
  for (; begin < end; begin += kStrip) {
    for (int e = static_cast<int>(threadIdx.x); e < kSide * kStrip; e += kThreads) strip[e / kStrip][e % kStrip] = 0;
    __syncthreads();
    for_each_in_strip(u, wide, begin, [&](int i, int l, std::int64_t offset) {
      strip[i][l] = static_cast<float>(matrix[offset] * inverse);
    });
    __syncthreads();
    for (int l = 0; l < kStrip; ++l) {
      for (int i = 0; i < kPer; ++i) {
        for (int j = 0; j < kPer; ++j) sum[i][j] += strip[ti + i * kGrid][l] * strip[tj + j * kGrid][l];
      }
    }
    __syncthreads();
  }
  for (int i = 0; i < kPer; ++i) {
    for (int j = 0; j < kPer; ++j) out[(ti + i * kGrid) * kSide + tj + j * kGrid] = sum[i][j];
  }
}

/// Sixteen rows of the short side at 16 or 32 positions, as the first operand of mma.m16n8k16 takes them; a row's words
/// are the second operand as well.
struct Fragment {
  std::uint32_t upper[2], lower[2];  // rows g and g + 8 of the lane
};

__device__ void multiply_add(float (&c)[4], const Fragment& a, const std::uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.upper[0]), "r"(a.lower[0]), "r"(a.upper[1]), "r"(a.lower[1]), "r"(b[0]), "r"(b[1]));
}

/// Four 8 x 8 matrices; lanes 8 i to 8 i + 7 name the rows of matrix i.
__device__ void load_matrices(std::uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ void load_matrices_transposed(std::uint32_t (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

/// Eight adjacent elements of which the first `count` exist.
__device__ uint4 load_eight(const __nv_bfloat16* from, std::int64_t count, bool vectors) {
  if (count <= 0) return {};
  if (vectors && count >= 8) return *reinterpret_cast<const uint4*>(from);
  std::uint16_t x[8] = {};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < count) x[e] = reinterpret_cast<const std::uint16_t*>(from)[e];
  }
  return {x[0] | std::uint32_t{x[1]} << 16, x[2] | std::uint32_t{x[3]} << 16, x[4] | std::uint32_t{x[5]} << 16,
          x[6] | std::uint32_t{x[7]} << 16};
}

__device__ void store_eight(__nv_bfloat16* to, std::int64_t count, bool vectors, const uint4& v) {
  if (count <= 0) return;
  if (vectors && count >= 8) {
    *reinterpret_cast<uint4*>(to) = v;
    return;
  }
  const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (e < count) reinterpret_cast<std::uint16_t*>(to)[e] = static_cast<std::uint16_t>(words[e / 2] >> e % 2 * 16);
  }
}

/// Times 2^exponent, in two steps since it may lie outside the type's range.
struct PowerScale {
  __nv_bfloat162 first, second;

  __device__ explicit PowerScale(int exponent)
      : first(__float2bfloat162_rn(exp2f(static_cast<float>(exponent / 2)))),
        second(__float2bfloat162_rn(exp2f(static_cast<float>(exponent - exponent / 2)))) {}
  __device__ std::uint32_t operator()(std::uint32_t two) const {
    const __nv_bfloat162 x = __hmul2(__hmul2(*reinterpret_cast<const __nv_bfloat162*>(&two), first), second);
    return *reinterpret_cast<const std::uint32_t*>(&x);
  }
  __device__ uint4 operator()(const uint4& v) const { return {(*this)(v.x), (*this)(v.y), (*this)(v.z), (*this)(v.w)}; }
};

/// The lower triangle of the sum over positions, on tensor cores: exact products, summed in float32.
template <int kSide>
struct GramSums {
  static constexpr int kBlocks = kSide / 16;
  float c[kBlocks][2 * kBlocks][4] = {};  // 16 x 8 each

  __device__ void add(const Fragment (&f)[kBlocks]) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        multiply_add(c[i][2 * j], f[i], f[j].upper);
        multiply_add(c[i][2 * j + 1], f[i], f[j].lower);
      }
    }
  }
  /// Calls f(a sum, its row and its column) for those of this lane on and below the diagonal's blocks, in one order.
  template <class F>
  __device__ void for_each(F&& f) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < 2 * (i + 1); ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) f(c[i][j][e], 16 * i + lane / 4 + e / 2 * 8, 8 * j + lane % 4 * 2 + e % 2);
      }
    }
  }
  static constexpr int kSums = 4 * kBlocks * (kBlocks + 1);
  /// Warp 0 gets the sums of all warps, added in a fixed tree. `parts`: [kWarps / 2, kSums, 32].
  __device__ void add_warps(float* parts) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int half = kWarps / 2; half > 0; half /= 2) {
      __syncthreads();
      float* at = parts + (warp % half) * kSums * 32 + lane;
      if (warp >= half && warp < 2 * half) for_each([&](float sum, int, int) { *at = sum, at += 32; });
      __syncthreads();
      if (warp < half) for_each([&](float& sum, int, int) { sum += *at, at += 32; });
    }
  }
  __device__ void write(float* out) {  // both triangles
    for_each([&](float sum, int row, int col) {
      if (col > row) return;
      out[row * kSide + col] = sum;
      out[col * kSide + row] = sum;
    });
  }
};

template <int kSide>
__device__ void gram_of(const NewtonSchulzMatrix& u, std::int64_t batch, double inverse, std::int64_t begin,
                        std::int64_t end, float* out, __nv_bfloat16) {
  constexpr int kBlocks = kSide / 16, kPadded = kSide + 8;
  constexpr int kStep = 16 * 64 / kSide;  // positions of a tall matrix that a warp takes at once: four loads a lane
  constexpr int kTileBytes = kWarps * kStep * kPadded * 2, kPartBytes = kWarps / 2 * GramSums<kSide>::kSums * 32 * 4;
  __shared__ __align__(16) unsigned char memory[kTileBytes > kPartBytes ? kTileBytes : kPartBytes];
  auto* const rows = reinterpret_cast<__nv_bfloat16(*)[kStep][kPadded]>(memory);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const __nv_bfloat16* const matrix = row_of<const __nv_bfloat16>(u, batch, 0);
  const bool vectors = reinterpret_cast<std::uintptr_t>(matrix) % 16 == 0 && u.row_stride % 8 == 0;
  const PowerScale scale(SplitFactor(inverse).exponent);
  GramSums<kSide> sums;
  Fragment f[kBlocks];
  if (u.is_wide()) {
    // A lane reads eight positions of its rows. Which of a step's positions a word belongs to does not matter, as long
    // as it is the same for all rows.
    for (std::int64_t at = begin + warp * 32; at < end; at += kWarps * 32) {
      uint4 upper[kBlocks], lower[kBlocks];
      const std::int64_t mine = at + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int row = 16 * i + lane / 4;
        upper[i] = scale(load_eight(matrix + row * u.row_stride + mine, row < u.rows ? end - mine : 0, vectors));
        lower[i] =
            scale(load_eight(matrix + (row + 8) * u.row_stride + mine, row + 8 < u.rows ? end - mine : 0, vectors));
        f[i] = {{upper[i].x, upper[i].y}, {lower[i].x, lower[i].y}};
      }
      sums.add(f);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) f[i] = {{upper[i].z, upper[i].w}, {lower[i].z, lower[i].w}};
      sums.add(f);
    }
  } else {
    for (std::int64_t at = begin + warp * kStep; at < end; at += kWarps * kStep) {
      constexpr int kLoads = kStep * kSide / 8 / 32;
      uint4 eight[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int piece = lane + 32 * i, row = piece / (kSide / 8), col = piece % (kSide / 8) * 8;
        eight[i] = load_eight(matrix + (at + row) * u.row_stride + col, at + row < end ? u.cols - col : 0, vectors);
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int piece = lane + 32 * i;
        *reinterpret_cast<uint4*>(&rows[warp][piece / (kSide / 8)][piece % (kSide / 8) * 8]) = scale(eight[i]);
      }
      __syncwarp();
#pragma unroll
      for (int first = 0; first < kStep; first += 16) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          std::uint32_t m[4];
          load_matrices_transposed(m, &rows[warp][first + lane / 16 * 8 + lane % 8][16 * i + lane / 8 % 2 * 8]);
          f[i] = {{m[0], m[2]}, {m[1], m[3]}};
        }
        sums.add(f);
      }
    }
  }
  sums.add_warps(reinterpret_cast<float*>(memory));
  if (warp == 0) sums.write(out);
}

/// partials[block] = the kSide x kSide Gram matrix of kGramLong positions.
template <class T, int kSide>
__global__ void __launch_bounds__(kThreads)
    skinny_gram(const __grid_constant__ SkinnyStack single, const SkinnyTable table) {
  __shared__ SkinnyStack s;
  take_stack(single, table.stacks, table.stack_of_gram_block, s);
  const std::int64_t block = blockIdx.x - s.first_gram_block, chunks = gram_chunks(s.u);
  const std::int64_t batch = block / chunks, begin = (block - batch * chunks) * kGramLong;
  gram_of<kSide>(s.u, batch, table.inverse[s.first_matrix + batch], begin, min(begin + kGramLong, s.u.long_side()),
                 table.partials + static_cast<std::int64_t>(blockIdx.x) * (kSide * kSide), T{});
}

/// out = alpha a b + beta c + gamma I. All threads have read a, b and c before any writes, so out may be one of them.
template <int kSide>
__device__ void square_product(float alpha, const float* a, const float* b, float beta, const float* c, float gamma,
                               float* out) {
  constexpr int kPer = kSide / kGrid;
  const int ti = static_cast<int>(threadIdx.x) / kGrid, tj = static_cast<int>(threadIdx.x) % kGrid;
  float sum[kPer][kPer] = {};
  for (int k = 0; k < kSide; ++k) {
    for (int i = 0; i < kPer; ++i) {
      for (int j = 0; j < kPer; ++j) sum[i][j] += a[(ti + i * kGrid) * kSide + k] * b[k * kSide + tj + j * kGrid];
    }
  }
  for (int i = 0; i < kPer; ++i) {
    for (int j = 0; j < kPer; ++j) {
      const int row = ti + i * kGrid, col = tj + j * kGrid;
      sum[i][j] = alpha * sum[i][j] + (c ? beta * c[row * kSide + col] : 0.0f) + (row == col ? gamma : 0.0f);
    }
  }
  __syncthreads();
  for (int i = 0; i < kPer; ++i) {
    for (int j = 0; j < kPer; ++j) out[(ti + i * kGrid) * kSide + tj + j * kGrid] = sum[i][j];
  }
  __syncthreads();
}

/// polynomials[matrix] = Q of the Gram matrix that is the sum of the partials.
template <class T, int kSide>
__global__ void __launch_bounds__(kThreads) skinny_polynomial(const __grid_constant__ SkinnyStack single,
                                                              const SkinnyTable table, const NewtonSchulzSteps steps) {
  constexpr int kSize = kSide * kSide;
  __shared__ float r[kSize], h[kSize], q[kSize];  // all that a block may have
  const SkinnyStack& s = table.stacks ? table.stacks[table.stack_of_matrix[blockIdx.x]] : single;
  const std::int64_t chunks = gram_chunks(s.u), batch = blockIdx.x - s.first_matrix;
  const float* const mine = table.partials + (s.first_gram_block + batch * chunks) * kSize;
  const double rest = rest_of_square<T>(table.inverse[blockIdx.x]);
  for (int e = static_cast<int>(threadIdx.x); e < kSize; e += kThreads) {
    double sum = 0;
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) sum += mine[chunk * kSize + e];
    r[e] = static_cast<float>(sum * rest);
    q[e] = e / kSide == e % kSide ? 1.0f : 0.0f;
  }
  __syncthreads();
  for (int step = 0; step < steps.count; ++step) {
    const auto a = static_cast<float>(steps.step[step].a), b = static_cast<float>(steps.step[step].b),
               c = static_cast<float>(steps.step[step].c);
    square_product<kSide>(c, r, r, b, r, a, h);        // H = a I + b R + c R^2
    square_product<kSide>(1, q, h, 0, nullptr, 0, q);  // Q <- Q H
    if (step + 1 == steps.count) break;
    square_product<kSide>(1, r, h, 0, nullptr, 0, r);
    square_product<kSide>(1, r, h, 0, nullptr, 0, r);  // R <- R H^2
  }
  for (int e = static_cast<int>(threadIdx.x); e < kSize; e += kThreads)
    table.polynomials[blockIdx.x * static_cast<std::int64_t>(kSize) + e] = q[e];
}

template <class T, class Out, int kSide>
__device__ void apply_to_position(const SkinnyStack& s, const float* q, std::int64_t batch, std::int64_t position,
                                  double inverse) {
  const bool wide = s.u.is_wide();
  const int p = static_cast<int>(s.u.short_side());
  const T* const from = row_of<const T>(s.u, batch, wide ? 0 : position) + (wide ? position : 0);
  Out* const to = row_of<Out>(s.out, batch, wide ? 0 : position) + (wide ? position : 0);
  const std::int64_t from_step = wide ? s.u.row_stride : 1, to_step = wide ? s.out.row_stride : 1;
  constexpr int kEight = 8;
  const auto in_eights = [&](const auto* data) {
    return !wide && p % kEight == 0 && reinterpret_cast<std::uintptr_t>(data) % (kEight * sizeof(*data)) == 0;
  };
  const bool read_eights = in_eights(from), write_eights = in_eights(to);
  float x[kSide];
#pragma unroll
  for (int i = 0; i < kSide; i += kEight) {
    Pack<T, kEight> eight{};
    if (read_eights) {
      if (i < p) eight = *reinterpret_cast<const Pack<T, kEight>*>(from + i);
    } else {
#pragma unroll
      for (int e = 0; e < kEight; ++e) {
        if (i + e < p) eight.value[e] = from[(i + e) * from_step];
      }
    }
#pragma unroll
    for (int e = 0; e < kEight; ++e)
      x[i + e] = i + e < p ? static_cast<float>(to_float(eight.value[e]) * inverse) : 0.0f;
  }
#pragma unroll 1
  for (int i = 0; i < p; i += kEight) {
    Pack<Out, kEight> eight;
#pragma unroll
    for (int e = 0; e < kEight; ++e) {
      float sum = 0;
#pragma unroll
      for (int k = 0; k < kSide; k += 4) {
        const float4 four = *reinterpret_cast<const float4*>(q + (i + e) * kSide + k);
        sum += four.x * x[k] + four.y * x[k + 1] + four.z * x[k + 2] + four.w * x[k + 3];
      }
      eight.value[e] = from_float<Out>(sum);
    }
    if (write_eights) {
      *reinterpret_cast<Pack<Out, kEight>*>(to + i) = eight;
    } else {
#pragma unroll
      for (int e = 0; e < kEight; ++e) {
        if (i + e < p) to[(i + e) * to_step] = eight.value[e];
      }
    }
  }
}

/// out = Q (u inverse), a thread for each position of the long side, which it reads before it writes.
template <class T, class Out, int kSide>
__global__ void __launch_bounds__(kThreads)
    skinny_apply_plain(const __grid_constant__ SkinnyStack single, const SkinnyTable table) {
  __shared__ SkinnyStack s;
  __shared__ __align__(16) float q[kSide * kSide];
  take_stack(single, table.stacks, table.stack_of_apply_block, s);
  const std::int64_t block = blockIdx.x - s.first_apply_block, chunks = apply_chunks(s.u);
  const std::int64_t batch = block / chunks, begin = (block - batch * chunks) * kApplyLong;
  const float* const polynomial = table.polynomials + (s.first_matrix + batch) * (kSide * kSide);
  for (int e = static_cast<int>(threadIdx.x); e < kSide * kSide; e += kThreads) q[e] = polynomial[e];
  __syncthreads();
  const std::int64_t end = min(begin + kApplyLong, s.u.long_side());
  for (std::int64_t position = begin + threadIdx.x; position < end; position += kThreads)
    apply_to_position<T, Out, kSide>(s, q, batch, position, table.inverse[s.first_matrix + batch]);
}

/// The same for bfloat16 on tensor cores: a warp takes 16 positions at a time. u enters the products as it is; Q, times
/// the part of the factor that is not a power of two, as the sum of two bfloat16.
template <int kSide>
__global__ void __launch_bounds__(kThreads)
    skinny_apply_mma(const __grid_constant__ SkinnyStack single, const SkinnyTable table) {
  constexpr int kBlocks = kSide / 16, kPadded = kSide + 8, kTile = 16, kTilePadded = kTile + 8;
  constexpr int kTileElements = kTile * kPadded > kSide * kTilePadded ? kTile * kPadded : kSide * kTilePadded;
  constexpr int kPiecesOfLane = kTile * kSide / 8 / 32;  // of 16 bytes
  __shared__ SkinnyStack s;
  __shared__ __align__(16) __nv_bfloat16 q[2][kSide][kPadded];  // high and low parts
  __shared__ __align__(16) __nv_bfloat16 tiles[kWarps][kTileElements];
  take_stack(single, table.stacks, table.stack_of_apply_block, s);
  const std::int64_t block = blockIdx.x - s.first_apply_block, chunks = apply_chunks(s.u);
  const std::int64_t batch = block / chunks, begin = (block - batch * chunks) * kApplyLong;
  const std::int64_t end = min(begin + kApplyLong, s.u.long_side());
  const SplitFactor factor(table.inverse[s.first_matrix + batch]);
  const auto rest = static_cast<float>(factor.rest);
  const float power = ldexpf(1.0f, factor.exponent / 2), more = ldexpf(1.0f, factor.exponent - factor.exponent / 2);
  const float* const polynomial = table.polynomials + (s.first_matrix + batch) * (kSide * kSide);
  for (int e = static_cast<int>(threadIdx.x); e < kSide * kSide; e += kThreads) {
    const float value = polynomial[e] * rest;
    const __nv_bfloat16 high = __float2bfloat16_rn(value);
    q[0][e / kSide][e % kSide] = high;
    q[1][e / kSide][e % kSide] = __float2bfloat16_rn(value - __bfloat162float(high));
  }
  __syncthreads();

  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const bool wide = s.u.is_wide();
  const auto* const from = row_of<const __nv_bfloat16>(s.u, batch, 0);
  auto* const to = row_of<__nv_bfloat16>(s.out, batch, 0);
  const bool from_vectors = reinterpret_cast<std::uintptr_t>(from) % 16 == 0 && s.u.row_stride % 8 == 0,
             to_vectors = reinterpret_cast<std::uintptr_t>(to) % 16 == 0 && s.out.row_stride % 8 == 0;
  __nv_bfloat16* const tile = tiles[warp];
  const int short_side = static_cast<int>(s.u.short_side());
  // f(piece, its row and first column in memory, how many elements exist, its place in the tile) for this lane's pieces
  // of the tile at `at`.
  const auto for_each_piece = [&](std::int64_t at, auto f) {
#pragma unroll
    for (int i = 0; i < kPiecesOfLane; ++i) {
      const int piece = lane + 32 * i;
      if (wide) {
        const int row = piece / (kTile / 8), col = piece % (kTile / 8) * 8;
        f(i, row, at + col, row < short_side ? end - at - col : 0, tile + row * kTilePadded + col);
      } else {
        const int row = piece / (kSide / 8), col = piece % (kSide / 8) * 8;
        f(i, at + row, col, at + row < end ? short_side - col : 0, tile + row * kPadded + col);
      }
    }
  };
  uint4 ahead[kPiecesOfLane];
  const auto read = [&](std::int64_t tile_at) {
    for_each_piece(tile_at, [&](int i, std::int64_t row, std::int64_t col, std::int64_t count, const __nv_bfloat16*) {
      ahead[i] = load_eight(from + row * s.u.row_stride + col, count, from_vectors);
    });
  };
  read(begin + warp * kTile);
  for (std::int64_t at = begin + warp * kTile; at < end; at += kWarps * kTile) {
    __syncwarp();  // the last tile has been stored
    for_each_piece(at, [&](int i, std::int64_t, std::int64_t, std::int64_t, __nv_bfloat16* place) {
      *reinterpret_cast<uint4*>(place) = ahead[i];
    });
    __syncwarp();
    read(at + kWarps * kTile);
    // wide: [16 of the short side] x [8 positions] each; tall: [16 positions] x [8 of the short side].
    float sums[kBlocks][2][4] = {};
#pragma unroll
    for (int k = 0; k < kSide; k += 16) {
      std::uint32_t x[4];
      if (wide) {
        load_matrices_transposed(x, tile + (k + lane / 8 % 2 * 8 + lane % 8) * kTilePadded + lane / 16 * 8);
      } else {
        load_matrices(x, tile + lane % 16 * kPadded + k + lane / 16 * 8);
      }
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          std::uint32_t m[4];
          if (wide) {
            load_matrices(m, &q[part][16 * i + lane % 16][k + lane / 16 * 8]);
            multiply_add(sums[i][0], Fragment{{m[0], m[2]}, {m[1], m[3]}}, {x[0], x[1]});
            multiply_add(sums[i][1], Fragment{{m[0], m[2]}, {m[1], m[3]}}, {x[2], x[3]});
          } else {
            load_matrices(m, &q[part][16 * i + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]);
            multiply_add(sums[i][0], Fragment{{x[0], x[2]}, {x[1], x[3]}}, {m[0], m[1]});
            multiply_add(sums[i][1], Fragment{{x[0], x[2]}, {x[1], x[3]}}, {m[2], m[3]});
          }
        }
      }
    }
    __syncwarp();  // the tile has been read
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          __nv_bfloat16* const place = wide ? tile + (16 * i + lane / 4 + 8 * h) * kTilePadded + 8 * j + lane % 4 * 2
                                            : tile + (lane / 4 + 8 * h) * kPadded + 16 * i + 8 * j + lane % 4 * 2;
          *reinterpret_cast<__nv_bfloat162*>(place) =
              __floats2bfloat162_rn(sums[i][j][2 * h] * power * more, sums[i][j][2 * h + 1] * power * more);
        }
      }
    }
    __syncwarp();
    for_each_piece(at, [&](int, std::int64_t row, std::int64_t col, std::int64_t count, const __nv_bfloat16* place) {
      store_eight(to + row * s.out.row_stride + col, count, to_vectors, *reinterpret_cast<const uint4*>(place));
    });
  }
}

template <class F>
void with_side(int side, F&& f) {
  if (side == 16) {
    f(std::integral_constant<int, 16>{});
  } else if (side == 32) {
    f(std::integral_constant<int, 32>{});
  } else {
    f(std::integral_constant<int, 64>{});
  }
}

/// u and out are bfloat16 or float32.
template <class F>
void with_io_type(DType dtype, F&& f) {
  if (dtype == DType::kFloat32) {
    f(0.0f);
  } else {
    f(__nv_bfloat16{});
  }
}

}  // namespace

std::int64_t inverse_norms_workspace(const InverseNormArguments& n) {
  return n.square_sums ? 0 : n.u.batches * norm_chunks(n.u);
}

void inverse_norms(const InverseNormArguments& arguments, double* workspace, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  InverseNormArguments n = arguments;
  if (!n.square_sums) {
    const std::int64_t chunks = norm_chunks(n.u);
    with_io_type(n.u.dtype, [&](auto type) {
      using T = decltype(type);
      constexpr int kPack = 16 / static_cast<int>(sizeof(T));
      const bool packs = n.u.cols % kPack == 0 && n.u.row_stride % kPack == 0 && n.u.batch_stride % kPack == 0 &&
                         reinterpret_cast<std::uintptr_t>(n.u.data) % 16 == 0;
      const auto kernel = packs ? square_sums<T, kPack> : square_sums<T, 1>;
      kernel<<<static_cast<unsigned>(n.u.batches * chunks), kThreads, 0, to_cuda(stream)>>>(n.u, chunks, workspace);
    });
    check_launch("newton_schulz");
    n.square_sums = workspace;
    n.square_sum_count = n.square_sum_stride = chunks;
  }
  invert_norms<<<static_cast<unsigned>(n.u.batches), kThreads, 0, to_cuda(stream)>>>(n);
  check_launch("newton_schulz");
}

void newton_schulz_load(const NewtonSchulzMatrix& u, const double* inverse, double scale, const NewtonSchulzMatrix& x,
                        StreamRef stream) {
  const DeviceGuard guard(stream.device());
  with_io_type(u.dtype, [&](auto from) {
    with_type(x.dtype, [&](auto to) {
      launch_copy<decltype(from), decltype(to)>({u, x, inverse, scale}, !u.is_wide(), stream);
    });
  });
}

void newton_schulz_add_identity(const NewtonSchulzMatrix& q, double factor, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  const auto blocks = static_cast<unsigned>((q.batches * q.rows + kThreads - 1) / kThreads);
  with_type(q.dtype, [&](auto type) {
    identity_kernel<decltype(type)><<<blocks, kThreads, 0, to_cuda(stream)>>>(q, static_cast<float>(factor));
  });
  check_launch("newton_schulz");
}

void newton_schulz_store(const NewtonSchulzMatrix& x, double scale, const NewtonSchulzMatrix& out, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  with_type(x.dtype, [&](auto from) {
    with_io_type(out.dtype, [&](auto to) {
      launch_copy<decltype(from), decltype(to)>({x, out, nullptr, scale}, !out.is_wide(), stream);
    });
  });
}

int skinny_side(const NewtonSchulzMatrix& u) { return padded_side(u.short_side()); }
std::int64_t skinny_gram_blocks(const NewtonSchulzMatrix& u) { return u.batches * gram_chunks(u); }
std::int64_t skinny_apply_blocks(const NewtonSchulzMatrix& u) { return u.batches * apply_chunks(u); }

namespace {

/// All but the norms. `like` gives the types, and is the stack itself where the table has none.
void run_skinny(const SkinnyStack& like, const SkinnyTable& table, const NewtonSchulzSteps& steps, StreamRef stream) {
  const cudaStream_t queue = to_cuda(stream);
  with_side(skinny_side(like.u), [&](auto side) {
    constexpr int kSide = decltype(side)::value;
    with_io_type(like.u.dtype, [&](auto from) {
      using T = decltype(from);
      skinny_gram<T, kSide><<<static_cast<unsigned>(table.gram_blocks), kThreads, 0, queue>>>(like, table);
      check_launch("newton_schulz");
      skinny_polynomial<T, kSide><<<static_cast<unsigned>(table.matrices), kThreads, 0, queue>>>(like, table, steps);
      check_launch("newton_schulz");
      with_io_type(like.out.dtype, [&](auto to) {
        using Out = decltype(to);
        const auto blocks = static_cast<unsigned>(table.apply_blocks);
        if constexpr (std::is_same_v<T, __nv_bfloat16> && std::is_same_v<Out, __nv_bfloat16>) {
          skinny_apply_mma<kSide><<<blocks, kThreads, 0, queue>>>(like, table);
        } else {
          skinny_apply_plain<T, Out, kSide><<<blocks, kThreads, 0, queue>>>(like, table);
        }
      });
      check_launch("newton_schulz");
    });
  });
}

}  // namespace

void newton_schulz_skinny(const SkinnyTable& table, const NewtonSchulzMatrix& u_like,
                          const NewtonSchulzMatrix& out_like, double norm_factor, double epsilon,
                          const NewtonSchulzSteps& steps, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  skinny_norms<<<static_cast<unsigned>(table.matrices), kThreads, 0, to_cuda(stream)>>>(table, norm_factor, epsilon);
  check_launch("newton_schulz");
  SkinnyStack like;
  like.u = u_like;
  like.out = out_like;
  run_skinny(like, table, steps, stream);
}

std::int64_t newton_schulz_skinny_workspace(const NewtonSchulzMatrix& u) {
  const int side = skinny_side(u);
  return (skinny_gram_blocks(u) + u.batches) * side * side;
}

void newton_schulz_skinny(const GramFloatArguments& a, float* workspace, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  SkinnyStack stack;
  stack.u = a.u;
  stack.out = a.out;
  const std::int64_t size = std::int64_t{1} * skinny_side(a.u) * skinny_side(a.u);
  SkinnyTable table;
  table.matrices = a.u.batches;
  table.gram_blocks = skinny_gram_blocks(a.u);
  table.apply_blocks = skinny_apply_blocks(a.u);
  table.inverse = const_cast<double*>(a.inverse);  // read only
  table.partials = workspace;
  table.polynomials = workspace + table.gram_blocks * size;
  run_skinny(stack, table, a.steps, stream);
}

}  // namespace rowan::cuda
