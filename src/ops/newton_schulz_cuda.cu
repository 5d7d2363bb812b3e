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

template <class T>
__global__ void __launch_bounds__(kThreads)
    square_sums(const NewtonSchulzMatrix u, std::int64_t chunks, double* partials) {
  const std::int64_t batch = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const std::int64_t end = min((chunk + 1) * kNormElements, u.rows * u.cols);
  double sum = 0;
  for (std::int64_t i = chunk * kNormElements + threadIdx.x; i < end; i += kThreads) {
    const std::int64_t row = i / u.cols;
    const double x = to_float(row_of<const T>(u, batch, row)[i - row * u.cols]);
    sum += x * x;
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

std::int64_t pieces(std::int64_t cols) { return (cols + kPiece - 1) / kPiece; }
unsigned row_grid(const NewtonSchulzMatrix& m) { return static_cast<unsigned>(m.batches * m.rows * pieces(m.cols)); }

/// Calls f(batch, row, col) for this thread's elements of m.
template <class F>
__device__ void for_each_element(const NewtonSchulzMatrix& m, std::int64_t row_pieces, F&& f) {
  const std::int64_t line = blockIdx.x / row_pieces;
  const std::int64_t batch = line / m.rows, row = line - batch * m.rows;
  const std::int64_t begin = (blockIdx.x - line * row_pieces) * kPiece + threadIdx.x;
#pragma unroll
  for (int k = 0; k < kPiece / kThreads; ++k) {
    const std::int64_t col = begin + k * kThreads;
    if (col < m.cols) f(batch, row, col);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) identity_kernel(const NewtonSchulzMatrix z, float alpha, float beta,
                                                            const NewtonSchulzMatrix q, std::int64_t row_pieces) {
  for_each_element(q, row_pieces, [&](std::int64_t batch, std::int64_t row, std::int64_t col) {
    const float value = alpha * to_float(row_of<const T>(z, batch, row)[col]);
    row_of<T>(q, batch, row)[col] = from_float<T>(row == col ? value + beta : value);
  });
}

// ---- copies that scale and convert
// -------------------------------------------------------------------------------------

/// to = from scale inverse[b] in the part that both have; zeros in the rest of `to`.
struct ScaledCopy {
  NewtonSchulzMatrix from, to;
  const double* inverse;  // null: 1
  double scale;

  /// In double: the norm of tiny or huge matrices has no inverse in float32.
  __device__ double factor(std::int64_t batch) const { return inverse ? inverse[batch] * scale : scale; }
};

constexpr int kQuad = 4;

template <class T>
bool moves_in_quads(const NewtonSchulzMatrix& m) {
  constexpr std::uintptr_t kAlign = kQuad * sizeof(T);
  return reinterpret_cast<std::uintptr_t>(m.data) % kAlign == 0 && m.row_stride % kQuad == 0 &&
         (m.batches == 1 || m.batch_stride % kQuad == 0);
}

template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const ScaledCopy c, std::int64_t row_pieces, bool from_quads, bool to_quads) {
  const std::int64_t line = blockIdx.x / row_pieces;
  const std::int64_t batch = line / c.to.rows, row = line - batch * c.to.rows;
  const std::int64_t col = (blockIdx.x - line * row_pieces) * kPiece + threadIdx.x * kQuad;
  if (col >= c.to.cols) return;
  Pack<From, kQuad> read{};
  if (row < c.from.rows) {
    const From* const from = row_of<const From>(c.from, batch, row) + col;
    if (from_quads && col + kQuad <= c.from.cols) {
      read = *reinterpret_cast<const Pack<From, kQuad>*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        if (col + i < c.from.cols) read.value[i] = from[i];
      }
    }
  }
  const double factor = c.factor(batch);
  Pack<To, kQuad> write;
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    // Not multiplied where there is nothing: 0 times an infinite factor.
    const bool inside = row < c.from.rows && col + i < c.from.cols;
    write.value[i] = from_float<To>(inside ? static_cast<float>(to_float(read.value[i]) * factor) : 0.0f);
  }
  To* const to = row_of<To>(c.to, batch, row) + col;
  if (to_quads && col + kQuad <= c.to.cols) {
    *reinterpret_cast<Pack<To, kQuad>*>(to) = write;
    return;
  }
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    if (col + i < c.to.cols) to[i] = write.value[i];
  }
}

constexpr int kSquare = 64;  // side of the tiles that are transposed

/// The same with the transpose of `from`.
template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    transpose_kernel(const ScaledCopy c, std::int64_t row_tiles, std::int64_t col_tiles) {
  __shared__ float tile[kSquare][kSquare + 1];
  const std::int64_t batch = blockIdx.x / (row_tiles * col_tiles), rest = blockIdx.x - batch * row_tiles * col_tiles;
  const std::int64_t row = rest / col_tiles * kSquare, col = rest % col_tiles * kSquare;
  const int x = static_cast<int>(threadIdx.x) % kSquare, y = static_cast<int>(threadIdx.x) / kSquare;
  const double factor = c.factor(batch);
#pragma unroll
  for (int i = y; i < kSquare; i += kThreads / kSquare) {
    float value = 0;
    if (col + i < c.from.rows && row + x < c.from.cols)
      value = static_cast<float>(to_float(row_of<const From>(c.from, batch, col + i)[row + x]) * factor);
    tile[i][x] = value;
  }
  __syncthreads();
#pragma unroll
  for (int i = y; i < kSquare; i += kThreads / kSquare) {
    if (row + i < c.to.rows && col + x < c.to.cols)
      row_of<To>(c.to, batch, row + i)[col + x] = from_float<To>(tile[x][i]);
  }
}

template <class From, class To>
void launch_copy(const ScaledCopy& c, bool transposed, StreamRef stream) {
  if (transposed) {
    const std::int64_t row_tiles = (c.to.rows + kSquare - 1) / kSquare, col_tiles = (c.to.cols + kSquare - 1) / kSquare;
    transpose_kernel<From, To>
        <<<static_cast<unsigned>(c.to.batches * row_tiles * col_tiles), kThreads, 0, to_cuda(stream)>>>(c, row_tiles,
                                                                                                        col_tiles);
  } else {
    copy_kernel<From, To><<<row_grid(c.to), kThreads, 0, to_cuda(stream)>>>(
        c, pieces(c.to.cols), moves_in_quads<From>(c.from), moves_in_quads<To>(c.to));
  }
  check_launch("newton_schulz");
}

// ---- skinny: the short side in shared memory
// ---------------------------------------------------------------------------

// The side is padded with zeros to kSide = 16, 32 or 64; 16 x 16 threads hold kSide/16 x kSide/16 entries each.
constexpr int kGrid = 16;
constexpr int kStrip = 64;               // positions on the long side that a block holds at a time
constexpr std::int64_t kGramLong = 512;  // positions that a block sums before the sums of blocks are added
static_assert(kGrid * kGrid == kThreads && kGramLong % kStrip == 0);

int padded_side(std::int64_t p) { return p <= 16 ? 16 : p <= 32 ? 32 : 64; }
std::int64_t gram_chunks(const NewtonSchulzMatrix& u) { return (u.long_side() + kGramLong - 1) / kGramLong; }

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

/// Zeroes a strip, then fills it with u inverse.
template <class T, int kSide>
__device__ void load_strip(const NewtonSchulzMatrix& u, bool wide, std::int64_t batch, std::int64_t begin,
                           double inverse, float (&strip)[kSide][kStrip + 1]) {
  for (int e = static_cast<int>(threadIdx.x); e < kSide * kStrip; e += kThreads) strip[e / kStrip][e % kStrip] = 0;
  __syncthreads();
  const T* const matrix = row_of<const T>(u, batch, 0);
  for_each_in_strip(u, wide, begin, [&](int i, int l, std::int64_t offset) {
    strip[i][l] = static_cast<float>(to_float(matrix[offset]) * inverse);
  });
  __syncthreads();
}

/// partials[batch, chunk] = the kSide x kSide Gram matrix of kGramLong positions.
template <class T, int kSide>
__global__ void __launch_bounds__(kThreads)
    skinny_gram(const NewtonSchulzMatrix u, bool wide, const double* inverse, std::int64_t chunks, float* partials) {
  constexpr int kPer = kSide / kGrid;
  __shared__ float strip[kSide][kStrip + 1];
  const std::int64_t batch = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const std::int64_t end = min((chunk + 1) * kGramLong, wide ? u.cols : u.rows);
  const int ti = static_cast<int>(threadIdx.x) / kGrid, tj = static_cast<int>(threadIdx.x) % kGrid;
  float sum[kPer][kPer] = {};
  for (std::int64_t begin = chunk * kGramLong; begin < end; begin += kStrip) {
    load_strip<T, kSide>(u, wide, batch, begin, inverse[batch], strip);
    for (int l = 0; l < kStrip; ++l) {
      for (int i = 0; i < kPer; ++i) {
        for (int j = 0; j < kPer; ++j) sum[i][j] += strip[ti + i * kGrid][l] * strip[tj + j * kGrid][l];
      }
    }
    __syncthreads();
  }
  float* const out = partials + blockIdx.x * static_cast<std::int64_t>(kSide * kSide);
  for (int i = 0; i < kPer; ++i) {
    for (int j = 0; j < kPer; ++j) out[(ti + i * kGrid) * kSide + tj + j * kGrid] = sum[i][j];
  }
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

/// polynomials[batch] = Q of the Gram matrix that is the sum of the partials.
template <int kSide>
__global__ void __launch_bounds__(kThreads)
    skinny_polynomial(const float* partials, std::int64_t chunks, const NewtonSchulzSteps steps, float* polynomials) {
  constexpr int kSize = kSide * kSide;
  __shared__ float r[kSize], h[kSize], q[kSize];
  const float* const mine = partials + blockIdx.x * chunks * kSize;
  for (int e = static_cast<int>(threadIdx.x); e < kSize; e += kThreads) {
    double sum = 0;
    for (std::int64_t chunk = 0; chunk < chunks; ++chunk) sum += mine[chunk * kSize + e];
    r[e] = static_cast<float>(sum);
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
    polynomials[blockIdx.x * static_cast<std::int64_t>(kSize) + e] = q[e];
}

/// out = Q (u inverse) for one strip of the long side.
template <class T, class Out, int kSide>
__global__ void __launch_bounds__(kThreads)
    skinny_apply(const NewtonSchulzMatrix u, bool wide, const double* inverse, const float* polynomials,
                 const NewtonSchulzMatrix out, std::int64_t strips) {
  constexpr int kPer = kSide / kGrid, kPerLong = kStrip / kGrid;
  __shared__ float strip[kSide][kStrip + 1];
  __shared__ float q[kSide * kSide];
  const std::int64_t batch = blockIdx.x / strips, begin = blockIdx.x % strips * kStrip;
  for (int e = static_cast<int>(threadIdx.x); e < kSide * kSide; e += kThreads) {
    q[e] = polynomials[batch * static_cast<std::int64_t>(kSide * kSide) + e];
  }
  load_strip<T, kSide>(u, wide, batch, begin, inverse[batch], strip);  // ends with a barrier
  const int ti = static_cast<int>(threadIdx.x) / kGrid, tl = static_cast<int>(threadIdx.x) % kGrid;
  float sum[kPer][kPerLong] = {};
  for (int k = 0; k < kSide; ++k) {
    for (int i = 0; i < kPer; ++i) {
      for (int l = 0; l < kPerLong; ++l) sum[i][l] += q[(ti + i * kGrid) * kSide + k] * strip[k][tl + l * kGrid];
    }
  }
  __syncthreads();
  for (int i = 0; i < kPer; ++i) {
    for (int l = 0; l < kPerLong; ++l) strip[ti + i * kGrid][tl + l * kGrid] = sum[i][l];
  }
  __syncthreads();
  Out* const matrix = row_of<Out>(out, batch, 0);
  for_each_in_strip(out, wide, begin,
                    [&](int i, int l, std::int64_t offset) { matrix[offset] = from_float<Out>(strip[i][l]); });
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
      square_sums<decltype(type)>
          <<<static_cast<unsigned>(n.u.batches * chunks), kThreads, 0, to_cuda(stream)>>>(n.u, chunks, workspace);
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

void newton_schulz_add_identity(const NewtonSchulzMatrix& z, double alpha, double beta, const NewtonSchulzMatrix& q,
                                StreamRef stream) {
  const DeviceGuard guard(stream.device());
  with_type(q.dtype, [&](auto type) {
    identity_kernel<decltype(type)><<<row_grid(q), kThreads, 0, to_cuda(stream)>>>(
        z, static_cast<float>(alpha), static_cast<float>(beta), q, pieces(q.cols));
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

std::int64_t newton_schulz_skinny_workspace(const NewtonSchulzMatrix& u) {
  const int side = padded_side(u.short_side());
  return u.batches * (gram_chunks(u) + 1) * side * side;
}

void newton_schulz_skinny(const GramFloatArguments& a, float* workspace, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  const cudaStream_t queue = to_cuda(stream);
  const NewtonSchulzMatrix& u = a.u;
  const bool wide = u.is_wide();
  const std::int64_t chunks = gram_chunks(u), strips = (u.long_side() + kStrip - 1) / kStrip;
  with_side(padded_side(u.short_side()), [&](auto side) {
    constexpr int kSide = decltype(side)::value;
    float* const polynomials = workspace + u.batches * chunks * kSide * kSide;
    with_io_type(u.dtype, [&](auto from) {
      using T = decltype(from);
      skinny_gram<T, kSide>
          <<<static_cast<unsigned>(u.batches * chunks), kThreads, 0, queue>>>(u, wide, a.inverse, chunks, workspace);
      check_launch("newton_schulz");
      skinny_polynomial<kSide>
          <<<static_cast<unsigned>(u.batches), kThreads, 0, queue>>>(workspace, chunks, a.steps, polynomials);
      check_launch("newton_schulz");
      with_io_type(a.out.dtype, [&](auto to) {
        skinny_apply<T, decltype(to), kSide><<<static_cast<unsigned>(u.batches * strips), kThreads, 0, queue>>>(
            u, wide, a.inverse, polynomials, a.out, strips);
      });
      check_launch("newton_schulz");
    });
  });
}

}  // namespace rowan::cuda
