#include <algorithm>

#include "core/cuda_check.h"
#include "ops/device_types.cuh"
#include "ops/dropout_backend.h"

namespace rowan::cuda {

namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kRun = 4;  ///< elements a thread treats: those of one Philox block where the row allows it

template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(MatrixRef x, MaskArguments mask, MatrixRef y, std::int64_t runs_per_row) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const MaskWords words(mask);
  const auto factor = static_cast<float>(mask.factor);
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < x.rows * runs_per_row;
       i += step) {
    const std::int64_t row = i / runs_per_row, first = i % runs_per_row * kRun;
    const T* const in = static_cast<const T*>(x.data) + row * x.row_stride;
    T* const out = static_cast<T*>(y.data) + row * y.row_stride;
    const std::int64_t last = min(first + kRun, x.cols);
    const auto count = static_cast<int>(last - first);
    const unsigned bits = mask.active ? words.keep_bits(static_cast<std::uint64_t>(row * x.cols + first), count) : ~0u;
    for (int e = 0; e < count; ++e) {
      out[first + e] = from_float<T>((bits >> e & 1u) != 0 ? factor * to_float(in[first + e]) : 0.0f);
    }
  }
}

}  // namespace

void dropout(const MatrixRef& x, const MaskArguments& mask, const MatrixRef& y, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  const std::int64_t runs_per_row = (x.cols + kRun - 1) / kRun;
  const std::int64_t wanted = (x.rows * runs_per_row + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(wanted, 32 * multiprocessor_count(stream.device())));
  dispatch_device_type(x.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dropout_kernel<T><<<blocks, kThreads, 0, to_cuda(stream)>>>(x, mask, y, runs_per_row);
  });
  check_launch("dropout");
}

}  // namespace rowan::cuda
