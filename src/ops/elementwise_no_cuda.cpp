// Stands in for elementwise_cuda.cu in a build without CUDA.
#include "ops/elementwise_backend.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

namespace {
[[noreturn]] void unsupported() { throw Error(ErrorKind::kUnsupported, "elementwise: built without CUDA"); }
}  // namespace

void cast(const MatrixRef&, const MatrixRef&, StreamRef) { unsupported(); }
void fill(const MatrixRef&, double, StreamRef) { unsupported(); }
void scale(const MatrixRef&, double, StreamRef) { unsupported(); }
void add(const MatrixRef&, const MatrixRef&, const MatrixRef&, StreamRef) { unsupported(); }
void add_row_vector(const MatrixRef&, const void*, StreamRef) { unsupported(); }
void broadcast_row(const void*, const MatrixRef&, StreamRef) { unsupported(); }
void sum_rows(const MatrixRef&, float*, float*, double, StreamRef) { unsupported(); }
void sum(const MatrixRef&, double*, double*, StreamRef) { unsupported(); }

}  // namespace rowan::cuda
