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

/// What the threads of a row share in finish: what it is decided from, and what becomes of its elements.
struct RowWork {
  RowScalars scalars;
  FinishSums sums;
  RowPlan<float> plan;
};

/// The scalar part of one row: updates g, r, m, v and makes the plan. Not inlined: its registers would add to those of
/// the elements that a thread keeps.
__device__ __noinline__ void finish_scalars(const MuownFinishArguments& a, const FinishConstants& constants,
                                            std::int64_t row, RowWork& work) {
  RowScalars scalars = work.scalars;
  work.plan = detail::finish_row(constants, work.sums, scalars.magnitude_grad, scalars.state);
  scalars.store(a, row);
}

// ---- [.., out, in]: kThreads threads a row, four adjacent elements at a time
// -----------------------------------------------------------

constexpr int kBlock = 256;
/// Several rows share a block only where each has at most a warp.
constexpr int rows_a_block(int threads) { return threads <= kWarp ? kBlock / threads : 1; }
constexpr int block_size(int threads) { return threads <= kWarp ? kBlock : threads; }
/// Where a thread keeps its part of a row between the pass that sums and the pass that writes, if it is not a number of
/// quads in registers: in shared memory, whose copies from global memory are all under way at once, or nowhere (the row
/// is read again, from the cache).
constexpr int kInShared = -1, kNowhere = 0;
/// Blocks a multiprocessor at least, which bounds the registers.
constexpr int least_prepare_blocks(int threads, int quads) {
  return quads == kInShared ? 512 / threads : threads <= kBlock ? 3 : 2;
}
constexpr int least_finish_blocks(int threads, int quads) {
  return quads == kInShared ? 1024 / threads : threads > kBlock ? 2 : 4;
}
/// Bytes of shared memory for a row of `inputs`: W, G and M, and W and O.
constexpr std::size_t prepare_shared_bytes(std::int64_t inputs) { return static_cast<std::size_t>(inputs) * 3 * 4; }
constexpr std::size_t finish_shared_bytes(std::int64_t inputs, std::size_t update_size) {
  return static_cast<std::size_t>(inputs) * (4 + update_size);
}

/// Starts to copy quad `j` of a line to shared memory. Only this thread reads it.
template <bool kMoves, class T>
__device__ void stage_quad(Quad<T>* to, const T* line, int j, std::int64_t n) {
  if constexpr (!kMoves) {
    *to = load_quad(line, j, n, false);
    return;
  }
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (sizeof(Quad<T>) == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(line + j) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(line + j), "n"(sizeof(Quad<T>))
                 : "memory");
  }
}
__device__ inline void stages_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// All but the last kGroups groups of this thread's copies are there afterwards.
template <int kGroups>
__device__ void stages_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

extern __shared__ __align__(16) unsigned char staged_rows[];

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

/// The largest of the row's magnitude_bits.
template <int kThreads>
__device__ std::uint32_t row_largest(std::uint32_t bits) {
  bits = lane_largest < kThreads < kWarp ? kThreads : kWarp > (bits);
  if constexpr (kThreads > kWarp) {
    constexpr int kWarps = kThreads / kWarp;
    __shared__ std::uint32_t parts[kWarps];
    __syncthreads();
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = bits;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) bits = max(bits, parts[w]);
  }
  return bits;
}

/// Calls f(j, k) for the first elements j of this thread's quads of a row of n; k counts them where they are kept in
/// registers, is their place where they are kept in shared memory, else 0. Rows are shorter than 2^31 but where they
/// are kept nowhere.
template <int kThreads, int kQuads, class F>
__device__ void for_each_quad(int lane, std::int64_t n, F&& f) {
  if constexpr (kQuads > 0) {
#pragma unroll
    for (int k = 0; k < kQuads; ++k) {
      const int j = (lane + k * kThreads) * kQuad;
      if (j < static_cast<int>(n)) f(j, k);
    }
  } else if constexpr (kQuads == kInShared) {
    const int count = (static_cast<int>(n) + kQuad - 1) / kQuad;
#pragma unroll 4
    for (int k = lane; k < count; k += kThreads) f(k * kQuad, k);
  } else {
#pragma unroll 2
    for (std::int64_t j = lane * kQuad; j < n; j += kThreads * kQuad) f(j, 0);
  }
}

/// Calls f(constant) with whether all operands move in quads: then nothing needs to be checked for each of them.
template <class F>
__device__ void with_quads(bool quads, F&& f) {
  if (quads) {
    f(std::true_type());
  } else {
    f(std::false_type());
  }
}
template <bool kMoves, class T, class Index>
__device__ Quad<T> load_row_quad(const T* line, Index j, std::int64_t n) {
  if constexpr (kMoves) return *reinterpret_cast<const Quad<T>*>(line + j);
  return load_quad(line, j, n, false);
}
template <bool kMoves, class T, class Index>
__device__ void store_row_quad(T* line, Index j, std::int64_t n, const Quad<T>& q) {
  if constexpr (kMoves) {
    *reinterpret_cast<Quad<T>*>(line + j) = q;
  } else {
    store_quad(line, j, n, false, q);
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
__global__ void __launch_bounds__(block_size(kThreads), least_prepare_blocks(kThreads, kQuads))
    prepare_rows(const __grid_constant__ MuownPrepareArguments single, const MuownTable<MuownPrepareArguments> table) {
  __shared__ MatrixRoom<MuownPrepareArguments> room;
  take_matrix(room.get(), single, table);
  const MuownPrepareArguments& a = room.get();
  const RowPosition<kThreads> p(a.shape, blockIdx.x - a.first_block);
  const float* const weight = line_of<const float>(a.weight, p.batch, p.neuron);
  const float* const gradient = line_of<const float>(a.gradient, p.batch, p.neuron);
  float* const momentum = line_of<float>(a.momentum, p.batch, p.neuron);
  U* const update = line_of<U>(a.update, p.batch, p.neuron);
  float* const direction = a.direction.data ? line_of<float>(a.direction, p.batch, p.neuron) : nullptr;
  const std::int64_t n = p.inputs;
  const bool nesterov = a.nesterov;
  constexpr bool kKept = kQuads > 0, kStaged = kQuads == kInShared;
  Quad<float> w[kKept ? kQuads : 1], g[kKept ? kQuads : 1];
  Quad<float>* const staged_w = reinterpret_cast<Quad<float>*>(staged_rows);
  Quad<float>* const staged_g = staged_w + (a.shape.inputs + kQuad - 1) / kQuad;
  Quad<float>* const staged_m = staged_g + (a.shape.inputs + kQuad - 1) / kQuad;
  with_quads(a.quads, [&](auto moves) {
    constexpr bool kMoves = decltype(moves)::value;
    for_each_quad<kThreads, kQuads>(p.lane, n, [&](auto j, int k) {
      if constexpr (kStaged) {
        stage_quad<kMoves>(staged_w + k, weight, j, n);
        stage_quad<kMoves>(staged_g + k, gradient, j, n);
      } else if constexpr (kKept) {
        w[k] = load_row_quad<kMoves>(weight, j, n);
        g[k] = load_row_quad<kMoves>(gradient, j, n);
      }
    });
    if constexpr (!kStaged) return;
    stages_commit();
    for_each_quad<kThreads, kQuads>(p.lane, n,
                                    [&](auto j, int k) { stage_quad<kMoves>(staged_m + k, momentum, j, n); });
    stages_commit();
  });
  const auto wj = [&](auto moves, auto j, int k) {
    if constexpr (kKept) {
      return w[k];
    } else if constexpr (kStaged) {
      return staged_w[k];
    } else {
      return load_row_quad<decltype(moves)::value>(weight, j, n);
    }
  };
  const auto gj = [&](auto moves, auto j, int k) {
    if constexpr (kKept) {
      return g[k];
    } else if constexpr (kStaged) {
      return staged_g[k];
    } else {
      return load_row_quad<decltype(moves)::value>(gradient, j, n);
    }
  };
  // What depends on other values comes after the loads of the row are under way.
  const bool skips = detail::control_skips(a.control);
  PrepareFactors f;
  f.set(a, static_cast<const float*>(a.magnitude)[p.row], static_cast<const float*>(a.norm)[p.row]);
  if (skips) return;
  double dot[1] = {0};
  if constexpr (kStaged) stages_wait<1>();
  with_quads(a.quads, [&](auto moves) {
    for_each_quad<kThreads, kQuads>(p.lane, n,
                                    [&](auto j, int k) { dot[0] += quad_dot(wj(moves, j, k), gj(moves, j, k)); });
  });
  row_sum<kThreads>(dot);

  f.set_gradient(detail::control_factor(a.control), dot[0]);
  const auto mu = static_cast<float>(a.mu);
  UpdateSums sums;
  if constexpr (kStaged) stages_wait<0>();
  with_quads(a.quads, [&](auto moves) {
    constexpr bool kMoves = decltype(moves)::value;
    for_each_quad<kThreads, kQuads>(p.lane, n, [&](auto j, int k) {
      const Quad<float> wq = wj(moves, j, k);
      Quad<float> m = kStaged ? staged_m[k] : load_row_quad<kMoves>(momentum, j, n);
      Quad<U> u;
      prepare_quad(f, mu, nesterov, wq, gj(moves, j, k), m, u, kMoves ? kQuad : inside_of(j, n), sums);
      store_row_quad<kMoves>(momentum, j, n, m);
      store_row_quad<kMoves>(update, j, n, u);
      if (!direction) return;
      Quad<float> back;
#pragma unroll
      for (int e = 0; e < kQuad; ++e) back.value[e] = wq.value[e] * f.back;
      store_row_quad<kMoves>(direction, j, n, back);
    });
  });
  double square[1] = {sums.square};
  row_sum<kThreads>(square);
  const std::uint32_t largest = row_largest<kThreads>(sums.largest);
  if (p.writes) {
    static_cast<float*>(a.magnitude_grad)[p.row] = f.gg;
    static_cast<float*>(a.row_max)[p.row] = __uint_as_float(largest);
    a.row_square_sum[p.row] = square[0];
  }
}

/// All sums of a row that may be cold or decays, from memory. Not inlined: few rows need them, and what they keep in
/// registers is more than the others have.
template <int kThreads, class U>
__device__ __noinline__ void all_sums(const MuownFinishArguments& a, std::int64_t batch, std::int64_t neuron,
                                      std::int64_t inputs, FinishFactors f, FinishSums& result) {
  const float* const weight = line_of<const float>(a.weight, batch, neuron);
  const U* const update = line_of<const U>(a.update, batch, neuron);
  const float* const gradient = f.maybe_cold ? line_of<const float>(a.gradient, batch, neuron) : nullptr;
  RowSums sums;
#pragma unroll 1
  for (std::int64_t j = static_cast<int>(threadIdx.x) % kThreads * kQuad; j < inputs; j += kThreads * kQuad) {
    float output[kQuad];
    to_floats(load_quad(update, j, inputs, a.quads), output);
    const Quad<float> g = gradient ? load_quad(gradient, j, inputs, false) : Quad<float>{};
    sums.add_all(f, load_quad(weight, j, inputs, a.quads), output, gradient ? &g : nullptr);
  }
  row_sum<kThreads>(sums.value);
  if (threadIdx.x % kThreads == 0) result = sums.sums();
}

/// Writes a row that stays or wakes, from memory.
template <int kThreads, class U>
__device__ __noinline__ void write_rare_row(const MuownFinishArguments& a, std::int64_t batch, std::int64_t neuron,
                                            std::int64_t inputs, FinishFactors f, RowPlan<float> plan) {
  float* const weight = line_of<float>(a.weight, batch, neuron);
  const U* const update = line_of<const U>(a.update, batch, neuron);
  const ValueLines value(a);
#pragma unroll 1
  for (std::int64_t j = static_cast<int>(threadIdx.x) % kThreads * kQuad; j < inputs; j += kThreads * kQuad) {
    float output[kQuad];
    to_floats(load_quad(update, j, inputs, a.quads), output);
    const Quad<float> x = new_weights(plan, f, load_quad(weight, j, inputs, a.quads), output);
    if (plan.mode != RowMode::kKeep) store_quad(weight, j, inputs, a.quads, x);
    value.store<false>(batch, neuron, j, inputs, x);
  }
}

template <int kThreads, int kQuads, class U>
__global__ void __launch_bounds__(block_size(kThreads), least_finish_blocks(kThreads, kQuads))
    finish_rows(const __grid_constant__ MuownFinishArguments single, const MuownTable<MuownFinishArguments> table) {
  __shared__ MatrixRoom<MuownFinishArguments> room;
  take_matrix(room.get(), single, table);
  const MuownFinishArguments& a = room.get();
  const RowPosition<kThreads> p(a.shape, blockIdx.x - a.first_block);
  float* const weight = line_of<float>(a.weight, p.batch, p.neuron);
  const U* const update = line_of<const U>(a.update, p.batch, p.neuron);
  const std::int64_t n = p.inputs;
  constexpr bool kKept = kQuads > 0, kStaged = kQuads == kInShared;
  Quad<float> w[kKept ? kQuads : 1];
  Quad<U> o[kKept ? kQuads : 1];
  Quad<float>* const staged_w = reinterpret_cast<Quad<float>*>(staged_rows);
  Quad<U>* const staged_o = reinterpret_cast<Quad<U>*>(staged_w + (a.shape.inputs + kQuad - 1) / kQuad);
  with_quads(a.quads, [&](auto moves) {
    [[maybe_unused]] constexpr bool kMoves = decltype(moves)::value;
    for_each_quad<kThreads, kQuads>(p.lane, n, [&](auto j, int k) {
      if constexpr (kStaged) {
        stage_quad<kMoves>(staged_w + k, weight, j, n);
        stage_quad<kMoves>(staged_o + k, update, j, n);
      } else if constexpr (kKept) {
        w[k] = load_row_quad<kMoves>(weight, j, n);
        o[k] = load_row_quad<kMoves>(update, j, n);
      }
    });
    if constexpr (kStaged) stages_commit();
  });
  const auto wj = [&](auto moves, auto j, int k) {
    if constexpr (kKept) {
      return w[k];
    } else if constexpr (kStaged) {
      return staged_w[k];
    } else {
      return load_row_quad<decltype(moves)::value>(weight, j, n);
    }
  };
  const auto oj = [&](auto moves, auto j, int k) {
    if constexpr (kKept) {
      return o[k];
    } else if constexpr (kStaged) {
      return staged_o[k];
    } else {
      return load_row_quad<decltype(moves)::value>(update, j, n);
    }
  };

  // What depends on other values comes after the loads of the row are under way.
  const bool skips = detail::control_skips(a.control);
  FinishFactors f;
  f.set(a, p.neuron, static_cast<const float*>(a.magnitude)[p.row], static_cast<const float*>(a.norm)[p.row]);
  if (skips) return;
  const bool decays = detail::decay_of(a) != 0;
  __shared__ FinishConstants constants;
  if (threadIdx.x == blockDim.x - 1) constants = detail::finish_constants(a);
  __shared__ RowWork works[rows_a_block(kThreads)];
  RowWork& work = works[threadIdx.x / kThreads];
  if (p.lane == 0) work.scalars.load(a, p.row);
  double base[2] = {0, 0};  // d d, moved
  bool moved = false;
  if constexpr (kStaged) stages_wait<0>();
  with_quads(a.quads, [&](auto moves) {
    for_each_quad<kThreads, kQuads>(p.lane, n, [&](auto j, int k) {
      const Quad<float> wq = wj(moves, j, k);
      float output[kQuad], part = 0;
      to_floats(oj(moves, j, k), output);
#pragma unroll
      for (int e = 0; e < kQuad; ++e) {
        const float d = f.direction(wq.value[e], output[e]);
        part = fmaf(d, d, part);
        moved = moved || f.rate * output[e] != 0;
      }
      base[0] += part;
    });
  });
  base[1] = moved;
  row_sum<kThreads>(base);
  if (p.lane == 0) {
    work.sums.dd = base[0];
    work.sums.moved = base[1] != 0;
  }
  const bool wants_more = decays || f.maybe_cold;
  if (kThreads < kWarp ? __any_sync(0xFFFFFFFFu, wants_more) : wants_more)  // alike in all threads of a sum
    all_sums<kThreads, U>(a, p.batch, p.neuron, n, f, work.sums);
  __syncthreads();  // all threads have read g and r, and the constants are there
  if (p.writes) finish_scalars(a, constants, p.row, work);
  sync_row<kThreads>();
  const RowPlan<float> mine = work.plan;
  if (mine.mode != RowMode::kStep) return write_rare_row<kThreads, U>(a, p.batch, p.neuron, n, f, mine);
  const ValueLines value(a);
  with_quads(a.quads && a.value_quads, [&](auto moves) {
    constexpr bool kMoves = decltype(moves)::value;
    for_each_quad<kThreads, kQuads>(p.lane, n, [&](auto j, int k) {
      const Quad<float> wq = wj(moves, j, k);
      float output[kQuad];
      to_floats(oj(moves, j, k), output);
      Quad<float> x;
#pragma unroll
      for (int e = 0; e < kQuad; ++e) x.value[e] = step_weight(mine, f, wq.value[e], output[e]);
      store_row_quad<kMoves>(weight, j, n, x);
      value.template store<kMoves>(p.batch, p.neuron, j, n, x);
    });
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
/// the second time they come from the cache.
constexpr std::int64_t kRowWidths[] = {16, 32, 64, 128, 512, 1024, 2048, 4096, 8192, 16384, std::int64_t{1} << 62};
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

enum class Half { kPrepare, kFinish };

/// Calls f(threads a row, quads a thread) with constants. Up to 16384 inputs shared memory holds what finish reads of a
/// row, but not what prepare does.
template <Half kHalf, class F>
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
      return call(integral_constant<int, 256>{}, integral_constant<int, 2>{});
    case 7:
      return call(integral_constant<int, 128>{}, integral_constant<int, kInShared>{});
    case 8:
      return call(integral_constant<int, 256>{}, integral_constant<int, kInShared>{});
    case 9:
      return call(integral_constant<int, 512>{}, integral_constant < int,
                  kHalf == Half::kFinish ? kInShared : kNowhere > {});
    default:
      return call(integral_constant<int, 512>{}, integral_constant<int, kNowhere>{});
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

template <class Kernel>
void allow_shared_bytes(Kernel kernel, std::size_t bytes) {
  if (bytes == 0) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), "muown");
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
    with_row_width<Half::kPrepare>(width,
                                   [&](auto threads, auto) { blocks = row_blocks(shape, decltype(threads)::value); });
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
      with_row_width<Half::kPrepare>(kind.width_class, [&](auto threads, auto quads) {
        constexpr int kThreads = decltype(threads)::value, kQuads = decltype(quads)::value;
        const auto kernel = prepare_rows<kThreads, kQuads, U>;
        const std::size_t bytes = kQuads == kInShared ? prepare_shared_bytes(kRowWidths[kind.width_class]) : 0;
        allow_shared_bytes(kernel, bytes);
        kernel<<<blocks, block_size(kThreads), bytes, queue>>>(single, table);
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
      with_row_width<Half::kFinish>(kind.width_class, [&](auto threads, auto quads) {
        constexpr int kThreads = decltype(threads)::value, kQuads = decltype(quads)::value;
        const auto kernel = finish_rows<kThreads, kQuads, U>;
        const std::size_t bytes =
            kQuads == kInShared ? finish_shared_bytes(kRowWidths[kind.width_class], sizeof(U)) : 0;
        allow_shared_bytes(kernel, bytes);
        kernel<<<blocks, block_size(kThreads), bytes, queue>>>(single, table);
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
