// The row kernels of Muown, one set for each layout.
#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "core/cuda_check.h"
#include "ops/device_types.cuh"
#include "ops/muown_backend.h"
#include "ops/muown_columns.cuh"
#include "ops/muown_device.cuh"
#include "ops/muown_short_rows.cuh"

namespace rowan::cuda {

namespace {

using detail::FinishConstants;

/// The larger magnitude; NaN wins.
__device__ float larger(float a, float b) { return (b > a || isnan(b)) ? b : a; }

/// The scalar part of one row: updates g, r, m, v and says what becomes of its elements. Not inlined: its registers
/// would add to those of the elements that a thread keeps.
__device__ __noinline__ RowPlan<float> finish_scalars(const MuownFinishArguments& a, const FinishConstants& constants,
                                                      std::int64_t row, const FinishSums& sums, RowScalars scalars) {
  const RowPlan<float> plan = detail::finish_row(constants, sums, scalars.magnitude_grad, scalars.state);
  scalars.store(a, row);
  return plan;
}

// ---- [.., out, in]: kThreads threads a row, four adjacent elements at a time
// -----------------------------------------------------------

constexpr int kBlock = 256;
constexpr int rows_a_block(int threads) { return threads < kBlock ? kBlock / threads : 1; }
constexpr int block_size(int threads) { return threads < kBlock ? kBlock : threads; }
/// Blocks a multiprocessor at least, which bounds the registers.
constexpr int least_prepare_blocks(int threads) { return threads <= kBlock ? 3 : 2; }
constexpr int least_finish_blocks(int threads, int quads) { return threads > kBlock ? 2 : quads > 1 ? 3 : 4; }

/// Several rows share a block only where each has at most a warp.
template <int kThreads>
__device__ void sync_row() {
  if constexpr (kThreads <= kWarp) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

/// Sums each of v over the row's threads in a fixed order; every thread gets the results.
template <int kThreads, int kCount>
__device__ void row_sum(double (&v)[kCount]) {
  constexpr int kLanes = kThreads < kWarp ? kThreads : kWarp;
  for (int i = 0; i < kCount; ++i) {
    for (int mask = kLanes / 2; mask > 0; mask /= 2) v[i] += __shfl_xor_sync(0xFFFFFFFFu, v[i], mask);
  }
  if constexpr (kThreads > kWarp) {
    constexpr int kWarps = kThreads / kWarp;
    __shared__ double parts[kWarps][kCount];
    __syncthreads();  // an earlier sum has been read
    if (threadIdx.x % kWarp == 0) {
      for (int i = 0; i < kCount; ++i) parts[threadIdx.x / kWarp][i] = v[i];
    }
    __syncthreads();
    for (int i = 0; i < kCount; ++i) {
      v[i] = 0;
      for (int w = 0; w < kWarps; ++w) v[i] += parts[w][i];
    }
  }
}

template <int kThreads>
__device__ float row_largest(float v) {
  constexpr int kLanes = kThreads < kWarp ? kThreads : kWarp;
  for (int mask = kLanes / 2; mask > 0; mask /= 2) v = larger(v, __shfl_xor_sync(0xFFFFFFFFu, v, mask));
  if constexpr (kThreads > kWarp) {
    constexpr int kWarps = kThreads / kWarp;
    __shared__ float parts[kWarps];
    __syncthreads();
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = v;
    __syncthreads();
    v = 0;
    for (int w = 0; w < kWarps; ++w) v = larger(v, parts[w]);
  }
  return v;
}

/// Calls f(j, k) for the first elements j of this thread's quads of a row of n; k counts them where kQuads of them fit
/// (0: any number, k = 0).
template <int kThreads, int kQuads, class F>
__device__ void for_each_quad(int lane, std::int64_t n, F&& f) {
  if constexpr (kQuads > 0) {
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
      const int j = (lane + k * kThreads) * kQuad;
      if (j < n) f(static_cast<std::int64_t>(j), k);
    }
  } else {
#pragma unroll 2
    for (std::int64_t j = lane * kQuad; j < n; j += kThreads * kQuad) f(j, 0);
  }
}

/// The row of this thread. Beyond the last row `inputs` is 0 and `row` the last one, so that all threads reach the
/// barriers.
template <int kThreads>
struct RowPosition {
  std::int64_t row;
  std::int64_t batch;
  std::int64_t neuron;
  std::int64_t inputs;
  int lane;
  bool writes;  // the row's scalars

  __device__ RowPosition(const MuownShape& shape, std::int64_t block) {
    const std::int64_t rows = shape.batches * shape.neurons;
    const std::int64_t mine = block * rows_a_block(kThreads) + threadIdx.x / kThreads;
    row = min(mine, rows - 1);
    batch = shape.batches == 1 ? 0 : row / shape.neurons;
    neuron = row - batch * shape.neurons;
    inputs = mine < rows ? shape.inputs : 0;
    lane = static_cast<int>(threadIdx.x) % kThreads;
    writes = mine < rows && lane == 0;
  }
};

template <int kThreads, int kQuads, class U>
__global__ void __launch_bounds__(block_size(kThreads), least_prepare_blocks(kThreads))
    prepare_rows(const __grid_constant__ MuownPrepareArguments single, const MuownTable<MuownPrepareArguments> table) {
  const MuownPrepareArguments& a = matrix_of(blockIdx.x, single, table);
  if (detail::control_skips(a.control)) return;
  const RowPosition<kThreads> p(a.shape, blockIdx.x - a.first_block);
  const float* const weight = line_of<const float>(a.weight, p.batch, p.neuron);
  const float* const gradient = line_of<const float>(a.gradient, p.batch, p.neuron);
  float* const momentum = line_of<float>(a.momentum, p.batch, p.neuron);
  U* const update = line_of<U>(a.update, p.batch, p.neuron);
  float* const direction = a.direction.data ? line_of<float>(a.direction, p.batch, p.neuron) : nullptr;
  const std::int64_t n = p.inputs;
  const bool nesterov = a.nesterov;
  const bool quads = a.shape.inputs % kQuad == 0 && quads_fit<float>(a.weight) && quads_fit<float>(a.gradient) &&
                     quads_fit<float>(a.momentum) && quads_fit<U>(a.update) && quads_fit<float>(a.direction);
  constexpr bool kKept = kQuads > 0;
  Quad<float> w[kKept ? kQuads : 1], g[kKept ? kQuads : 1];
  double dot[1] = {0};
  for_each_quad<kThreads, kQuads>(p.lane, n, [&](std::int64_t j, int k) {
    w[k] = load_quad(weight, j, n, quads);
    g[k] = load_quad(gradient, j, n, quads);
    dot[0] += quad_dot(w[k], g[k]);
  });
  row_sum<kThreads>(dot);

  PrepareFactors f;
  f.set(a, static_cast<const float*>(a.magnitude)[p.row], static_cast<const float*>(a.norm)[p.row]);
  const double factor = detail::control_factor(a.control);
  f.set_gradient(factor, dot[0]);
  const auto gradient_factor = static_cast<float>(factor), mu = static_cast<float>(a.mu);
  double square[1] = {0};
  float largest = 0;
  for_each_quad<kThreads, kQuads>(p.lane, n, [&](std::int64_t j, int k) {
    const Quad<float> wj = kKept ? w[k] : load_quad(weight, j, n, quads);
    const Quad<float> gj = kKept ? g[k] : load_quad(gradient, j, n, quads);
    Quad<float> m = load_quad(momentum, j, n, quads), back;
    Quad<U> u;
#pragma unroll
    for (int e = 0; e < kQuad; ++e) {
      const float d = f.ratio * (gj.value[e] * gradient_factor - wj.value[e] * f.inverse * f.gg);
      m.value[e] = mu * m.value[e] + d;
      u.value[e] = from_float<U>(nesterov ? d + mu * m.value[e] : m.value[e]);
      back.value[e] = wj.value[e] * f.back;
      if (!quads && j + e >= n) continue;
      const float stored = to_float(u.value[e]);
      square[0] += static_cast<double>(stored) * static_cast<double>(stored);
      largest = larger(largest, fabsf(stored));
    }
    store_quad(momentum, j, n, quads, m);
    store_quad(update, j, n, quads, u);
    if (direction) store_quad(direction, j, n, quads, back);
  });
  row_sum<kThreads>(square);
  largest = row_largest<kThreads>(largest);
  if (p.writes) {
    static_cast<float*>(a.magnitude_grad)[p.row] = f.gg;
    static_cast<float*>(a.row_max)[p.row] = largest;
    a.row_square_sum[p.row] = square[0];
  }
}

template <class V>
__device__ void store_value_quad(void* row, std::int64_t j, std::int64_t n, bool quads, const Quad<float>& x) {
  Quad<V> q;
#pragma unroll
  for (int e = 0; e < kQuad; ++e) q.value[e] = from_float<V>(x.value[e]);
  store_quad(static_cast<V*>(row), j, n, quads, q);
}

template <int kThreads, int kQuads, class U>
__global__ void __launch_bounds__(block_size(kThreads), least_finish_blocks(kThreads, kQuads))
    finish_rows(const __grid_constant__ MuownFinishArguments single, const MuownTable<MuownFinishArguments> table) {
  const MuownFinishArguments& a = matrix_of(blockIdx.x, single, table);
  if (detail::control_skips(a.control)) return;
  const RowPosition<kThreads> p(a.shape, blockIdx.x - a.first_block);
  float* const weight = line_of<float>(a.weight, p.batch, p.neuron);
  const U* const update = line_of<const U>(a.update, p.batch, p.neuron);
  const std::int64_t n = p.inputs;
  const bool quads = a.shape.inputs % kQuad == 0 && quads_fit<float>(a.weight) && quads_fit<U>(a.update);
  FinishFactors f;
  f.set(a, p.neuron, static_cast<const float*>(a.magnitude)[p.row], static_cast<const float*>(a.norm)[p.row]);
  const bool maybe_cold = f.maybe_cold;
  const bool decays = detail::decay_of(a) != 0;
  constexpr bool kKept = kQuads > 0;
  Quad<float> w[kKept ? kQuads : 1];
  Quad<U> o[kKept ? kQuads : 1];

  __shared__ FinishConstants constants;
  if (threadIdx.x == blockDim.x - 1) constants = detail::finish_constants(a);
  RowScalars scalars;
  if (kKept && p.writes) scalars.load(a, p.row);
  double base[2] = {0, 0};  // d d, moved
  bool moved = false;
  for_each_quad<kThreads, kQuads>(p.lane, n, [&](std::int64_t j, int k) {
    w[k] = load_quad(weight, j, n, quads);
    o[k] = load_quad(update, j, n, quads);
    float part = 0;
#pragma unroll
    for (int e = 0; e < kQuad; ++e) {
      const float oe = to_float(o[k].value[e]), d = f.direction(w[k].value[e], oe);
      part = fmaf(d, d, part);
      if (f.rate * oe != 0) moved = true;
    }
    base[0] += part;
  });
  base[1] = moved;
  row_sum<kThreads>(base);
  const auto wj = [&](std::int64_t j, int k) { return kKept ? w[k] : load_quad(weight, j, n, quads); };
  const auto oj = [&](std::int64_t j, int k) { return kKept ? o[k] : load_quad(update, j, n, quads); };
  double more[5] = {0, 0, 0, 0, 0};  // d w, w w, o o, g o, d d again: with decay these sums cancel each other
  const bool wants_more = decays || maybe_cold;
  if (kThreads < kWarp ? __any_sync(0xFFFFFFFFu, wants_more) : wants_more) {  // alike in all threads of a sum
    const float* const gradient = maybe_cold ? line_of<const float>(a.gradient, p.batch, p.neuron) : nullptr;
    for_each_quad<kThreads, kQuads>(p.lane, n, [&](std::int64_t j, int k) {
      const Quad<float> wq = wj(j, k);
      const Quad<U> oq = oj(j, k);
#pragma unroll
      for (int e = 0; e < kQuad; ++e) {
        const float oe = to_float(oq.value[e]);
        const double wide = wq.value[e], out = oe, d = f.direction(wq.value[e], oe);
        more[0] += wide * d;
        more[4] += d * d;
        more[1] += wide * wide;
        if (gradient && j + e < n) {
          more[2] += out * out;
          more[3] += out * gradient[j + e];
        }
      }
    });
    row_sum<kThreads>(more);
    base[0] = more[4];
  }

  __shared__ RowPlan<float> plans[rows_a_block(kThreads)];
  RowPlan<float>& plan = plans[threadIdx.x / kThreads];
  __syncthreads();  // all threads have read g and r, and the constants are there
  if (!kKept && p.writes) scalars.load(a, p.row);
  if (p.writes)
    plan = finish_scalars(a, constants, p.row, {base[0], more[0], more[1], more[2], more[3], base[1] != 0}, scalars);
  sync_row<kThreads>();
  const RowPlan<float> mine = plan;
  void* value = nullptr;  // of this row
  if (a.value.data) {
    const std::int64_t value_line = p.batch * a.value.batch_stride + p.neuron * a.value.line_stride;
    value = static_cast<std::byte*>(a.value.data) + value_line * (a.value_dtype == DType::kFloat32 ? 4 : 2);
  }
  const DType value_dtype = a.value_dtype;
  const bool value_quads = a.shape.inputs % kQuad == 0 &&
                           (value_dtype == DType::kFloat32 ? quads_fit<float>(a.value) : quads_fit<__half>(a.value));
  for_each_quad<kThreads, kQuads>(p.lane, n, [&](std::int64_t j, int k) {
    const Quad<float> wq = wj(j, k);
    const Quad<U> oq = oj(j, k);
    Quad<float> x;
#pragma unroll
    for (int e = 0; e < kQuad; ++e) x.value[e] = new_weight(mine, f, wq.value[e], to_float(oq.value[e]));
    if (mine.mode != RowMode::kKeep) store_quad(weight, j, n, quads, x);
    if (!value) return;
    if (value_dtype == DType::kBFloat16) {
      store_value_quad<__nv_bfloat16>(value, j, n, value_quads, x);
    } else if (value_dtype == DType::kFloat16) {
      store_value_quad<__half>(value, j, n, value_quads, x);
    } else {
      store_value_quad<float>(value, j, n, value_quads, x);
    }
  });
}

template <int kThreads>
__global__ void __launch_bounds__(block_size(kThreads)) init_rows(const MuownInitArguments a) {
  const RowPosition<kThreads> p(a.shape, blockIdx.x);
  const float* const weight = line_of<const float>(a.weight, p.batch, p.neuron);
  double square[1] = {0};
  for (std::int64_t j = p.lane; j < p.inputs; j += kThreads)
    square[0] += static_cast<double>(weight[j]) * static_cast<double>(weight[j]);
  row_sum<kThreads>(square);
  if (!p.writes) return;
  detail::init_row(sqrt(square[0]), a, static_cast<float*>(a.magnitude)[p.row], static_cast<float*>(a.norm)[p.row]);
}

/// Widths that share a kernel, by their most inputs. Rows wider than the last but one are read again instead of kept:
/// the second time they come from the cache, and no register limits how many rows are under way.
constexpr std::int64_t kRowWidths[] = {16, 32, 64, 128, 512, 1024, 4096, 8192, std::int64_t{1} << 62};
constexpr int kShortWidths = 3;  // of them go to short_rows

template <class F>
void with_short_width(int width_class, F&& f) {
  using short_rows::Width;
  switch (width_class) {
    case 0:
      return f(Width<4>{});
    case 1:
      return f(Width<8>{});
    default:
      return f(Width<16>{});
  }
}

/// Calls f(threads a row, quads a thread) with constants; 0 quads: the row is read again.
template <class F>
void with_row_width(int width_class, F&& f) {
  const auto call = [&](auto threads, auto quads) { f(threads, quads); };
  using std::integral_constant;
  switch (width_class) {
    case 3:
      return call(integral_constant<int, 32>{}, integral_constant<int, 1>{});
    case 4:
      return call(integral_constant<int, 32>{}, integral_constant<int, 4>{});
    case 5:
      return call(integral_constant<int, 256>{}, integral_constant<int, 1>{});
    case 6:
      return call(integral_constant<int, 256>{}, integral_constant<int, 4>{});
    case 7:
      return call(integral_constant<int, 512>{}, integral_constant<int, 4>{});
    default:
      return call(integral_constant<int, 512>{}, integral_constant<int, 0>{});
  }
}

template <class F>
void with_update_type(DType dtype, F&& f) {
  if (dtype == DType::kBFloat16) {
    f(__nv_bfloat16{});
  } else {
    f(0.0f);
  }
}

unsigned row_blocks(const MuownShape& shape, int threads) {
  const int rows = rows_a_block(threads);
  return static_cast<unsigned>((shape.rows() + rows - 1) / rows);
}

}  // namespace

std::size_t muown_workspace_bytes(const MuownShape& shape) {
  if (!shape.transposed) return 0;
  return columns::partial_bytes(shape) + sizeof(columns::StoredPlan) * static_cast<std::size_t>(shape.rows());
}

MuownRowKind muown_row_kind(const MuownShape& shape) {
  MuownRowKind kind{0, shape.update_dtype};
  while (shape.inputs > kRowWidths[kind.width_class]) ++kind.width_class;
  return kind;
}

std::int64_t muown_row_blocks(const MuownShape& shape) {
  const int width = muown_row_kind(shape).width_class;
  std::int64_t blocks = 0;
  if (width < kShortWidths) {
    with_short_width(width, [&](auto w) {
      constexpr std::int64_t kRows = decltype(w)::kBlockRows;
      blocks = (shape.rows() + kRows - 1) / kRows;
    });
  } else {
    with_row_width(width, [&](auto threads, auto) { blocks = row_blocks(shape, decltype(threads)::value); });
  }
  return blocks;
}

namespace {

void launch_prepare_rows(const MuownRowKind& kind, const MuownPrepareArguments& single,
                         const MuownTable<MuownPrepareArguments>& table, StreamRef stream) {
  const auto blocks = static_cast<unsigned>(table.blocks);
  const cudaStream_t queue = to_cuda(stream);
  with_update_type(kind.update_dtype, [&](auto type) {
    using U = decltype(type);
    if (kind.width_class < kShortWidths) {
      with_short_width(kind.width_class, [&](auto width) {
        short_rows::prepare<decltype(width), U><<<blocks, short_rows::kBlock, 0, queue>>>(single, table);
      });
    } else {
      with_row_width(kind.width_class, [&](auto threads, auto quads) {
        constexpr int kThreads = decltype(threads)::value;
        prepare_rows<kThreads, decltype(quads)::value, U><<<blocks, block_size(kThreads), 0, queue>>>(single, table);
      });
    }
  });
  check_launch("muown_prepare");
}

void launch_finish_rows(const MuownRowKind& kind, const MuownFinishArguments& single,
                        const MuownTable<MuownFinishArguments>& table, StreamRef stream) {
  const auto blocks = static_cast<unsigned>(table.blocks);
  const cudaStream_t queue = to_cuda(stream);
  with_update_type(kind.update_dtype, [&](auto type) {
    using U = decltype(type);
    if (kind.width_class < kShortWidths) {
      with_short_width(kind.width_class, [&](auto width) {
        short_rows::finish<decltype(width), U><<<blocks, short_rows::kBlock, 0, queue>>>(single, table);
      });
    } else {
      with_row_width(kind.width_class, [&](auto threads, auto quads) {
        constexpr int kThreads = decltype(threads)::value;
        finish_rows<kThreads, decltype(quads)::value, U><<<blocks, block_size(kThreads), 0, queue>>>(single, table);
      });
    }
  });
  check_launch("muown_finish");
}

}  // namespace

void muown_prepare(const MuownRowKind& kind, const MuownTable<MuownPrepareArguments>& table, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  launch_prepare_rows(kind, {}, table, stream);
}

void muown_finish(const MuownRowKind& kind, const MuownTable<MuownFinishArguments>& table, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  launch_finish_rows(kind, {}, table, stream);
}

void muown_prepare(const MuownPrepareArguments& a, void* workspace, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  if (!a.shape.transposed)
    return launch_prepare_rows(muown_row_kind(a.shape), a, {nullptr, nullptr, muown_row_blocks(a.shape)}, stream);
  const cudaStream_t queue = to_cuda(stream);
  with_update_type(a.shape.update_dtype, [&](auto type) {
    using U = decltype(type);
    const columns::Launch launch(a.shape);
    double* const partials = static_cast<double*>(workspace);
    columns::prepare_dots<<<launch.elements, launch.threads, 0, queue>>>(a, launch.chunks, partials);
    check_launch("muown_prepare");
    columns::prepare_gradients<<<launch.rows, launch.threads, 0, queue>>>(a, launch.chunks, partials);
    check_launch("muown_prepare");
    columns::prepare_updates<U><<<launch.elements, launch.threads, 0, queue>>>(a, launch.chunks, partials);
    check_launch("muown_prepare");
    columns::prepare_row_sums<<<launch.rows, launch.threads, 0, queue>>>(a, launch.chunks, partials);
    check_launch("muown_prepare");
  });
}

void muown_finish(const MuownFinishArguments& a, void* workspace, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  if (!a.shape.transposed)
    return launch_finish_rows(muown_row_kind(a.shape), a, {nullptr, nullptr, muown_row_blocks(a.shape)}, stream);
  const cudaStream_t queue = to_cuda(stream);
  with_update_type(a.shape.update_dtype, [&](auto type) {
    using U = decltype(type);
    const columns::Launch launch(a.shape);
    double* const partials = static_cast<double*>(workspace);
    auto* const plans =
        reinterpret_cast<columns::StoredPlan*>(static_cast<std::byte*>(workspace) + columns::partial_bytes(a.shape));
    columns::finish_sums<U><<<launch.elements, launch.threads, 0, queue>>>(a, launch.chunks, partials);
    check_launch("muown_finish");
    columns::finish_row_scalars<<<launch.rows, launch.threads, 0, queue>>>(a, launch.chunks, partials, plans);
    check_launch("muown_finish");
    columns::finish_elements<U><<<launch.elements, launch.threads, 0, queue>>>(a, launch.chunks, plans);
    check_launch("muown_finish");
  });
}

void muown_init(const MuownInitArguments& a, void* workspace, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  const cudaStream_t queue = to_cuda(stream);
  if (a.shape.transposed) {
    const columns::Launch launch(a.shape);
    double* const partials = static_cast<double*>(workspace);
    columns::init_sums<<<launch.elements, launch.threads, 0, queue>>>(a, launch.chunks, partials);
    check_launch("muown_init");
    columns::init_row_scalars<<<launch.rows, launch.threads, 0, queue>>>(a, launch.chunks, partials);
  } else if (a.shape.inputs <= kBlock) {
    init_rows<kWarp><<<row_blocks(a.shape, kWarp), block_size(kWarp), 0, queue>>>(a);
  } else {
    init_rows<kBlock><<<row_blocks(a.shape, kBlock), block_size(kBlock), 0, queue>>>(a);
  }
  check_launch("muown_init");
}

}  // namespace rowan::cuda
