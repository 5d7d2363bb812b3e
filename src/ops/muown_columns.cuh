// Muown's row kernels for matrices stored [.., in, out]: an output neuron is a column. A block takes a tile of 128
// neurons, four adjacent ones a thread, and a chunk of the lines; sums of a neuron are taken over a chunk, then over
// the chunks, in a fixed order.
#pragma once

#include <algorithm>

#include "ops/muown_device.cuh"

namespace rowan::cuda::columns {

inline constexpr int kAcross = 32;             // threads of a block beside each other
inline constexpr int kDown = 8;                // and below each other
inline constexpr int kTile = kAcross * kQuad;  // neurons
inline constexpr std::int64_t kMostChunks = 64;

struct Chunks {
  std::int64_t lines = 0;  // a chunk
  std::int64_t count = 0;
  std::int64_t tiles = 0;
  std::int64_t row_tiles = 0;  // of kAcross neurons
};

inline Chunks chunks_of(const MuownShape& shape) {
  Chunks c;
  c.lines = std::max<std::int64_t>(64, (shape.inputs + kMostChunks - 1) / kMostChunks);
  c.count = std::max<std::int64_t>(1, (shape.inputs + c.lines - 1) / c.lines);
  c.tiles = (shape.neurons + kTile - 1) / kTile;
  c.row_tiles = (shape.neurons + kAcross - 1) / kAcross;
  return c;
}

/// Partial sums lie as [batch, chunk, which, neuron].
__device__ inline std::int64_t partial_index(const MuownShape& shape, const Chunks& c, std::int64_t batch,
                                             std::int64_t chunk, int which, int count, std::int64_t neuron) {
  return ((batch * c.count + chunk) * count + which) * shape.neurons + neuron;
}

// ---- elements
// ----------------------------------------------------------------------------------------------------------

/// The four neurons and the lines of a thread.
struct TilePosition {
  std::int64_t batch, chunk, neuron, row;
  std::int64_t begin, end;  // of the lines, in steps of kDown
  int inside;               // neurons that exist

  __device__ TilePosition(const MuownShape& shape, const Chunks& c) {
    const std::int64_t block = blockIdx.x, tile = block % c.tiles;
    chunk = block / c.tiles % c.count;
    batch = block / (c.tiles * c.count);
    neuron = tile * kTile + threadIdx.x * kQuad;
    row = batch * shape.neurons + neuron;
    inside = inside_of(neuron, shape.neurons);
    begin = chunk * c.lines + threadIdx.y;
    end = inside > 0 ? min((chunk + 1) * c.lines, shape.inputs) : 0;
  }
  /// The row of neuron e, for reading: the last one beyond the end.
  __device__ std::int64_t row_of(int e, const MuownShape& shape) const {
    return batch * shape.neurons + min(neuron + e, shape.neurons - 1);
  }
};

/// A matrix as the tile's threads read it.
template <class T>
struct Lines {
  T* data;
  std::int64_t stride;
  bool quads;

  __device__ Lines(const MuownOperand& m, std::int64_t batch, bool moves_in_quads)
      : data(line_of<T>(m, batch, 0)), stride(m.line_stride), quads(moves_in_quads) {}
  /// Zeros beyond the last line.
  __device__ auto load(const TilePosition& p, std::int64_t line, std::int64_t neurons) const {
    using Value = std::remove_const_t<T>;
    return line < p.end ? load_quad<Value>(data + line * stride, p.neuron, neurons, quads) : Quad<Value>{};
  }
  __device__ void store(const TilePosition& p, std::int64_t line, std::int64_t neurons, const Quad<T>& q) const {
    store_quad(data + line * stride, p.neuron, neurons, quads, q);
  }
};

/// Combines each of v over the threads below each other in a fixed order and stores the results as partials: sums, but
/// of number kLargest the largest.
template <int kLargest, int kCount>
__device__ void store_partials(const MuownShape& shape, const Chunks& c, const TilePosition& p,
                               const double (&v)[kCount][kQuad], int count, double* partials) {
  __shared__ double parts[kDown][kTile];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i >= count) break;
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kQuad; ++e) parts[threadIdx.y][e * kAcross + threadIdx.x] = v[i][e];
    __syncthreads();
    const int at = static_cast<int>(threadIdx.y) * kAcross + static_cast<int>(threadIdx.x);
    if (at >= kTile) continue;
    const std::int64_t neuron = p.neuron - threadIdx.x * kQuad + at % kAcross * kQuad + at / kAcross;
    double all = parts[0][at];
#pragma unroll
    for (int y = 1; y < kDown; ++y) all = i == kLargest ? fmax(all, parts[y][at]) : all + parts[y][at];
    if (neuron < shape.neurons) partials[partial_index(shape, c, p.batch, p.chunk, i, count, neuron)] = all;
  }
}

/// Sums of a row that finish takes: all of RowSums where decay or cold rows need them.
__device__ inline int finish_sum_count(const MuownFinishArguments& a) {
  return a.warm || detail::decay_of(a) != 0 ? RowSums::kMost : RowSums::kAlways;
}

inline constexpr int kAhead = 4;  // lines that a thread reads at a time

inline __global__ void __launch_bounds__(kAcross* kDown)
    prepare_dots(const MuownPrepareArguments a, const Chunks c, double* partials) {
  if (detail::control_skips(a.control)) return;
  const TilePosition p(a.shape, c);
  const Lines<const float> weight(a.weight, p.batch, a.quads), gradient(a.gradient, p.batch, a.quads);
  const std::int64_t n = a.shape.neurons;
  double dot[1][kQuad] = {};
  for (std::int64_t i = p.begin; i < p.end; i += kAhead * kDown) {
    Quad<float> w[kAhead], g[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      w[k] = weight.load(p, i + k * kDown, n);
      g[k] = gradient.load(p, i + k * kDown, n);
    }
#pragma unroll
    for (int e = 0; e < kQuad; ++e) {
      float part = 0;  // conversions to double are slow
#pragma unroll
      for (int k = 0; k < kAhead; ++k) part = fmaf(w[k].value[e], g[k].value[e], part);
      dot[0][e] += part;
    }
  }
  store_partials<-1>(a.shape, c, p, dot, 1, partials);
}

/// Partials: sum of squares and largest magnitude of U (its bits).
template <class U>
__global__ void __launch_bounds__(kAcross* kDown, 3)
    prepare_updates(const MuownPrepareArguments a, const Chunks c, double* partials) {
  if (detail::control_skips(a.control)) return;
  const TilePosition p(a.shape, c);
  const Lines<const float> weight(a.weight, p.batch, a.quads), gradient(a.gradient, p.batch, a.quads);
  const Lines<float> momentum(a.momentum, p.batch, a.quads);
  const Lines<U> update(a.update, p.batch, a.quads);
  const std::int64_t n = a.shape.neurons;
  const auto mu = static_cast<float>(a.mu);
  const bool nesterov = a.nesterov;
  PrepareFactors f[kQuad];
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    const std::int64_t row = p.row_of(e, a.shape);
    f[e].set(a, static_cast<const float*>(a.magnitude)[row], static_cast<const float*>(a.norm)[row]);
    f[e].gg = static_cast<const float*>(a.magnitude_grad)[row];
    f[e].set_products(detail::control_factor(a.control));
  }
  constexpr int kPair = 2;
  double sums[2][kQuad] = {};
  std::uint32_t largest[kQuad] = {};
  for (std::int64_t i = p.begin; i < p.end; i += kPair * kDown) {
    Quad<float> w[kPair], g[kPair], m[kPair];
#pragma unroll
    for (int k = 0; k < kPair; ++k) {
      w[k] = weight.load(p, i + k * kDown, n);
      g[k] = gradient.load(p, i + k * kDown, n);
      m[k] = momentum.load(p, i + k * kDown, n);
    }
#pragma unroll
    for (int k = 0; k < kPair; ++k) {
      const std::int64_t line = i + k * kDown;
      if (line >= p.end) break;
      Quad<U> u;
#pragma unroll
      for (int e = 0; e < kQuad; ++e) {
        u.value[e] = from_float<U>(prepare_element(f[e], mu, nesterov, w[k].value[e], g[k].value[e], m[k].value[e]));
        const float stored = to_float(u.value[e]);
        sums[0][e] += static_cast<double>(stored) * static_cast<double>(stored);
        largest[e] = max(largest[e], magnitude_bits(stored));
      }
      momentum.store(p, line, n, m[k]);
      update.store(p, line, n, u);
      if (a.direction.data) {
        Quad<float> back;
#pragma unroll
        for (int e = 0; e < kQuad; ++e) back.value[e] = w[k].value[e] * f[e].back;
        Lines<float>(a.direction, p.batch, a.quads).store(p, line, n, back);
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kQuad; ++e) sums[1][e] = largest[e];
  store_partials<1>(a.shape, c, p, sums, 2, partials);
}

template <class U>
__global__ void __launch_bounds__(kAcross* kDown)
    finish_sums(const MuownFinishArguments a, const Chunks c, double* partials) {
  if (detail::control_skips(a.control)) return;
  const TilePosition p(a.shape, c);
  const Lines<const float> weight(a.weight, p.batch, a.quads);
  const Lines<const U> update(a.update, p.batch, a.quads);
  const std::int64_t n = a.shape.neurons;
  FinishFactors f[kQuad];
  bool maybe_cold = false;
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    const std::int64_t row = p.row_of(e, a.shape);
    f[e].set(a, row % n, static_cast<const float*>(a.magnitude)[row], static_cast<const float*>(a.norm)[row]);
    maybe_cold |= f[e].maybe_cold;
  }
  const int count = finish_sum_count(a);
  double sums[RowSums::kMost][kQuad] = {};
  if (!maybe_cold && detail::decay_of(a) == 0) {
    for (std::int64_t i = p.begin; i < p.end; i += kAhead * kDown) {
      Quad<float> w[kAhead];
      Quad<U> o[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        w[k] = weight.load(p, i + k * kDown, n);
        o[k] = update.load(p, i + k * kDown, n);
      }
#pragma unroll
      for (int e = 0; e < kQuad; ++e) {
        float part = 0;
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          const float out = to_float(o[k].value[e]), d = f[e].direction(w[k].value[e], out);
          part = fmaf(d, d, part);
          if (f[e].rate * out != 0) sums[1][e] = 1;
        }
        sums[0][e] += part;
      }
    }
  } else {
    for (std::int64_t i = p.begin; i < p.end; i += kDown) {
      const Quad<float> w = weight.load(p, i, n);
      const Quad<U> o = update.load(p, i, n);
      Quad<float> gradient{};
      if (maybe_cold) gradient = Lines<const float>(a.gradient, p.batch, false).load(p, i, n);
#pragma unroll
      for (int e = 0; e < kQuad; ++e) {
        const float stored = to_float(o.value[e]);
        const double wide = w.value[e], out = stored, d = f[e].direction(w.value[e], stored);
        sums[0][e] += d * d;
        if (f[e].rate * stored != 0) sums[1][e] = 1;
        sums[2][e] += wide * d;
        sums[3][e] += wide * wide;
        sums[4][e] += out * out;
        sums[5][e] += out * static_cast<double>(gradient.value[e]);
      }
    }
  }
  store_partials<-1>(a.shape, c, p, sums, count, partials);
}

/// What finish_elements needs of a row whose scalars have been updated.
struct StoredPlan {
  RowPlan<float> plan;
  FinishFactors factors;
};

template <class U>
__global__ void __launch_bounds__(kAcross* kDown, 3)
    finish_elements(const MuownFinishArguments a, const Chunks c, const StoredPlan* plans) {
  if (detail::control_skips(a.control)) return;
  const TilePosition p(a.shape, c);
  const Lines<float> weight(a.weight, p.batch, a.quads);
  const Lines<const U> update(a.update, p.batch, a.quads);
  const std::int64_t n = a.shape.neurons;
  const ValueLines value(a);
  StoredPlan row[kQuad];
  bool moves = false;
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    row[e] = plans[p.row_of(e, a.shape)];
    moves |= row[e].plan.mode != RowMode::kKeep;
  }
  if (!moves && !a.value.data) return;
  for (std::int64_t i = p.begin; i < p.end; i += kAhead * kDown) {
    Quad<float> w[kAhead];
    Quad<U> o[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      w[k] = weight.load(p, i + k * kDown, n);
      o[k] = update.load(p, i + k * kDown, n);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const std::int64_t line = i + k * kDown;
      if (line >= p.end) break;
      Quad<float> x;
#pragma unroll
      for (int e = 0; e < kQuad; ++e)
        x.value[e] = new_weight(row[e].plan, row[e].factors, w[k].value[e], to_float(o[k].value[e]));
      if (moves) weight.store(p, line, n, x);
      value.store(p.batch, line, p.neuron, n, x);
    }
  }
}

inline __global__ void __launch_bounds__(kAcross* kDown)
    init_sums(const MuownInitArguments a, const Chunks c, double* partials) {
  const TilePosition p(a.shape, c);
  const Lines<const float> weight(a.weight, p.batch, false);
  double square[1][kQuad] = {};
  for (std::int64_t i = p.begin; i < p.end; i += kDown) {
    const Quad<float> w = weight.load(p, i, a.shape.neurons);
#pragma unroll
    for (int e = 0; e < kQuad; ++e) square[0][e] += static_cast<double>(w.value[e]) * static_cast<double>(w.value[e]);
  }
  store_partials<-1>(a.shape, c, p, square, 1, partials);
}

// ---- rows: 32 neurons a block, their chunks on eight threads each
// ----------------------------------------------------------------------------------------------------------

struct RowsPosition {
  std::int64_t batch, neuron, row;
  bool inside;

  __device__ RowsPosition(const MuownShape& shape, const Chunks& c) {
    const std::int64_t block = blockIdx.x;
    batch = block / c.row_tiles;
    neuron = block % c.row_tiles * kAcross + threadIdx.x;
    inside = neuron < shape.neurons;
    row = batch * shape.neurons + min(neuron, shape.neurons - 1);
  }
  __device__ bool writes() const { return inside && threadIdx.y == 0; }
};

/// The chunks' partials of one neuron combined; valid where threadIdx.y is 0.
template <int kLargest, int kCount>
__device__ void combine_partials(const MuownShape& shape, const Chunks& c, const RowsPosition& p, double (&v)[kCount],
                                 int count, const double* partials) {
  __shared__ double parts[kDown][kAcross];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const auto with = [&](double a, double b) { return i == kLargest ? fmax(a, b) : a + b; };
    v[i] = 0;
    if (i >= count) continue;
    if (p.inside) {
      for (std::int64_t chunk = threadIdx.y; chunk < c.count; chunk += kDown)
        v[i] = with(v[i], partials[partial_index(shape, c, p.batch, chunk, i, count, p.neuron)]);
    }
    __syncthreads();
    parts[threadIdx.y][threadIdx.x] = v[i];
    __syncthreads();
    if (threadIdx.y != 0) continue;
    for (int y = 1; y < kDown; ++y) v[i] = with(v[i], parts[y][threadIdx.x]);
  }
}

inline __global__ void prepare_gradients(const MuownPrepareArguments a, const Chunks c, const double* partials) {
  if (detail::control_skips(a.control)) return;
  const RowsPosition p(a.shape, c);
  double dot[1];
  combine_partials<-1>(a.shape, c, p, dot, 1, partials);
  if (!p.writes()) return;
  PrepareFactors f;
  f.set(a, static_cast<const float*>(a.magnitude)[p.row], static_cast<const float*>(a.norm)[p.row]);
  f.set_gradient(detail::control_factor(a.control), dot[0]);
  static_cast<float*>(a.magnitude_grad)[p.row] = f.gg;
}

inline __global__ void prepare_row_sums(const MuownPrepareArguments a, const Chunks c, const double* partials) {
  if (detail::control_skips(a.control)) return;
  const RowsPosition p(a.shape, c);
  double sums[2];
  combine_partials<1>(a.shape, c, p, sums, 2, partials);
  if (!p.writes()) return;
  a.row_square_sum[p.row] = sums[0];
  static_cast<float*>(a.row_max)[p.row] = __uint_as_float(static_cast<std::uint32_t>(sums[1]));
}

inline __global__ void finish_row_scalars(const MuownFinishArguments a, const Chunks c, const double* partials,
                                          StoredPlan* plans) {
  if (detail::control_skips(a.control)) return;
  const RowsPosition p(a.shape, c);
  double sums[RowSums::kMost];
  combine_partials<-1>(a.shape, c, p, sums, finish_sum_count(a), partials);
  if (!p.writes()) return;
  RowScalars scalars;
  scalars.load(a, p.row);
  StoredPlan stored;
  stored.factors.set(a, p.neuron, scalars.state.magnitude, scalars.state.norm);
  stored.plan =
      detail::finish_row(detail::finish_constants(a), {sums[0], sums[2], sums[3], sums[4], sums[5], sums[1] != 0},
                         scalars.magnitude_grad, scalars.state);
  scalars.store(a, p.row);
  plans[p.row] = stored;
}

inline __global__ void init_row_scalars(const MuownInitArguments a, const Chunks c, const double* partials) {
  const RowsPosition p(a.shape, c);
  double square[1];
  combine_partials<-1>(a.shape, c, p, square, 1, partials);
  if (!p.writes()) return;
  detail::init_row(sqrt(square[0]), a, static_cast<float*>(a.magnitude)[p.row], static_cast<float*>(a.norm)[p.row]);
}

/// Launch shapes: one block a tile and chunk, or one block for 32 neurons.
struct Launch {
  Chunks chunks;
  dim3 threads{kAcross, kDown};
  unsigned elements;
  unsigned rows;

  explicit Launch(const MuownShape& shape)
      : chunks(chunks_of(shape)),
        elements(static_cast<unsigned>(shape.batches * chunks.count * chunks.tiles)),
        rows(static_cast<unsigned>(shape.batches * chunks.row_tiles)) {}
};

inline std::size_t partial_bytes(const MuownShape& shape) {
  return sizeof(double) * RowSums::kMost * static_cast<std::size_t>(shape.rows() * chunks_of(shape).count);
}

}  // namespace rowan::cuda::columns
