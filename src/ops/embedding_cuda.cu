#include <algorithm>
#include <cub/device/device_radix_sort.cuh>

#include "core/cuda_check.h"
#include "ops/embedding_backend.h"
#include "ops/head_view.cuh"
#include "ops/row_reduce.cuh"

namespace rowan::cuda {

namespace {

constexpr int kThreads = 128;

/// The id of a token, or -1 when it lies outside the table.
__device__ std::int64_t id_of(const EmbeddingArguments& a, std::int64_t token) {
  const std::int64_t id = a.id_dtype == DType::kInt32 ? static_cast<const std::int32_t*>(a.ids)[token]
                                                      : static_cast<const std::int64_t*>(a.ids)[token];
  return id >= 0 && id < a.vocabulary ? id : -1;
}

/// One token a block.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) forward_kernel(EmbeddingArguments a) {
  for (std::int64_t token = blockIdx.x; token < a.tokens; token += gridDim.x) {
    const std::int64_t id = id_of(a, token);
    const T* const source = static_cast<const T*>(a.table) + (id < 0 ? 0 : id) * a.table_stride;
    T* const y = static_cast<T*>(a.rows) + token * a.rows_stride;
    for (std::int64_t j = threadIdx.x * kPack; j < a.width; j += kThreads * kPack) {
      Pack<T, kPack> out;
      if (id >= 0) {
        out = load_pack<T, kPack>(source + j);
      } else {
#pragma unroll
        for (int i = 0; i < kPack; ++i) out.value[i] = from_float<T>(__int_as_float(0x7FC00000));
      }
      store_pack<T, kPack>(y + j, out);
    }
  }
}

__global__ void __launch_bounds__(kThreads) key_kernel(EmbeddingArguments a, std::int32_t* keys, std::int32_t* tokens) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= a.tokens) return;
  const std::int64_t id = id_of(a, i);
  keys[i] = static_cast<std::int32_t>(id < 0 ? a.vocabulary : id);  // what is ignored sorts last
  tokens[i] = static_cast<std::int32_t>(i);
}

/// One position of the sorted keys a block; the first of each run of equal ids sums the whole run, in token order.
template <class T>
__global__ void __launch_bounds__(kThreads)
    run_kernel(EmbeddingArguments a, const std::int32_t* keys, const std::int32_t* tokens) {
  for (std::int64_t first = blockIdx.x; first < a.tokens; first += gridDim.x) {
    const std::int32_t id = keys[first];
    if (id == a.vocabulary || (first > 0 && keys[first - 1] == id)) continue;
    float* const target = static_cast<float*>(a.table) + id * a.table_stride;
    for (std::int64_t j = threadIdx.x; j < a.width; j += kThreads) {
      float sum = 0;
      for (std::int64_t i = first; i < a.tokens && keys[i] == id; ++i) {
        sum += to_float(static_cast<const T*>(a.rows)[tokens[i] * a.rows_stride + j]);
      }
      target[j] += sum;
    }
  }
}

/// Where things lie in the workspace of embedding_backward.
struct Layout {
  std::size_t array_bytes = 0;  // of each of the four arrays of int32
  std::size_t sort_bytes = 0;
  int key_bits = 0;
};

Layout layout_of(const EmbeddingArguments& a) {
  Layout layout;
  layout.array_bytes = (static_cast<std::size_t>(a.tokens) * sizeof(std::int32_t) + 255) / 256 * 256;
  while (layout.key_bits < 31 && a.vocabulary >> layout.key_bits != 0)
    ++layout.key_bits;  // the largest key: vocabulary
  const auto* const keys = static_cast<const std::int32_t*>(nullptr);
  auto* const sorted = static_cast<std::int32_t*>(nullptr);
  check(cub::DeviceRadixSort::SortPairs(nullptr, layout.sort_bytes, keys, sorted, keys, sorted, a.tokens, 0,
                                        layout.key_bits),
        "embedding_backward");
  return layout;
}

}  // namespace

void embedding_forward(const EmbeddingArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  dispatch_device_type(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kPack = kPackOf<T>;
    const unsigned blocks = row_blocks(a.tokens, 1);
    if (a.width % kPack == 0 && allows_packs<T>(a.table, {a.table_stride}) &&
        allows_packs<T>(a.rows, {a.rows_stride})) {
      forward_kernel<T, kPack><<<blocks, kThreads, 0, to_cuda(stream)>>>(a);
    } else {
      forward_kernel<T, 1><<<blocks, kThreads, 0, to_cuda(stream)>>>(a);
    }
    check_launch("embedding_forward");
  });
}

std::size_t embedding_backward_workspace(const EmbeddingArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  const Layout layout = layout_of(a);
  return 4 * layout.array_bytes + layout.sort_bytes;
}

void embedding_backward(const EmbeddingArguments& a, void* workspace, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  Layout layout = layout_of(a);
  auto* const bytes = static_cast<char*>(workspace);
  const auto array = [&](std::size_t i) { return reinterpret_cast<std::int32_t*>(bytes + i * layout.array_bytes); };
  std::int32_t *const keys = array(0), *const tokens = array(1), *const sorted_keys = array(2),
                      *const sorted = array(3);
  const auto blocks = static_cast<unsigned>((a.tokens + kThreads - 1) / kThreads);
  key_kernel<<<blocks, kThreads, 0, to_cuda(stream)>>>(a, keys, tokens);
  check_launch("embedding_backward");
  // Radix sort is stable: tokens of one id stay in ascending order.
  check(cub::DeviceRadixSort::SortPairs(bytes + 4 * layout.array_bytes, layout.sort_bytes, keys, sorted_keys, tokens,
                                        sorted, a.tokens, 0, layout.key_bits, to_cuda(stream)),
        "embedding_backward");
  dispatch_device_type(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    run_kernel<T><<<row_blocks(a.tokens, 1), kThreads, 0, to_cuda(stream)>>>(a, sorted_keys, sorted);
    check_launch("embedding_backward");
  });
}

}  // namespace rowan::cuda
