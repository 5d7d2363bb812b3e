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
  static constexpr int kBlockRows = kGroups * kRows;
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

  __device__ Rows(const MuownShape& shape, std::int64_t block)
      : first(block * W::kBlockRows + threadIdx.x / W::kThreads),
        count(shape.batches * shape.neurons),
        neurons(shape.neurons),
        one_batch(shape.batches == 1),
        lane(static_cast<int>(threadIdx.x) % W::kThreads) {}
  __device__ std::int64_t row(int i) const { return first + i * W::kGroups; }
  __device__ bool has(int i) const { return row(i) < count; }
  __device__ std::int64_t batch(int i) const { return one_batch ? 0 : row(i) / neurons; }
  __device__ std::int64_t neuron(int i) const { return one_batch ? row(i) : row(i) % neurons; }
  /// The row whose scalars this lane keeps.
  __device__ bool keeps_scalars() const { return lane < W::kRows && has(lane); }
  __device__ std::int64_t own() const { return row(lane); }
};

/// The value that the lane which keeps row i's scalars holds.
template <class W, class T>
__device__ T of_row(T value, int i) {
  return __shfl_sync(kAllLanes, value, i, W::kThreads);
}

template <class W, class U>
__global__ void __launch_bounds__(kBlock, kLeastBlocks)
    prepare(const __grid_constant__ MuownPrepareArguments single, const MuownTable<MuownPrepareArguments> table) {
  __shared__ MatrixRoom<MuownPrepareArguments> room;
  take_matrix(room.get(), single, table);
  const MuownPrepareArguments& a = room.get();
  const Rows<W> rows(a.shape, blockIdx.x - a.first_block);
  float g_own = 1, norm_own = 1;
  if (rows.keeps_scalars()) {
    g_own = static_cast<const float*>(a.magnitude)[rows.own()];
    norm_own = static_cast<const float*>(a.norm)[rows.own()];
  }
  const bool skips = detail::control_skips(a.control);
  const double factor = detail::control_factor(a.control);
  const std::int64_t n = a.shape.inputs;
  const bool quads = a.quads;
  Quad<float> w[W::kRows], g[W::kRows];
  Quad<float> m[W::kRows];
  const std::int64_t at = std::int64_t{kQuad} * rows.lane;
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    const std::int64_t count = rows.has(i) ? n : 0;
    const std::int64_t batch = rows.batch(i), neuron = rows.neuron(i);
    w[i] = load_quad(line_of<const float>(a.weight, batch, neuron), at, count, quads);
    g[i] = load_quad(line_of<const float>(a.gradient, batch, neuron), at, count, quads);
    m[i] = load_quad(line_of<const float>(a.momentum, batch, neuron), at, count, quads);
  }
  if (skips) return;

  double dot_own = 0;
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    const double dot = lane_sum<W::kThreads>(quad_dot(w[i], g[i]));
    if (rows.lane == i) dot_own = dot;
  }
  PrepareFactors own;
  own.set(a, g_own, norm_own);
  own.set_gradient(factor, dot_own);

  const auto mu = static_cast<float>(a.mu);
  const bool nesterov = a.nesterov;
  UpdateSums sums_own;
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    PrepareFactors f;
    f.of_gradient = of_row<W>(own.of_gradient, i);
    f.of_weight = of_row<W>(own.of_weight, i);
    f.back = of_row<W>(own.back, i);
    const std::int64_t count = rows.has(i) ? n : 0;
    const std::int64_t batch = rows.batch(i), neuron = rows.neuron(i);
    UpdateSums sums;
    Quad<U> u;
    prepare_quad(f, mu, nesterov, w[i], g[i], m[i], u, inside_of(at, count), sums);
    store_quad(line_of<float>(a.momentum, batch, neuron), at, count, quads, m[i]);
    store_quad(line_of<U>(a.update, batch, neuron), at, count, quads, u);
    if (a.direction.data) {
      Quad<float> back;
#pragma unroll
      for (int e = 0; e < kQuad; ++e) back.value[e] = w[i].value[e] * f.back;
      store_quad(line_of<float>(a.direction, batch, neuron), at, count, quads, back);
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
__global__ void __launch_bounds__(kBlock, 3)
    finish(const __grid_constant__ MuownFinishArguments single, const MuownTable<MuownFinishArguments> table) {
  __shared__ detail::FinishConstants constants;
  __shared__ MatrixRoom<MuownFinishArguments> room;
  take_matrix(room.get(), single, table);
  const MuownFinishArguments& a = room.get();
  const Rows<W> rows(a.shape, blockIdx.x - a.first_block);
  RowScalars scalars;
  if (rows.keeps_scalars()) scalars.load(a, rows.own());
  const bool skips = detail::control_skips(a.control);
  const std::int64_t n = a.shape.inputs;
  const bool quads = a.quads;
  Quad<float> w[W::kRows];
  Quad<U> o[W::kRows];
  const std::int64_t at = std::int64_t{kQuad} * rows.lane;
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    const std::int64_t count = rows.has(i) ? n : 0;
    const std::int64_t batch = rows.batch(i), neuron = rows.neuron(i);
    w[i] = load_quad(line_of<const float>(a.weight, batch, neuron), at, count, quads);
    o[i] = load_quad(line_of<const U>(a.update, batch, neuron), at, count, quads);
  }
  if (threadIdx.x == kBlock - 1) constants = detail::finish_constants(a);
  if (skips) return;

  FinishFactors own;
  if (rows.keeps_scalars()) own.set(a, rows.neuron(rows.lane), scalars.state.magnitude, scalars.state.norm);
  FinishFactors f[W::kRows];
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    f[i].back = of_row<W>(own.back, i);
    f[i].rate = of_row<W>(own.rate, i);
    f[i].maybe_cold = of_row<W>(static_cast<int>(own.maybe_cold), i) != 0;
  }
  const bool wants_all = __any_sync(kAllLanes, own.maybe_cold || detail::decay_of(a) != 0);
  RowSums sums_own;
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    const std::int64_t count = rows.has(i) ? n : 0;
    RowSums sums;
    float out[kQuad];
    to_floats(o[i], out);
    if (wants_all) {
      Quad<float> gradient{};
      if (f[i].maybe_cold)
        gradient = load_quad(line_of<const float>(a.gradient, rows.batch(i), rows.neuron(i)), at, count, false);
      sums.add_all(f[i], w[i], out, f[i].maybe_cold ? &gradient : nullptr);
#pragma unroll
      for (double& value : sums.value) value = lane_sum<W::kThreads>(value);
    } else {
      sums.add(f[i], w[i], out);
#pragma unroll
      for (int s = 0; s < RowSums::kAlways; ++s) sums.value[s] = lane_sum<W::kThreads>(sums.value[s]);
    }
    if (rows.lane == i) sums_own = sums;
  }
  __syncthreads();  // the constants are there
  RowPlan<float> plan_own;
  if (rows.keeps_scalars()) {
    plan_own = detail::finish_row(constants, sums_own.sums(), scalars.magnitude_grad, scalars.state);
    scalars.store(a, rows.own());
  }
  const ValueLines value(a);
#pragma unroll
  for (int i = 0; i < W::kRows; ++i) {
    RowPlan<float> plan;
    plan.scale = of_row<W>(plan_own.scale, i);
    plan.decay = of_row<W>(plan_own.decay, i);
    plan.mode = static_cast<RowMode>(of_row<W>(static_cast<int>(plan_own.mode), i));
    const std::int64_t count = rows.has(i) ? n : 0;
    const std::int64_t batch = rows.batch(i), neuron = rows.neuron(i);
    float out[kQuad];
    to_floats(o[i], out);
    const Quad<float> x = new_weights(plan, f[i], w[i], out);
    if (plan.mode != RowMode::kKeep) store_quad(line_of<float>(a.weight, batch, neuron), at, count, quads, x);
    value.store(batch, neuron, at, count, x);
  }
}

}  // namespace rowan::cuda::short_rows
