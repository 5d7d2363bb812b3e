#include "core/cuda_check.h"
#include "ops/head_view.cuh"
#include "ops/rotary_backend.h"
#include "ops/row_reduce.cuh"

namespace rowan::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 4;  // of a block

/// kPack pairs of a head at a time.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) rotary_kernel(RotaryArguments a) {
  const auto half = static_cast<std::int32_t>(a.head_dim / 2), packs = half / kPack;
  const auto items = static_cast<std::int32_t>(a.heads) * packs;  // of a token
  for (std::int64_t first = std::int64_t{blockIdx.x} * kTokens; first < a.tokens;
       first += std::int64_t{gridDim.x} * kTokens) {
    for (auto item = static_cast<std::int32_t>(threadIdx.x); item < kTokens * items; item += kThreads) {
      const std::int64_t token = first + item / items;
      if (token >= a.tokens) break;
      const std::int64_t position = a.positions[token];
      const bool inside = position >= 0 && position < a.table_positions;
      const std::int32_t j = item % packs * kPack;
      const float2* const angles = reinterpret_cast<const float2*>(a.table) + (inside ? position : 0) * half + j;
      T* const x = head_pointer<T>(a.x, token, item % items / packs) + j;
      auto low = load_pack<T, kPack>(x), high = load_pack<T, kPack>(x + half);
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        const float2 angle = inside ? angles[e] : make_float2(__int_as_float(0x7FC00000), 0.0f);
        const float sine = a.inverse ? -angle.y : angle.y;
        const float l = to_float(low.value[e]), h = to_float(high.value[e]);
        low.value[e] = from_float<T>(l * angle.x - h * sine);
        high.value[e] = from_float<T>(h * angle.x + l * sine);
      }
      store_pack<T, kPack>(x, low);
      store_pack<T, kPack>(x + half, high);
    }
  }
}

}  // namespace

void rotary_apply(const RotaryArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  dispatch_device_type(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto kernel = allows_packs<T>(a.head_dim / 2, {&a.x}) ? rotary_kernel<T, kPackOf<T>> : rotary_kernel<T, 1>;
    kernel<<<row_blocks(a.tokens, kTokens), kThreads, 0, to_cuda(stream)>>>(a);
    check_launch("rotary_apply");
  });
}

}  // namespace rowan::cuda
