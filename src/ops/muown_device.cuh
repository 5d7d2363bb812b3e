// What the Muown row kernels share: loads and stores of four elements, a row's factors and scalars, the arithmetic of
// its elements, and sums over the threads of a warp.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/device_types.cuh"
#include "ops/muown_backend.h"

namespace rowan::cuda {

using detail::FinishSums;
using detail::RowMode;
using detail::RowPlan;
using detail::RowState;

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xFFFFFFFFu;
inline constexpr int kQuad = 4;

template <class T>
using Quad = Pack<T, kQuad>;

template <class T>
__device__ T* line_of(const MuownOperand& operand, std::int64_t batch, std::int64_t line) {
  return static_cast<T*>(operand.data) + batch * operand.batch_stride + line * operand.line_stride;
}

/// Whether every line of the operand can be read in quads.
template <class T>
__device__ bool quads_fit(const MuownOperand& operand) {
  const auto quads = [](std::int64_t x) { return x % kQuad == 0; };
  return reinterpret_cast<std::uintptr_t>(operand.data) % sizeof(Quad<T>) == 0 && quads(operand.batch_stride) &&
         quads(operand.line_stride);
}

/// Elements [j, j + 4) of a line of n; zeros beyond its end. `quads`: n is a multiple of 4 and the address fits.
template <class T>
__device__ Quad<T> load_quad(const T* line, std::int64_t j, std::int64_t n, bool quads) {
  if (quads && j < n) return *reinterpret_cast<const Quad<T>*>(line + j);
  Quad<T> q{};
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    if (j + e < n) q.value[e] = line[j + e];
  }
  return q;
}
template <class T>
__device__ void store_quad(T* line, std::int64_t j, std::int64_t n, bool quads, const Quad<T>& q) {
  if (quads && j < n) {
    *reinterpret_cast<Quad<T>*>(line + j) = q;
    return;
  }
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    if (j + e < n) line[j + e] = q.value[e];
  }
}

/// Sum over kThreads neighbouring lanes in a fixed tree; every one of them gets it.
template <int kThreads>
__device__ double lane_sum(double v) {
#pragma unroll
  for (int mask = kThreads / 2; mask > 0; mask /= 2) v += __shfl_xor_sync(kAllLanes, v, mask);
  return v;
}

/// The largest magnitude as its bits, which are ordered like magnitudes with NaN above them all.
__device__ inline std::uint32_t magnitude_bits(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }
template <int kThreads>
__device__ std::uint32_t lane_largest(std::uint32_t bits) {
#pragma unroll
  for (int mask = kThreads / 2; mask > 0; mask /= 2) bits = max(bits, __shfl_xor_sync(kAllLanes, bits, mask));
  return bits;
}

/// This block's matrix: one of the table, or `single` where that is empty.
template <class Arguments>
__device__ const Arguments& matrix_of(std::int64_t block, const Arguments& single, const MuownTable<Arguments>& table) {
  return table.matrices ? table.matrices[table.matrix_of_block[block]] : single;
}

/// The row's factors in prepare: u = w inverse, D = ratio (G - u gg).
struct PrepareFactors {
  float inverse = 0;
  float ratio = 0;
  float back = 0;  // of the direction d0
  float gg = 0;    // <G, u>

  __device__ void set(const MuownPrepareArguments& a, float g, float norm) {
    const float magnitude = detail::guarded_magnitude(g, static_cast<float>(a.epsilon));
    inverse = __frcp_rn(magnitude);
    ratio = __fdiv_rn(magnitude, norm);
    back = __fdiv_rn(norm, magnitude);
  }
  /// From <G, W>, with control's factor.
  __device__ void set_gradient(double factor, double dot) {
    gg = static_cast<float>(factor * dot * static_cast<double>(inverse));
  }
};

/// What prepare sums over U as stored.
struct UpdateSums {
  double square = 0;
  std::uint32_t largest = 0;  // magnitude_bits
};

/// M becomes M', and U from it, for the elements of a quad; the first `inside` of them count.
template <class U>
__device__ void prepare_quad(const PrepareFactors& f, float factor, float mu, bool nesterov, const Quad<float>& w,
                             const Quad<float>& g, Quad<float>& m, Quad<U>& u, int inside, UpdateSums& sums) {
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    const float d = f.ratio * (g.value[e] * factor - w.value[e] * f.inverse * f.gg);
    const float moved = mu * m.value[e] + d;
    m.value[e] = moved;
    u.value[e] = from_float<U>(nesterov ? d + mu * moved : moved);
    if (e >= inside) continue;
    const float stored = to_float(u.value[e]);
    sums.square += static_cast<double>(stored) * static_cast<double>(stored);
    sums.largest = max(sums.largest, magnitude_bits(stored));
  }
}

/// The part of <G, W> of a quad: conversions to double are slow, so one for four products.
__device__ inline double quad_dot(const Quad<float>& w, const Quad<float>& g) {
  float part = 0;
#pragma unroll
  for (int e = 0; e < kQuad; ++e) part = fmaf(w.value[e], g.value[e], part);
  return part;
}

__device__ inline int inside_of(std::int64_t j, std::int64_t n) {
  return static_cast<int>(min(static_cast<std::int64_t>(kQuad), max(n - j, std::int64_t{0})));
}

/// The row's factors in finish: d = w back - rate o.
struct FinishFactors {
  float back = 0;
  float rate = 0;
  bool maybe_cold = false;

  __device__ void set(const MuownFinishArguments& a, std::int64_t neuron, float g, float norm) {
    back = __fdiv_rn(norm, detail::guarded_magnitude(g, static_cast<float>(a.epsilon)));
    rate = static_cast<float>(detail::direction_rate(a, neuron));
    maybe_cold = a.warm && g == 0;
  }
  __device__ float direction(float w, float o) const { return w * back - rate * o; }
};

/// The scalars of one row, read early so that they are there when its sums are.
struct RowScalars {
  RowState<float> state{};
  float magnitude_grad = 0;

  __device__ void load(const MuownFinishArguments& a, std::int64_t row) {
    state.magnitude = static_cast<const float*>(a.magnitude)[row];
    state.norm = static_cast<const float*>(a.norm)[row];
    state.first_moment = static_cast<const float*>(a.first_moment)[row];
    state.second_moment = static_cast<const float*>(a.second_moment)[row];
    magnitude_grad = static_cast<const float*>(a.magnitude_grad)[row];
  }
  __device__ void store(const MuownFinishArguments& a, std::int64_t row) const {
    static_cast<float*>(a.magnitude)[row] = state.magnitude;
    static_cast<float*>(a.norm)[row] = state.norm;
    static_cast<float*>(a.first_moment)[row] = state.first_moment;
    static_cast<float*>(a.second_moment)[row] = state.second_moment;
  }
};

/// Sums of finish as they are added up over threads. With decay the first four cancel each other, so that all are taken
/// in double then; the others are needed by rows that may be cold.
struct RowSums {
  static constexpr int kMost = 6;
  static constexpr int kAlways = 2;  // dd, moved
  double value[kMost] = {};          // dd, moved, dw, ww, oo, go

  __device__ void add(const FinishFactors& f, const Quad<float>& w, const float (&o)[kQuad]) {
    float part = 0;
#pragma unroll
    for (int e = 0; e < kQuad; ++e) {
      const float d = f.direction(w.value[e], o[e]);
      part = fmaf(d, d, part);
      if (f.rate * o[e] != 0) value[1] = 1;
    }
    value[0] += part;
  }
  /// gradient: of these elements, null unless the row may be cold.
  __device__ void add_all(const FinishFactors& f, const Quad<float>& w, const float (&o)[kQuad],
                          const Quad<float>* gradient) {
#pragma unroll
    for (int e = 0; e < kQuad; ++e) {
      const double wide = w.value[e], out = o[e], d = f.direction(w.value[e], o[e]);
      value[0] += d * d;
      if (f.rate * o[e] != 0) value[1] = 1;
      value[2] += wide * d;
      value[3] += wide * wide;
      if (!gradient) continue;
      value[4] += out * out;
      value[5] += out * static_cast<double>(gradient->value[e]);
    }
  }
  __device__ FinishSums sums() const { return {value[0], value[2], value[3], value[4], value[5], value[1] != 0}; }
};

template <class T>
__device__ void to_floats(const Quad<T>& q, float (&x)[kQuad]) {
#pragma unroll
  for (int e = 0; e < kQuad; ++e) x[e] = to_float(q.value[e]);
}

__device__ inline float new_weight(const RowPlan<float>& plan, const FinishFactors& f, float w, float o) {
  if (plan.mode == RowMode::kWake) return plan.scale * o;
  if (plan.mode == RowMode::kKeep) return w;
  const float step = plan.scale * f.direction(w, o);
  return plan.decay == 0 ? step : step - plan.decay * w;
}
__device__ inline Quad<float> new_weights(const RowPlan<float>& plan, const FinishFactors& f, const Quad<float>& w,
                                          const float (&o)[kQuad]) {
  Quad<float> x;
#pragma unroll
  for (int e = 0; e < kQuad; ++e) x.value[e] = new_weight(plan, f, w.value[e], o[e]);
  return x;
}

/// The lines of the copy of W' in a run-time dtype.
struct ValueLines {
  MuownOperand operand;
  DType dtype;
  bool quads;

  __device__ explicit ValueLines(const MuownFinishArguments& a, bool quads_of_line)
      : operand(a.value),
        dtype(a.value_dtype),
        quads(quads_of_line &&
              (a.value_dtype == DType::kFloat32 ? quads_fit<float>(a.value) : quads_fit<__half>(a.value))) {}

  __device__ void store(std::int64_t batch, std::int64_t line, std::int64_t j, std::int64_t n,
                        const Quad<float>& x) const {
    if (!operand.data) return;
    if (dtype == DType::kBFloat16) {
      store_as<__nv_bfloat16>(batch, line, j, n, x);
    } else if (dtype == DType::kFloat16) {
      store_as<__half>(batch, line, j, n, x);
    } else {
      store_as<float>(batch, line, j, n, x);
    }
  }

 private:
  template <class V>
  __device__ void store_as(std::int64_t batch, std::int64_t line, std::int64_t j, std::int64_t n,
                           const Quad<float>& x) const {
    Quad<V> q;
#pragma unroll
    for (int e = 0; e < kQuad; ++e) q.value[e] = from_float<V>(x.value[e]);
    store_quad(line_of<V>(operand, batch, line), j, n, quads, q);
  }
};

}  // namespace rowan::cuda
