#include <cmath>

#include "core/parallel.h"
#include "ops/adamw_backend.h"
#include "ops/row_runs.h"
#include "rowan/core/half.h"
#include "rowan/ops/step_control.h"

namespace rowan::cpu {

namespace {

/// The scalars of one parameter's step.
struct Coefficients {
  explicit Coefficients(const AdamwPiece& piece) {
    const double lr = piece.rates[0];
    const auto t = static_cast<double>(*piece.step);
    factor = piece.control ? piece.control[StepControl::kFactor] : 1.0;
    decay = lr * piece.rates[1];
    step_size = lr / (1.0 - std::pow(piece.beta1, t));
    root = std::sqrt(1.0 - std::pow(piece.beta2, t));
  }
  double factor, decay, step_size, root;
};

template <class T>
void step_chunk(const AdamwPiece& piece, const Coefficients& c, std::int64_t begin, std::int64_t end) {
  detail::for_each_run(
      begin, end, piece.cols, [&](std::int64_t first, std::int64_t row, std::int64_t col, std::int64_t count) {
        T* const master = static_cast<T*>(piece.master) + row * piece.master_stride + col;
        const T* const gradient = static_cast<const T*>(piece.gradient) + row * piece.gradient_stride + col;
        T* const m = static_cast<T*>(piece.first_moment) + first;
        T* const v = static_cast<T*>(piece.second_moment) + first;
        for (std::int64_t i = 0; i < count; ++i) {
          const double g = c.factor * static_cast<double>(gradient[i]);
          const double p = static_cast<double>(master[i]);
          const double new_m = piece.beta1 * static_cast<double>(m[i]) + (1.0 - piece.beta1) * g;
          const double new_v = piece.beta2 * static_cast<double>(v[i]) + (1.0 - piece.beta2) * g * g;
          m[i] = static_cast<T>(new_m);
          v[i] = static_cast<T>(new_v);
          master[i] =
              static_cast<T>(p - (c.decay * p + c.step_size * new_m / (std::sqrt(new_v) / c.root + piece.epsilon)));
        }
        if (piece.value == nullptr) return;
        const std::int64_t offset = row * piece.value_stride + col;
        for (std::int64_t i = 0; i < count; ++i) {
          if (piece.value_is_bfloat16) {
            static_cast<BFloat16*>(piece.value)[offset + i] = BFloat16(master[i]);
          } else {
            static_cast<Float16*>(piece.value)[offset + i] = Float16(master[i]);
          }
        }
      });
}

/// Index of the piece that holds a chunk (see piece_search.cuh).
std::int64_t find_piece(const AdamwBatchArguments& a, std::int64_t chunk) {
  const auto* const after =
      std::upper_bound(a.pieces, a.pieces + a.piece_count, chunk,
                       [](std::int64_t c, const AdamwPiece& piece) { return c < piece.first_chunk; });
  return after - a.pieces - 1;
}

}  // namespace

void adamw(const AdamwBatchArguments& a) {
  detail::parallel_for(a.chunks, 8, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      const AdamwPiece& piece = a.pieces[find_piece(a, chunk)];
      if (piece.control && piece.control[StepControl::kSkip] != 0) continue;
      const Coefficients coefficients(piece);
      const std::int64_t begin = (chunk - piece.first_chunk) * kAdamwChunk;
      const std::int64_t end = std::min(begin + kAdamwChunk, piece.elements);
      if (a.dtype == DType::kFloat64) {
        step_chunk<double>(piece, coefficients, begin, end);
      } else {
        step_chunk<float>(piece, coefficients, begin, end);
      }
    }
  });
}

}  // namespace rowan::cpu
