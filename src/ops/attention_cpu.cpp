#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/attention_backend.h"
#include "ops/blas.h"
#include "ops/cpu_rows.h"
#include "ops/float_exp.h"

namespace rowan::cpu {

namespace {

using namespace detail;

/// One sequence's rows of one head.
struct Sequence {
  std::int64_t begin = 0;
  std::int64_t length = 0;
};

/// Calls f(sequence, head) for every pair.
template <class F>
void for_heads(const AttentionArguments& a, std::int64_t heads, F&& f) {
  parallel_for(a.sequences * heads, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t s = i / heads;
      const Sequence sequence{a.starts[s], std::int64_t{a.starts[s + 1]} - a.starts[s]};
      if (sequence.length > 0) f(sequence, i % heads);
    }
  });
}

/// The maximum to subtract: where every score is -infinity, 0 keeps the exponentials 0 instead of NaN.
template <class C>
C finite_maximum(C maximum) {
  return maximum == -std::numeric_limits<C>::infinity() ? C{0} : maximum;
}

// float64: the definition, term by term.

double dot(const double* a, const double* b, std::int64_t n) {
  double sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void forward_plain(const AttentionArguments& a) {
  const std::int64_t group = a.query_heads / a.key_heads;
  for_heads(a, a.query_heads, [&](Sequence sequence, std::int64_t head) {
    std::vector<double> weights(static_cast<std::size_t>(sequence.length));
    for (std::int64_t i = 0; i < sequence.length; ++i) {
      const std::int64_t row = sequence.begin + i;
      for (std::int64_t j = 0; j <= i; ++j) {
        weights[static_cast<std::size_t>(j)] =
            a.scale * dot(a.q.at<double>(row, head), a.k.at<double>(sequence.begin + j, head / group), a.head_dim);
      }
      const double maximum = finite_maximum(lane_max(i + 1, weights.data()));
      double sum = 0;
      double* const out = a.out.at_mutable<double>(row, head);
      std::fill(out, out + a.head_dim, 0.0);
      for (std::int64_t j = 0; j <= i; ++j) {
        const double weight = std::exp(weights[static_cast<std::size_t>(j)] - maximum);
        const double* const v = a.v.at<double>(sequence.begin + j, head / group);
        sum += weight;
        for (std::int64_t c = 0; c < a.head_dim; ++c) out[c] += weight * v[c];
      }
      for (std::int64_t c = 0; c < a.head_dim; ++c) out[c] /= sum;
      static_cast<double*>(a.lse)[head * a.tokens + row] = maximum + std::log(sum);
    }
  });
}

void backward_plain(const AttentionArguments& a) {
  const std::int64_t group = a.query_heads / a.key_heads, d = a.head_dim;
  for_heads(a, a.key_heads, [&](Sequence sequence, std::int64_t key_head) {
    for (std::int64_t j = 0; j < sequence.length; ++j) {
      std::fill_n(a.dk.at_mutable<double>(sequence.begin + j, key_head), d, 0.0);
      std::fill_n(a.dv.at_mutable<double>(sequence.begin + j, key_head), d, 0.0);
    }
    for (std::int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
      for (std::int64_t i = 0; i < sequence.length; ++i) {
        const std::int64_t row = sequence.begin + i;
        const double* const q = a.q.at<double>(row, head);
        const double* const dout = a.dout.at<double>(row, head);
        double* const dq = a.dq.at_mutable<double>(row, head);
        const double lse = static_cast<const double*>(a.lse)[head * a.tokens + row];
        const double delta = dot(dout, a.out.at<double>(row, head), d);
        std::fill_n(dq, d, 0.0);
        for (std::int64_t j = 0; j <= i; ++j) {
          const std::int64_t column = sequence.begin + j;
          const double* const k = a.k.at<double>(column, key_head);
          double* const dk = a.dk.at_mutable<double>(column, key_head);
          double* const dv = a.dv.at_mutable<double>(column, key_head);
          const double weight = std::exp(a.scale * dot(q, k, d) - lse);
          const double dscore = a.scale * weight * (dot(dout, a.v.at<double>(column, key_head), d) - delta);
          for (std::int64_t c = 0; c < d; ++c) {
            dv[c] += weight * dout[c];
            dk[c] += dscore * q[c];
            dq[c] += dscore * k[c];
          }
        }
      }
    }
  });
}

// float32 and 16-bit: blocks of query rows against all keys they see, as matrix products in float32.

constexpr std::int64_t kBlock = 64;

using Buffer = std::vector<float>;

Buffer buffer(std::int64_t rows, std::int64_t columns) { return Buffer(static_cast<std::size_t>(rows * columns)); }

template <class T>
void load(const HeadView& view, Sequence sequence, std::int64_t head, std::int64_t d, Buffer& to) {
  for (std::int64_t i = 0; i < sequence.length; ++i)
    convert_row(view.at<T>(sequence.begin + i, head), to.data() + i * d, d);
}

template <class T>
void store(const Buffer& from, const HeadView& view, Sequence sequence, std::int64_t head, std::int64_t d) {
  for (std::int64_t i = 0; i < sequence.length; ++i)
    convert_row(from.data() + i * d, view.at_mutable<T>(sequence.begin + i, head), d);
}

/// Weights and score gradients meet the next product in the tensor's dtype, as on CUDA.
template <class T>
void round_row(float* row, std::int64_t n) {
  if constexpr (!std::is_same_v<T, float>) {
    for (std::int64_t j = 0; j < n; ++j) row[j] = convert<float>(convert<T>(row[j]));
  }
}

template <class T>
void forward_blocked(const AttentionArguments& a) {
  const std::int64_t group = a.query_heads / a.key_heads, d = a.head_dim;
  const auto scale = static_cast<float>(a.scale);
  for_heads(a, a.query_heads, [&](Sequence sequence, std::int64_t head) {
    const std::int64_t length = sequence.length;
    Buffer q = buffer(length, d), k = buffer(length, d), v = buffer(length, d), out = buffer(length, d);
    Buffer scores = buffer(std::min(kBlock, length), length);
    load<T>(a.q, sequence, head, d, q);
    load<T>(a.k, sequence, head / group, d, k);
    load<T>(a.v, sequence, head / group, d, v);
    float* const lse = static_cast<float*>(a.lse) + head * a.tokens + sequence.begin;
    for (std::int64_t first = 0; first < length; first += kBlock) {
      const std::int64_t rows = std::min(kBlock, length - first), columns = first + rows;
      sgemm(false, true, rows, columns, d, scale, q.data() + first * d, d, k.data(), d, 0, scores.data(), columns);
      double inverse_sums[kBlock];
      for (std::int64_t i = 0; i < rows; ++i) {
        float* const row = scores.data() + i * columns;
        const std::int64_t visible = first + i + 1;
        const float maximum = finite_maximum(lane_max(visible, row));
        for (std::int64_t j = 0; j < visible; ++j) row[j] = exponential(row[j] - maximum);
        const double sum = lane_sum(visible, [&](std::int64_t j) { return row[j]; });
        std::fill(row + visible, row + columns, 0.0f);
        round_row<T>(row, visible);
        inverse_sums[i] = 1.0 / sum;
        lse[first + i] = static_cast<float>(static_cast<double>(maximum) + std::log(sum));
      }
      sgemm(false, false, rows, d, columns, 1, scores.data(), columns, v.data(), d, 0, out.data() + first * d, d);
      for (std::int64_t i = 0; i < rows; ++i) {
        const auto factor = static_cast<float>(inverse_sums[i]);
        for (std::int64_t c = 0; c < d; ++c) out[static_cast<std::size_t>((first + i) * d + c)] *= factor;
      }
    }
    store<T>(out, a.out, sequence, head, d);
  });
}

template <class T>
void backward_blocked(const AttentionArguments& a) {
  const std::int64_t group = a.query_heads / a.key_heads, d = a.head_dim;
  const auto scale = static_cast<float>(a.scale);
  for_heads(a, a.key_heads, [&](Sequence sequence, std::int64_t key_head) {
    const std::int64_t length = sequence.length;
    Buffer q = buffer(length, d), k = buffer(length, d), v = buffer(length, d), out = buffer(length, d),
           dout = buffer(length, d);
    Buffer dq = buffer(length, d), dk = buffer(length, d), dv = buffer(length, d);
    Buffer weights = buffer(std::min(kBlock, length), length), dscores = weights;
    load<T>(a.k, sequence, key_head, d, k);
    load<T>(a.v, sequence, key_head, d, v);
    for (std::int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
      load<T>(a.q, sequence, head, d, q);
      load<T>(a.out, sequence, head, d, out);
      load<T>(a.dout, sequence, head, d, dout);
      const float* const lse = static_cast<const float*>(a.lse) + head * a.tokens + sequence.begin;
      for (std::int64_t first = 0; first < length; first += kBlock) {
        const std::int64_t rows = std::min(kBlock, length - first), columns = first + rows;
        const float* const q_block = q.data() + first * d;
        const float* const dout_block = dout.data() + first * d;
        sgemm(false, true, rows, columns, d, scale, q_block, d, k.data(), d, 0, weights.data(), columns);
        sgemm(false, true, rows, columns, d, 1, dout_block, d, v.data(), d, 0, dscores.data(), columns);
        for (std::int64_t i = 0; i < rows; ++i) {
          float* const weight = weights.data() + i * columns;
          float* const dscore = dscores.data() + i * columns;
          const float* const out_row = out.data() + (first + i) * d;
          const float* const dout_row = dout_block + i * d;
          const std::int64_t visible = first + i + 1;
          const auto delta = static_cast<float>(lane_sum(
              d, [&](std::int64_t c) { return static_cast<double>(dout_row[c]) * static_cast<double>(out_row[c]); }));
          const float row_lse = lse[first + i];
          for (std::int64_t j = 0; j < visible; ++j) weight[j] = exponential(weight[j] - row_lse);
          for (std::int64_t j = 0; j < visible; ++j) dscore[j] = weight[j] * (dscore[j] - delta);
          std::fill(weight + visible, weight + columns, 0.0f);
          std::fill(dscore + visible, dscore + columns, 0.0f);
          round_row<T>(weight, visible);
          round_row<T>(dscore, visible);
        }
        sgemm(true, false, columns, d, rows, 1, weights.data(), columns, dout_block, d, 1, dv.data(), d);
        sgemm(true, false, columns, d, rows, scale, dscores.data(), columns, q_block, d, 1, dk.data(), d);
        sgemm(false, false, rows, d, columns, scale, dscores.data(), columns, k.data(), d, 0, dq.data() + first * d, d);
      }
      store<T>(dq, a.dq, sequence, head, d);
    }
    store<T>(dk, a.dk, sequence, key_head, d);
    store<T>(dv, a.dv, sequence, key_head, d);
  });
}

}  // namespace

void attention_forward(const AttentionArguments& a) {
  detail::dispatch_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, double>) {
      forward_plain(a);
    } else {
      forward_blocked<T>(a);
    }
  });
}

void attention_backward(const AttentionArguments& a) {
  detail::dispatch_floating(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (std::is_same_v<T, double>) {
      backward_plain(a);
    } else {
      backward_blocked<T>(a);
    }
  });
}

}  // namespace rowan::cpu
