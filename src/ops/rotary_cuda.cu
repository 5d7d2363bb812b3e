#include "core/cuda_check.h"
#include "ops/head_view.cuh"
#include "ops/rotary_backend.h"
#include "ops/row_reduce.cuh"

namespace rowan::cuda {

namespace {

constexpr int kThreads = 128;

/// One token a block: its pairs over all heads.
template <class T>
__global__ void __launch_bounds__(kThreads) rotary_kernel(RotaryArguments a) {
  const auto half = static_cast<std::int32_t>(a.head_dim / 2);
  const auto pairs = static_cast<std::int32_t>(a.heads) * half;
  for (std::int64_t token = blockIdx.x; token < a.tokens; token += gridDim.x) {
    const std::int64_t position = a.positions[token];
    const bool inside = position >= 0 && position < a.table_positions;
    const float2* const angles = reinterpret_cast<const float2*>(a.table) + (inside ? position : 0) * half;
    for (auto pair = static_cast<std::int32_t>(threadIdx.x); pair < pairs; pair += kThreads) {
      T* const x = head_pointer<T>(a.x, token, pair / half);
      const std::int32_t j = pair % half;
      const float2 angle = inside ? angles[j] : make_float2(__int_as_float(0x7FC00000), 0.0f);
      const float sine = a.inverse ? -angle.y : angle.y;
      const float low = to_float(x[j]), high = to_float(x[j + half]);
      x[j] = from_float<T>(low * angle.x - high * sine);
      x[j + half] = from_float<T>(high * angle.x + low * sine);
    }
  }
}

}  // namespace

void rotary_apply(const RotaryArguments& a, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  dispatch_device_type(a.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    rotary_kernel<T><<<row_blocks(a.tokens, 1), kThreads, 0, to_cuda(stream)>>>(a);
    check_launch("rotary_apply");
  });
}

}  // namespace rowan::cuda
