// Rows of a table picked by token ids.
#pragma once

#include "rowan/core/tensor.h"

namespace rowan {

/// y[i, :] = table[ids[i], :].
/// ids int32 or int64 [M], contiguous; table [V, H] and y [M, H] of one floating dtype, unit column stride, any row
/// stride. Writes y. An id outside [0, V): on the CPU InvalidArgument naming it (y untouched); on CUDA, where ids are
/// only known on the device, that row of y becomes NaN. Throws InvalidArgument when shapes, dtypes, strides or devices
/// do not fit.
void embedding_forward(const Tensor& ids, const Tensor& table, Tensor& y, StreamRef stream);

/// dtable[ids[i], :] += dy[i, :], the rows of one id summed in ascending i (no atomics: same bits every time).
/// ids as above; dy [M, H] of a floating dtype, unit column stride; dtable float32 [V, H] (float64 when dy is), unit
/// column stride. Rows of dtable that no id names are not touched. An id outside [0, V): on the CPU InvalidArgument
/// (dtable untouched); on CUDA that row of dy is ignored. Throws InvalidArgument when shapes, dtypes, strides or
/// devices do not fit.
void embedding_backward(const Tensor& ids, const Tensor& dy, Tensor& dtable, StreamRef stream);

}  // namespace rowan
