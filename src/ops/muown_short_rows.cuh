// Muown in [.., out, in] storage, rows of up to 64 inputs (the factors B of LoRA): four elements of a row on each of 4,
// 8 or 16 lanes. A group of lanes works on two rows at once, so that enough loads are under way, and each row's scalars
// fall to another lane.
#pragma once

#include "ops/muown_device.cuh"

namespace rowan::cuda::short_rows {

inline constexpr int kBlock = 256;

inline constexpr int kLeastBlocks = 4;  // a multiprocessor, which bounds the registers

/// kThreads lanes for each of two rows, of up to 4 kThreads inputs.
template <int kThreadsOfRow>
struct Width {
  static constexpr int kThreads = kThreadsOfRow;
  static constexpr int kRows = 2;
  static constexpr int kGroups = kBlock / kThreads;
  static constexpr int kSteps = 4;  // of a block, each with so many rows:
  static constexpr int kStepRows = kGroups * kRows;
  static constexpr int kBlockRows = kSteps * kStepRows;
  static_assert(kThreads <= kWarp && kRows <= kThreads);
};

/// Where the lanes of a group work. A group takes rows `kGroups` apart: neighbouring groups have neighbouring rows.
template <class W>
struct Rows {
  std::int64_t first;
  std::int64_t count;  // of the matrix
  std::int64_t neurons;
  bool one_batch;
  int lane;  // of the group

  __device__ Rows(const MuownShape& shape, std::int64_t block)  // of the first step
      : first(block * W::kBlockRows + threadIdx.x / W::kThreads),
        count(shape.batches * shape.neurons),
        neurons(shape.neurons),
        one_batch(shape.batches == 1),
        lane(static_cast<int>(threadIdx.x) % W::kThreads) {}
  __device__ std::int64_t row(int i) const { return first + i * W::kGroups; }
  __device__ bool has(int i) const { return row(i) < count; }
  __device__ std::int64_t batch(int i) const { return one_batch ? 0 : row(i) / neurons; }
  __device__ std::int64_t neuron(int i) const { return one_batch ? row(i) : row(i) % neurons; }
  __device__ Rows next() const {
    Rows rows = *this;
    rows.first += W::kStepRows;
    return rows;
  }
  /// The row whose scalars this lane keeps.
  __device__ bool keeps_scalars() const { return lane < W::kRows && has(lane); }
  __device__ std::int64_t own() const { return row(lane); }
};

/// The value that the lane which keeps row i's scalars holds.
template <class W, class T>
__device__ T of_row(T value, int i) {
  return __shfl_sync(kAllLanes, value, i, W::kThreads);
}

/// What prepare reads of a group's rows.
template <class W>
struct PrepareRows {
  float magnitude = 1, norm = 1;  // of the row whose scalars this lane keeps
  Quad<float> w[W::kRows], g[W::kRows], m[W::kRows];

  __device__ PrepareRows(const MuownPrepareArguments& a, const Rows<W>& rows) {
    if (rows.keeps_scalars()) {
      magnitude = static_cast<const float*>(a.magnitude)[rows.own()];
      norm = static_cast<const float*>(a.norm)[rows.own()];
    }
    const std::int64_t at = std::int64_t{kQuad} * rows.lane;
#pragma unroll
    for (int i = 0; i < W::kRows; ++i) {
      const std::int64_t count = rows.has(i) ? a.shape.inputs : 0, batch = rows.batch(i), neuron = rows.neuron(i);
      w[i] = load_quad(line_of<const float>(a.weight, batch, neuron), at, count, a.quads);
      g[i] = load_quad(line_of<const float>(a.gradient, batch, neuron), at, count, a.quads);
      m[i] = load_quad(line_of<const float>(a.momentum, batch, neuron), at, count, a.quads);
    }
  }
};

template <class W, class U>
__device__ void prepare_step(const MuownPrepareArguments& a, const Rows<W>& rows, PrepareRows<W>& read, double factor) {
  double dot_own = 0;
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    const double dot = lane_sum<W::kThreads>(quad_dot(read.w[i], read.g[i]));
    if (rows.lane == i) dot_own = dot;
  }
  PrepareFactors own;
  own.set(a, read.magnitude, read.norm);
  own.set_gradient(factor, dot_own);

  const auto mu = static_cast<float>(a.mu);
  const std::int64_t at = std::int64_t{kQuad} * rows.lane;
  UpdateSums sums_own;
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    PrepareFactors f;
    f.of_gradient = of_row<W>(own.of_gradient, i);
    f.of_weight = of_row<W>(own.of_weight, i);
    f.back = of_row<W>(own.back, i);
    const std::int64_t count = rows.has(i) ? a.shape.inputs : 0, batch = rows.batch(i), neuron = rows.neuron(i);
    UpdateSums sums;
    Quad<U> u;
    prepare_quad(f, mu, a.nesterov, read.w[i], read.g[i], read.m[i], u, inside_of(at, count), sums);
    store_quad(line_of<float>(a.momentum, batch, neuron), at, count, a.quads, read.m[i]);
    store_quad(line_of<U>(a.update, batch, neuron), at, count, a.quads, u);
    if (a.direction.data) {
      Quad<float> back;
#pragma unroll
      for (int e = 0; e < kQuad; ++e) back.value[e] = read.w[i].value[e] * f.back;
      store_quad(line_of<float>(a.direction, batch, neuron), at, count, a.quads, back);
    }
    sums.square = lane_sum<W::kThreads>(sums.square);
    sums.largest = lane_largest<W::kThreads>(sums.largest);
    if (rows.lane == i) sums_own = sums;
  }
  if (!rows.keeps_scalars()) return;
  static_cast<float*>(a.magnitude_grad)[rows.own()] = own.gg;
  static_cast<float*>(a.row_max)[rows.own()] = __uint_as_float(sums_own.largest);
  a.row_square_sum[rows.own()] = sums_own.square;
}

template <class W, class U>
__global__ void __launch_bounds__(kBlock, kLeastBlocks)
    prepare(const __grid_constant__ MuownPrepareArguments single, const MuownTable<MuownPrepareArguments> table) {
  __shared__ MatrixRoom<MuownPrepareArguments> room;
  take_matrix(room.get(), single, table);
  const MuownPrepareArguments& a = room.get();
  if (detail::control_skips(a.control)) return;
  const double factor = detail::control_factor(a.control);
  Rows<W> rows(a.shape, blockIdx.x - a.first_block);
#pragma unroll 1
  for (int step = 0; step < W::kSteps; ++step, rows = rows.next()) {
    PrepareRows<W> read(a, rows);
    prepare_step<W, U>(a, rows, read, factor);
  }
}

/// The sums of a group's rows where some may be cold or decay, from memory; each goes to the lane that keeps the row's
/// scalars. Not inlined: few blocks need them, and what they keep in registers is more than the others have.
template <class W, class U>
__device__ __noinline__ FinishSums all_sums(const MuownFinishArguments& a, const Rows<W>& rows, FinishFactors own) {
  const std::int64_t at = std::int64_t{kQuad} * rows.lane;
  RowSums sums_own;
#pragma unroll 1
  for (int i = 0; i < W::kRows; ++i) {
    FinishFactors f;
    f.back = of_row<W>(own.back, i);
    f.rate = of_row<W>(own.rate, i);
    f.maybe_cold = of_row<W>(static_cast<int>(own.maybe_cold), i) != 0;
    const std::int64_t count = rows.has(i) ? a.shape.inputs : 0, batch = rows.batch(i), neuron = rows.neuron(i);
    float out[kQuad];
    to_floats(load_quad(line_of<const U>(a.update, batch, neuron), at, count, a.quads), out);
    Quad<float> gradient{};
    if (f.maybe_cold) gradient = load_quad(line_of<const float>(a.gradient, batch, neuron), at, count, false);
    RowSums sums;
    sums.add_all(f, load_quad(line_of<const float>(a.weight, batch, neuron), at, count, a.quads), out,
                 f.maybe_cold ? &gradient : nullptr);
#pragma unroll
    for (double& value : sums.value) value = lane_sum<W::kThreads>(value);
    if (rows.lane == i) sums_own = sums;
  }
  return sums_own.sums();
}

/// What finish reads of a group's rows.
template <class W, class U>
struct FinishRows {
  RowScalars scalars;  // of the row whose scalars this lane keeps
  Quad<float> w[W::kRows];
  Quad<U> o[W::kRows];

  __device__ FinishRows(const MuownFinishArguments& a, const Rows<W>& rows) {
    if (rows.keeps_scalars()) scalars.load(a, rows.own());
    const std::int64_t at = std::int64_t{kQuad} * rows.lane;
#pragma unroll
    for (int i = 0; i < W::kRows; ++i) {
      const std::int64_t count = rows.has(i) ? a.shape.inputs : 0, batch = rows.batch(i), neuron = rows.neuron(i);
      w[i] = load_quad(line_of<const float>(a.weight, batch, neuron), at, count, a.quads);
      o[i] = load_quad(line_of<const U>(a.update, batch, neuron), at, count, a.quads);
    }
  }
};

template <class W, class U>
__device__ void finish_step(const MuownFinishArguments& a, const detail::FinishConstants& constants,
                            const Rows<W>& rows, FinishRows<W, U>& read) {
  FinishFactors own;
  if (rows.keeps_scalars()) own.set(a, rows.neuron(rows.lane), read.scalars.state.magnitude, read.scalars.state.norm);
  FinishFactors f[W::kRows];
  FinishSums sums_own;
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    f[i].back = of_row<W>(own.back, i);
    f[i].rate = of_row<W>(own.rate, i);
    float out[kQuad], square = 0;
    to_floats(read.o[i], out);
    bool moved = false;
#pragma unroll
    for (int e = 0; e < kQuad; ++e) {
      const float d = f[i].direction(read.w[i].value[e], out[e]);
      square = fmaf(d, d, square);
      moved = moved || f[i].rate * out[e] != 0;
    }
    const double dd = lane_sum<W::kThreads>(square);
    const unsigned movers = __ballot_sync(kAllLanes, moved);
    if (rows.lane != i) continue;
    sums_own.dd = dd;
    constexpr unsigned kLanes = (1ull << W::kThreads) - 1;
    sums_own.moved = (movers >> (threadIdx.x % kWarp / W::kThreads * W::kThreads) & kLanes) != 0;
  }
  if (__any_sync(kAllLanes, own.maybe_cold || constants.decay != 0)) sums_own = all_sums<W, U>(a, rows, own);
  RowPlan<float> plan_own;
  if (rows.keeps_scalars()) {
    plan_own = detail::finish_row(constants, sums_own, read.scalars.magnitude_grad, read.scalars.state);
    read.scalars.store(a, rows.own());
  }
  const bool all_step = __all_sync(kAllLanes, !rows.keeps_scalars() || plan_own.mode == RowMode::kStep);
  const ValueLines value(a);
  const std::int64_t at = std::int64_t{kQuad} * rows.lane;
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    RowPlan<float> plan;
    plan.scale = of_row<W>(plan_own.scale, i);
    plan.decay = of_row<W>(plan_own.decay, i);
    plan.mode = all_step ? RowMode::kStep : static_cast<RowMode>(of_row<W>(static_cast<int>(plan_own.mode), i));
    const std::int64_t count = rows.has(i) ? a.shape.inputs : 0, batch = rows.batch(i), neuron = rows.neuron(i);
    float out[kQuad];
    to_floats(read.o[i], out);
    const Quad<float> x = new_weights(plan, f[i], read.w[i], out);
    if (plan.mode != RowMode::kKeep) store_quad(line_of<float>(a.weight, batch, neuron), at, count, a.quads, x);
    value.store(batch, neuron, at, count, x);
  }
}

template <class W, class U>
__global__ void __launch_bounds__(kBlock, 3)
    finish(const __grid_constant__ MuownFinishArguments single, const MuownTable<MuownFinishArguments> table) {
  __shared__ detail::FinishConstants constants;
  __shared__ MatrixRoom<MuownFinishArguments> room;
  take_matrix(room.get(), single, table);
  const MuownFinishArguments& a = room.get();
  if (threadIdx.x == kBlock - 1) constants = detail::finish_constants(a);
  if (detail::control_skips(a.control)) return;
  __syncthreads();  // the constants are there
  Rows<W> rows(a.shape, blockIdx.x - a.first_block);
#pragma unroll 1
  for (int step = 0; step < W::kSteps; ++step, rows = rows.next()) {
    FinishRows<W, U> read(a, rows);
    finish_step<W, U>(a, constants, rows, read);
  }
}

}  // namespace rowan::cuda::short_rows
