#include <algorithm>
#include <vector>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/gemm_backend.h"
#include "ops/lora_backend.h"

namespace rowan::cpu {

namespace {

using detail::convert;

/// Unmasked float32 products go through gemm, which is many times faster than the plain loops.
bool use_gemm(DType dtype, const MaskArguments& mask) { return dtype == DType::kFloat32 && !mask.active; }

GemmOperand operand(const LoraMatrix& m) { return {m.data, m.stride, 0, false}; }
GemmOperand operand(const LoraFactor& f) { return {f.data, f.stride, 0, f.transposed}; }
GemmOperand transposed(GemmOperand o) {
  o.transposed = !o.transposed;
  return o;
}

GemmArguments product(std::int64_t m, std::int64_t n, std::int64_t k, GemmOperand a, GemmOperand b, void* c,
                      std::int64_t ldc) {
  GemmArguments g;
  g.m = m, g.n = n, g.k = k;
  g.a = a, g.b = b, g.c = c, g.ldc = ldc;
  return g;
}

/// Row i of a matrix.
template <class T>
T* row(const LoraMatrix& m, std::int64_t i) {
  return static_cast<T*>(m.data) + i * m.stride;
}

template <class T>
T& element(const LoraFactor& f, std::int64_t k, std::int64_t c) {
  return static_cast<T*>(f.data)[f.transposed ? c * f.stride + k : k * f.stride + c];
}

/// The factor as double, [r, C] or, for a loop over columns outside, [C, r].
template <class T>
std::vector<double> widen(const LoraFactor& f, std::int64_t rank, std::int64_t width, bool columns_first) {
  std::vector<double> wide(static_cast<std::size_t>(rank * width));
  for (std::int64_t k = 0; k < rank; ++k) {
    for (std::int64_t c = 0; c < width; ++c) {
      wide[static_cast<std::size_t>(columns_first ? c * rank + k : k * width + c)] =
          convert<double>(element<T>(f, k, c));
    }
  }
  return wide;
}

/// mask o wide for one element, without the factor 1 / (1 - p).
template <class T>
double kept(T value, const MaskArguments& mask, MaskCursor& cursor, std::int64_t index) {
  return !mask.active || cursor.keeps(static_cast<std::uint64_t>(index)) ? convert<double>(value) : 0.0;
}

template <class T>
void shrink(const LoraShrinkArguments& a) {
  const std::vector<double> factor = widen<T>(a.factor, a.rank, a.width, true);
  detail::parallel_for(a.rows, 8, [&](std::int64_t begin, std::int64_t end) {
    MaskCursor cursor(a.mask);
    std::vector<double> sums(static_cast<std::size_t>(a.rank));
    for (std::int64_t i = begin; i < end; ++i) {
      std::fill(sums.begin(), sums.end(), 0.0);
      const T* const wide = row<T>(a.wide, i);
      for (std::int64_t c = 0; c < a.width; ++c) {
        const double value = kept(wide[c], a.mask, cursor, i * a.width + c);
        const double* const f = factor.data() + c * a.rank;
        for (std::int64_t k = 0; k < a.rank; ++k) sums[static_cast<std::size_t>(k)] += value * f[k];
      }
      T* const out = row<T>(a.out, i);
      for (std::int64_t k = 0; k < a.rank; ++k) {
        out[k] = convert<T>(a.scale * a.mask.factor * sums[static_cast<std::size_t>(k)]);
      }
    }
  });
}

template <class T, class Out>
void expand(const LoraExpandArguments& a) {
  const std::vector<double> factor = widen<T>(a.factor, a.rank, a.width, false);
  detail::parallel_for(a.rows, 8, [&](std::int64_t begin, std::int64_t end) {
    MaskCursor cursor(a.mask);
    std::vector<double> sums(static_cast<std::size_t>(a.width));
    for (std::int64_t i = begin; i < end; ++i) {
      std::fill(sums.begin(), sums.end(), 0.0);
      const T* const narrow = row<T>(a.narrow, i);
      for (std::int64_t k = 0; k < a.rank; ++k) {
        const auto value = convert<double>(narrow[k]);
        const double* const f = factor.data() + k * a.width;
        for (std::int64_t c = 0; c < a.width; ++c) sums[static_cast<std::size_t>(c)] += value * f[c];
      }
      Out* const out = row<Out>(a.out, i);
      for (std::int64_t c = 0; c < a.width; ++c) {
        double value = kept(a.mask.factor * sums[static_cast<std::size_t>(c)], a.mask, cursor, i * a.width + c);
        if (a.accumulate) value += convert<double>(out[c]);
        out[c] = convert<Out>(value);
      }
    }
  });
}

template <class T>
void reduce(const LoraReduceArguments& a) {
  using Out = std::conditional_t<std::is_same_v<T, double>, double, float>;
  constexpr std::int64_t kColumns = 64;
  detail::parallel_for(a.width, kColumns, [&](std::int64_t begin, std::int64_t end) {
    MaskCursor cursor(a.mask);
    std::vector<double> sums(static_cast<std::size_t>(a.rank * kColumns));
    double wide[kColumns];
    for (std::int64_t i = 0; i < a.rows; ++i) {
      const T *const narrow = row<T>(a.narrow, i), *const values = row<T>(a.wide, i);
      for (std::int64_t c = begin; c < end; ++c) wide[c - begin] = kept(values[c], a.mask, cursor, i * a.width + c);
      for (std::int64_t k = 0; k < a.rank; ++k) {
        const auto factor = convert<double>(narrow[k]);
        double* const sum = sums.data() + k * kColumns;
        for (std::int64_t c = 0; c < end - begin; ++c) sum[c] += factor * wide[c];
      }
    }
    for (std::int64_t k = 0; k < a.rank; ++k) {
      for (std::int64_t c = begin; c < end; ++c) {
        Out& grad = element<Out>(a.grad, k, c);
        const double value = a.mask.factor * sums[static_cast<std::size_t>(k * kColumns + c - begin)];
        grad = convert<Out>(a.accumulate ? convert<double>(grad) + value : value);
      }
    }
  });
}

/// out[:, rank:padded_rank] = 0
template <class T>
void clear_padding(const LoraShrinkArguments& a) {
  for (std::int64_t i = 0; i < a.rows; ++i) std::fill(row<T>(a.out, i) + a.rank, row<T>(a.out, i) + a.padded_rank, T{});
}

}  // namespace

void lora_shrink(const LoraShrinkArguments& a) {
  if (use_gemm(a.dtype, a.mask)) {
    GemmArguments g =
        product(a.rows, a.rank, a.width, operand(a.wide), transposed(operand(a.factor)), a.out.data, a.out.stride);
    g.alpha = a.scale;
    gemm(g);
  }
  detail::dispatch_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (!use_gemm(a.dtype, a.mask)) shrink<T>(a);
    clear_padding<T>(a);
  });
}

void lora_expand(const LoraExpandArguments& a) {
  if (use_gemm(a.dtype, a.mask) && a.out_dtype == DType::kFloat32) {
    GemmArguments g = product(a.rows, a.width, a.rank, operand(a.narrow), operand(a.factor), a.out.data, a.out.stride);
    g.beta = a.accumulate ? 1 : 0;
    return gemm(g);
  }
  detail::dispatch_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, double>) {
      expand<double, double>(a);
    } else {
      switch (a.out_dtype) {
        case DType::kBFloat16:
          return expand<T, BFloat16>(a);
        case DType::kFloat16:
          return expand<T, Float16>(a);
        default:
          return expand<T, float>(a);
      }
    }
  });
}

void lora_reduce(const LoraReduceArguments& a) {
  if (use_gemm(a.dtype, a.mask)) {
    // A transposed gradient is written as the product's transpose.
    GemmArguments g = a.grad.transposed ? product(a.width, a.rank, a.rows, transposed(operand(a.wide)),
                                                  operand(a.narrow), a.grad.data, a.grad.stride)
                                        : product(a.rank, a.width, a.rows, transposed(operand(a.narrow)),
                                                  operand(a.wide), a.grad.data, a.grad.stride);
    g.beta = a.accumulate ? 1 : 0;
    return gemm(g);
  }
  detail::dispatch_floating(a.dtype, [&](auto tag) { reduce<typename decltype(tag)::type>(a); });
}

}  // namespace rowan::cpu
