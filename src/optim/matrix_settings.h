// What Muown and Muon take from a parameter group, and how their matrices are cut.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "rowan/ops/muown.h"
#include "rowan/optim/parameter_group.h"

namespace rowan::detail {

inline std::int64_t output_neurons(const Tensor& weight, MatrixLayout layout) {
  return weight.size(layout == MatrixLayout::kOutIn ? -2 : -1);
}
inline std::int64_t columns(const Tensor& weight, MatrixLayout layout) {
  return weight.size(layout == MatrixLayout::kOutIn ? -1 : -2);
}

/// Output neurons [begin, begin + rows) of a matrix, or of each matrix of a stack.
inline Tensor rows_of(const Tensor& t, MatrixLayout layout, std::int64_t begin, std::int64_t rows) {
  return t.slice(layout == MatrixLayout::kOutIn ? -2 : -1, begin, begin + rows);
}

inline DType dtype_of_update(const ParameterGroup& group, DType master) {
  if (group.update_dtype) return *group.update_dtype;
  const NewtonSchulzPath path = group.newton_schulz.path;
  const bool exact = path == NewtonSchulzPath::kSvd || path == NewtonSchulzPath::kGramFp32;
  return exact ? master : DType::kBFloat16;
}

inline MuownOptions muown_options(const ParameterGroup& group, MatrixLayout layout, std::vector<RowBlock> blocks) {
  MuownOptions options;
  options.layout = layout;
  options.momentum = group.momentum;
  options.nesterov = group.nesterov;
  options.beta1 = group.beta1;
  options.beta2 = group.beta2;
  options.epsilon = group.epsilon;
  options.cold_rows = group.cold_rows;
  options.direction = group.direction;
  options.angular_warmup = group.angular_warmup;
  options.update_scale = group.update_scale;
  options.magnitude_lr = group.magnitude_lr;
  options.row_blocks = std::move(blocks);
  return options;
}

}  // namespace rowan::detail
