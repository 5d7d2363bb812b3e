// Copies between arrays of any strides on one device.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/cuda_check.h"
#include "core/runtime.h"

namespace rowan::cuda {

namespace {

constexpr int kThreads = 256;

template <class Word>
__global__ void copy_kernel(StridedCopy copy, std::int64_t elements) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += step) {
    std::int64_t rest = i, to = 0, from = 0;
    for (int d = copy.rank - 1; d >= 0; --d) {
      const std::int64_t index = rest % copy.extents[d];
      rest /= copy.extents[d];
      to += index * copy.destination_strides[d];
      from += index * copy.source_strides[d];
    }
    static_cast<Word*>(copy.destination)[to] = copy.source ? static_cast<const Word*>(copy.source)[from] : Word(0);
  }
}

}  // namespace

void copy_strided(const StridedCopy& copy, StreamRef stream) {
  std::int64_t elements = 1;
  for (int d = 0; d < copy.rank; ++d) elements *= copy.extents[static_cast<std::size_t>(d)];
  if (elements == 0) return;
  const DeviceGuard guard(stream.device());
  const std::int64_t wanted = (elements + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(std::min<std::int64_t>(wanted, 32 * multiprocessor_count(stream.device())));
  const cudaStream_t handle = to_cuda(stream);
  switch (copy.element_size) {
    case 2:
      copy_kernel<std::uint16_t><<<blocks, kThreads, 0, handle>>>(copy, elements);
      break;
    case 4:
      copy_kernel<std::uint32_t><<<blocks, kThreads, 0, handle>>>(copy, elements);
      break;
    default:
      copy_kernel<std::uint64_t><<<blocks, kThreads, 0, handle>>>(copy, elements);
      break;
  }
  check_launch("copy");
}

void probe_kernels(Device device) {
  const DeviceGuard guard(device);
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, copy_kernel<std::uint32_t>), "probe");
}

}  // namespace rowan::cuda
