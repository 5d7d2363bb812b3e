#include <algorithm>

#include "core/dispatch.h"
#include "core/parallel.h"
#include "ops/cpu_rows.h"
#include "ops/float_exp.h"
#include "ops/swiglu_backend.h"

namespace rowan::cpu {

namespace {

using namespace detail;

// Rows are worked on in pieces that are copied to local arrays: outputs may be inputs, and loops over possibly equal
// addresses do not vectorise.
constexpr std::int64_t kPiece = 256;
constexpr std::int64_t kRowsPerTask = 32;

template <class T>
T* row_of(const SwigluMatrix& m, std::int64_t row) {
  return static_cast<T*>(m.data) + row * m.stride;
}

/// Calls f(row, first column, columns) for every piece.
template <class F>
void for_pieces(const SwigluArguments& a, F&& f) {
  parallel_for(a.rows, kRowsPerTask, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      for (std::int64_t column = 0; column < a.width; column += kPiece)
        f(row, column, std::min(kPiece, a.width - column));
    }
  });
}

template <class T>
void forward(const SwigluArguments& a) {
  using C = ComputeType<T>;
  for_pieces(a, [&](std::int64_t row, std::int64_t column, std::int64_t n) {
    C gate[kPiece], up[kPiece];
    convert_row(row_of<T>(a.gate, row) + column, gate, n);
    convert_row(row_of<T>(a.up, row) + column, up, n);
    for (std::int64_t j = 0; j < n; ++j) up[j] *= gate[j] / (C{1} + exponential(-gate[j]));
    convert_row(up, row_of<T>(a.out, row) + column, n);
  });
}

template <class T>
void backward(const SwigluArguments& a) {
  using C = ComputeType<T>;
  for_pieces(a, [&](std::int64_t row, std::int64_t column, std::int64_t n) {
    C gate[kPiece], up[kPiece], dout[kPiece];
    convert_row(row_of<T>(a.gate, row) + column, gate, n);
    convert_row(row_of<T>(a.up, row) + column, up, n);
    convert_row(row_of<T>(a.dout, row) + column, dout, n);
    for (std::int64_t j = 0; j < n; ++j) {
      const C p = C{1} / (C{1} + exponential(-gate[j]));
      const C dgate = dout[j] * up[j] * p * (C{1} + gate[j] * (C{1} - p));
      up[j] = dout[j] * gate[j] * p;
      gate[j] = dgate;
    }
    convert_row(gate, row_of<T>(a.dgate, row) + column, n);
    convert_row(up, row_of<T>(a.dup, row) + column, n);
  });
}

}  // namespace

void swiglu_forward(const SwigluArguments& a) {
  detail::dispatch_floating(a.dtype, [&](auto tag) { forward<typename decltype(tag)::type>(a); });
}

void swiglu_backward(const SwigluArguments& a) {
  detail::dispatch_floating(a.dtype, [&](auto tag) { backward<typename decltype(tag)::type>(a); });
}

}  // namespace rowan::cpu
