// What the Muown row kernels share: loads and stores of four elements, a row's factors and scalars, the arithmetic of
// its elements, and sums over the threads of a warp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

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

/// This block's matrix, one of the table, or `single` where that is empty, copied to shared memory: fields read where
/// they lie would be waited for one after the other.
template <class Arguments>
__device__ void take_matrix(Arguments& mine, const Arguments& single, const MuownTable<Arguments>& table) {
  const Arguments* const from = table.matrices ? table.matrices + table.matrix_of_block[blockIdx.x] : &single;
  constexpr unsigned kWords = sizeof(Arguments) / sizeof(std::int64_t);
  static_assert(sizeof(Arguments) % sizeof(std::int64_t) == 0 && std::is_trivially_copyable_v<Arguments>);
  for (unsigned i = threadIdx.x; i < kWords; i += blockDim.x)
    reinterpret_cast<std::int64_t*>(&mine)[i] = reinterpret_cast<const std::int64_t*>(from)[i];
  __syncthreads();
}
/// Room for it that is not initialised.
template <class Arguments>
struct alignas(Arguments) MatrixRoom {
  unsigned char bytes[sizeof(Arguments)];
  __device__ Arguments& get() { return *reinterpret_cast<Arguments*>(bytes); }
};

/// The row's factors in prepare: u = w inverse, D = ratio (G - u gg) = of_gradient G - of_weight W.
struct PrepareFactors {
  float inverse = 0;
  float ratio = 0;
  float back = 0;  // of the direction d0
  float gg = 0;    // <G, u>
  float of_gradient = 0, of_weight = 0;

  __device__ void set(const MuownPrepareArguments& a, float g, float norm) {
    const float magnitude = detail::guarded_magnitude(g, static_cast<float>(a.epsilon));
    inverse = __frcp_rn(magnitude);
    ratio = __fdiv_rn(magnitude, norm);
    back = __fdiv_rn(norm, magnitude);
  }
  /// From gg, with control's factor.
  __device__ void set_products(double factor) {
    of_gradient = ratio * static_cast<float>(factor);
    of_weight = ratio * inverse * gg;
  }
  /// From <G, W>.
  __device__ void set_gradient(double factor, double dot) {
    gg = static_cast<float>(factor * dot * static_cast<double>(inverse));
    set_products(factor);
  }
};

/// What prepare sums over U as stored.
struct UpdateSums {
  double square = 0;
  std::uint32_t largest = 0;  // magnitude_bits
};

/// M becomes M' for one element; returns U.
__device__ inline float prepare_element(const PrepareFactors& f, float mu, bool nesterov, float w, float g, float& m) {
  const float d = fmaf(g, f.of_gradient, -(w * f.of_weight));
  m = fmaf(mu, m, d);
  return nesterov ? fmaf(mu, m, d) : m;
}

/// The same for a quad, of whose U the first `inside` elements count.
template <class U>
__device__ void prepare_quad(const PrepareFactors& f, float mu, bool nesterov, const Quad<float>& w,
                             const Quad<float>& g, Quad<float>& m, Quad<U>& u, int inside, UpdateSums& sums) {
#pragma unroll
  for (int e = 0; e < kQuad; ++e) {
    u.value[e] = from_float<U>(prepare_element(f, mu, nesterov, w.value[e], g.value[e], m.value[e]));
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

__device__ inline float step_weight(const RowPlan<float>& plan, const FinishFactors& f, float w, float o) {
  return fmaf(-plan.decay, w, plan.scale * f.direction(w, o));
}
__device__ inline float new_weight(const RowPlan<float>& plan, const FinishFactors& f, float w, float o) {
  if (plan.mode == RowMode::kWake) return plan.scale * o;
  return plan.mode == RowMode::kKeep ? w : step_weight(plan, f, w, o);
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

  __device__ explicit ValueLines(const MuownFinishArguments& a)
      : operand(a.value), dtype(a.value_dtype), quads(a.value_quads) {}

  /// `kMoves`: all lines move in quads; else it is asked.
  template <bool kMoves = false>
  __device__ void store(std::int64_t batch, std::int64_t line, std::int64_t j, std::int64_t n,
                        const Quad<float>& x) const {
    if (!operand.data) return;
    if (dtype == DType::kBFloat16) {
      store_as<kMoves, __nv_bfloat16>(batch, line, j, n, x);
    } else if (dtype == DType::kFloat16) {
      store_as<kMoves, __half>(batch, line, j, n, x);
    } else {
      store_as<kMoves, float>(batch, line, j, n, x);
    }
  }

 private:
  template <bool kMoves, class V>
  __device__ void store_as(std::int64_t batch, std::int64_t line, std::int64_t j, std::int64_t n,
                           const Quad<float>& x) const {
    Quad<V> q;
#pragma unroll
    for (int e = 0; e < kQuad; ++e) q.value[e] = from_float<V>(x.value[e]);
    V* const to = line_of<V>(operand, batch, line);
    if constexpr (kMoves) {
      *reinterpret_cast<Quad<V>*>(to + j) = q;
    } else {
      store_quad(to, j, n, quads, q);
    }
  }
};

}  // namespace rowan::cuda
