// Operations that treat every element alike, and sums.
//
// "Any matrix" below: contiguous of any rank, or such that all dimensions but the last step evenly through memory
// (every tensor of rank up to two does), with any column stride. Floating dtypes only; arithmetic in float32 (float64
// on the CPU), one rounding to the output's dtype. All throw InvalidArgument when shapes, dtypes, strides or devices do
// not fit, and take tensors without elements.
#pragma once

#include "rowan/core/tensor.h"

namespace rowan {

/// dst = src in dst's dtype, rounded to nearest even once; NaN and infinities stay. Equal shapes, any matrix, any two
/// floating dtypes (on CUDA not float64). Writes dst, which must not share memory with src.
void cast(const Tensor& src, Tensor& dst, StreamRef stream);

/// Every element of t becomes `value`, rounded to its dtype. Any matrix. Writes t.
void fill(Tensor& t, double value, StreamRef stream);

/// t = factor t. Any matrix. factor = 0 stores zeros without reading t. Writes t.
void scale(Tensor& t, double factor, StreamRef stream);

/// out = a + b. Equal shapes and dtypes, any matrix. Writes out, which may be a or b itself (the same view) but not
/// overlap them otherwise.
void add(const Tensor& a, const Tensor& b, Tensor& out, StreamRef stream);

/// y[i, j] += vector[j]. y [M, N] any matrix of rank 2, vector [N] contiguous, one dtype. Writes y.
void add_row_vector(Tensor& y, const Tensor& vector, StreamRef stream);

/// y[i, j] = vector[j]. y [M, N] any matrix of rank 2, vector [N] contiguous, one dtype. A product with beta = 1 on top
/// of it adds a bias with one rounding. Writes y.
void broadcast_row(const Tensor& vector, Tensor& y, StreamRef stream);

/// out[j] = sum_i x[i, j] + beta out[j] (the gradient of a bias). x [M, N] any matrix of rank 2; out [N] contiguous,
/// float32 (float64 when x is). Sums are taken in an order that depends on the shape alone. beta = 0 does not read out.
/// Writes out.
void sum_rows(const Tensor& x, Tensor& out, StreamRef stream, double beta = 0);

/// out[0] = sum of all elements of x in float64, in an order that depends on the shape alone. x any matrix; out float64
/// [1] on x's device. Writes out.
void sum(const Tensor& x, Tensor& out, StreamRef stream);

}  // namespace rowan
