#include <algorithm>
#include <vector>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/elementwise_backend.h"

namespace rowan::cpu {

namespace {

using detail::convert;

template <class T>
T* at(const MatrixRef& t, std::int64_t row) {
  return static_cast<T*>(t.data) + row * t.row_stride;
}

/// Calls f(row, first column, last column) for pieces of all rows, a fixed number of elements a block.
template <class F>
void for_pieces(std::int64_t rows, std::int64_t cols, const F& f) {
  constexpr std::int64_t kGrain = 32768;
  if (cols >= kGrain) {
    const std::int64_t pieces = (cols + kGrain - 1) / kGrain;
    detail::parallel_for(rows * pieces, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t p = begin; p < end; ++p) {
        const std::int64_t first = p % pieces * kGrain;
        f(p / pieces, first, std::min(cols, first + kGrain));
      }
    });
  } else {
    detail::parallel_for(rows, std::max<std::int64_t>(1, kGrain / cols), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t row = begin; row < end; ++row) f(row, std::int64_t{0}, cols);
    });
  }
}

/// t(i, j) = f(t(i, j), j).
template <class F>
void update(const MatrixRef& t, const F& f) {
  detail::dispatch_floating(t.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_pieces(t.rows, t.cols, [&](std::int64_t row, std::int64_t first, std::int64_t last) {
      T* const values = at<T>(t, row);
      for (std::int64_t j = first; j < last; ++j) values[j * t.col_stride] = f(values[j * t.col_stride], j);
    });
  });
}

}  // namespace

void cast(const MatrixRef& src, const MatrixRef& dst) {
  detail::dispatch_floating(src.dtype, [&](auto from) {
    using From = typename decltype(from)::type;
    detail::dispatch_floating(dst.dtype, [&](auto to) {
      using To = typename decltype(to)::type;
      for_pieces(dst.rows, dst.cols, [&](std::int64_t row, std::int64_t first, std::int64_t last) {
        const From* const in = at<From>(src, row);
        To* const out = at<To>(dst, row);
        for (std::int64_t j = first; j < last; ++j) {
          const From value = in[j * src.col_stride];
          if constexpr (std::is_same_v<From, To>) {
            out[j * dst.col_stride] = value;
          } else {
            out[j * dst.col_stride] = convert<To>(convert<double>(value));
          }
        }
      });
    });
  });
}

void fill(const MatrixRef& t, double value) {
  update(t, [value](auto old, std::int64_t) { return convert<decltype(old)>(value); });
}

void scale(const MatrixRef& t, double factor) {
  update(t, [factor](auto old, std::int64_t) { return convert<decltype(old)>(factor * convert<double>(old)); });
}

void add(const MatrixRef& a, const MatrixRef& b, const MatrixRef& out) {
  detail::dispatch_floating(out.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for_pieces(out.rows, out.cols, [&](std::int64_t row, std::int64_t first, std::int64_t last) {
      const T *const left = at<T>(a, row), *const right = at<T>(b, row);
      T* const result = at<T>(out, row);
      for (std::int64_t j = first; j < last; ++j) {
        result[j * out.col_stride] =
            convert<T>(convert<double>(left[j * a.col_stride]) + convert<double>(right[j * b.col_stride]));
      }
    });
  });
}

void add_row_vector(const MatrixRef& y, const void* vector) {
  update(y, [vector](auto old, std::int64_t j) {
    using T = decltype(old);
    return convert<T>(convert<double>(old) + convert<double>(static_cast<const T*>(vector)[j]));
  });
}

void broadcast_row(const void* vector, const MatrixRef& y) {
  update(y, [vector](auto old, std::int64_t j) { return static_cast<const decltype(old)*>(vector)[j]; });
}

void sum_rows(const MatrixRef& x, void* out, double beta) {
  detail::dispatch_floating(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    using Out = std::conditional_t<std::is_same_v<T, double>, double, float>;
    Out* const result = static_cast<Out*>(out);
    constexpr std::int64_t kColumns = 64;
    detail::parallel_for(x.cols, kColumns, [&](std::int64_t first, std::int64_t last) {
      double sums[kColumns] = {};
      for (std::int64_t i = 0; i < x.rows; ++i) {
        const T* const row = at<T>(x, i);
        for (std::int64_t j = first; j < last; ++j) sums[j - first] += convert<double>(row[j * x.col_stride]);
      }
      for (std::int64_t j = first; j < last; ++j) {
        const double old = beta == 0 ? 0.0 : beta * convert<double>(result[j]);
        result[j] = convert<Out>(old + sums[j - first]);
      }
    });
  });
}

void sum(const MatrixRef& x, double* partial, double* out) {
  const std::int64_t elements = x.rows * x.cols;
  detail::dispatch_floating(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    detail::parallel_for(sum_chunks(elements), 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t chunk = begin; chunk < end; ++chunk) {
        double total = 0;
        for (std::int64_t i = chunk * kSumChunk; i < std::min(elements, (chunk + 1) * kSumChunk); ++i) {
          total += convert<double>(at<T>(x, i / x.cols)[i % x.cols * x.col_stride]);
        }
        partial[chunk] = total;
      }
    });
  });
  double total = 0;
  for (std::int64_t chunk = 0; chunk < sum_chunks(elements); ++chunk) total += partial[chunk];
  *out = total;
}

}  // namespace rowan::cpu
