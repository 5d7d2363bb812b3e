#include "core/parallel.h"
#include "ops/row_runs.h"
#include "ops/step_control_backend.h"
#include "ops/step_control_math.h"

namespace rowan::cpu {

namespace {

template <class T>
double square_sum(const SquareSumPiece& piece, std::int64_t begin, std::int64_t end) {
  double sum = 0;
  detail::for_each_run(begin, end, piece.cols,
                       [&](std::int64_t, std::int64_t row, std::int64_t col, std::int64_t count) {
                         const T* const g = static_cast<const T*>(piece.gradient) + row * piece.stride + col;
                         for (std::int64_t i = 0; i < count; ++i)
                           sum += static_cast<double>(g[i]) * static_cast<double>(g[i]);
                       });
  return sum;
}

}  // namespace

void grad_square_sum(const SquareSumArguments& a) {
  detail::parallel_for(a.piece_count, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t p = first; p < last; ++p) {
      const SquareSumPiece& piece = a.pieces[p];
      std::int64_t chunk = piece.first_chunk;
      for (std::int64_t begin = 0; begin < piece.elements; begin += kSquareSumChunk, ++chunk) {
        const std::int64_t end = std::min(begin + kSquareSumChunk, piece.elements);
        if (piece.active && *piece.active == 0) {
          a.partial[chunk] = 0;
        } else {
          a.partial[chunk] =
              a.dtype == DType::kFloat64 ? square_sum<double>(piece, begin, end) : square_sum<float>(piece, begin, end);
        }
      }
    }
  });
  double sum = a.accumulate ? a.control[StepControl::kSquareSum] : 0.0;
  for (std::int64_t c = 0; c < a.chunks; ++c) sum += a.partial[c];
  a.control[StepControl::kSquareSum] = sum;
}

void finish_step_control(double* control, double max_norm) { detail::finish_step_control(control, max_norm); }

void count_skipped_step(double* control) { detail::count_skipped_step(control); }

void advance_steps(const AdvanceArguments& a) {
  for (std::int64_t p = 0; p < a.count; ++p)
    detail::advance_step(a.control, a.active[p] != 0, a.steps + p, a.controls + 4 * p);
}

}  // namespace rowan::cpu
