// Host values into and out of tensors of any dtype and strides.
#pragma once

#include <vector>

#include "rowan/core/tensor.h"

namespace rowan::detail {

/// Writes float64 values in row-major order to a tensor, each rounded once to its dtype.
void write_values_to(const Tensor& target, const std::vector<double>& values, StreamRef stream);

/// The elements of a tensor of a floating dtype in row-major order; synchronizes.
std::vector<double> read_values(const Tensor& source, StreamRef stream);

}  // namespace rowan::detail
