// The warpgroup products of Hopper (wgmma, sm_90a) and what they need: operands in shared memory in rows of 128 bytes
// whose 16-byte chunks are swizzled (chunk c of row r lies at c ^ (r % 8)), from addresses that are multiples of 1024.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace rowan::cuda::sm90 {

inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kRowBytes = 128;   // of operands in shared memory

#ifdef __CUDACC__

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// Descriptor of an operand, rows in groups of 8. It serves products along a row (K-major), and, with `transposed`,
/// along the rows.
__device__ inline std::uint64_t operand_descriptor(std::uint32_t address) {
  return (static_cast<std::uint64_t>(address & 0x3FFFF) >> 4) | (std::uint64_t{1} << 16) |
         (std::uint64_t{8 * kRowBytes / 16} << 32) | (std::uint64_t{1} << 62);
}

/// Results in d are not touched by other instructions before or after this place.
template <int kCount>
__device__ void hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kParts, int kCount>
__device__ void hold(float (&d)[kParts][kCount]) {
#pragma unroll
  for (int p = 0; p < kParts; ++p) hold(d[p]);
}

/// Before products that add to results which other instructions wrote.
template <class... Results>
__device__ void multiplies_begin(Results&... d) {
  (hold(d), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Ends a group of products.
__device__ inline void multiplies_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// At most kLeft groups are unfinished afterwards; `d` are results of the others.
template <int kLeft, class... Results>
__device__ void multiplies_wait(Results&... d) {
  (hold(d), ...);
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
  (hold(d), ...);
}

#define ROWAN_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ROWAN_D16(i) ROWAN_D4(i), ROWAN_D4(i + 4), ROWAN_D4(i + 8), ROWAN_D4(i + 12)
#define ROWAN_D32(i) ROWAN_D16(i), ROWAN_D16(i + 16)
#define ROWAN_D64(i) ROWAN_D32(i), ROWAN_D32(i + 32)
#define ROWAN_R32_0                                                                                                \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31"

#define ROWAN_MULTIPLY_64(type, name)                                                                                  \
  /* d (64 x 64) = A B^T + (accumulate ? d : 0) for 16 positions of the depth, both in shared memory */                \
  __device__ inline void multiply(float(&d)[32], std::uint64_t a, std::uint64_t b, int accumulate, type) {             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name \
                 " {" ROWAN_R32_0 "}, %32, %33, p, 1, 1, 0, 0;\n}"                                                     \
                 : ROWAN_D32(0)                                                                                        \
                 : "l"(a), "l"(b), "r"(accumulate));                                                                   \
  }                                                                                                                    \
  /* the same with A in registers; with kTransposed d += A B, the rows of B being positions of the depth */            \
  template <bool kTransposed>                                                                                          \
  __device__ void multiply(float(&d)[32], const std::uint32_t(&a)[4], std::uint64_t b, int accumulate, type) {         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." name "." name \
                 " {" ROWAN_R32_0 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"                                     \
                 : ROWAN_D32(0)                                                                                        \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposed ? 1 : 0));     \
  }
ROWAN_MULTIPLY_64(__nv_bfloat16, "bf16")
ROWAN_MULTIPLY_64(__half, "f16")
#undef ROWAN_MULTIPLY_64

/// Two float32, rounded, as a register of a 16-bit operand.
__device__ inline std::uint32_t packed(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}
__device__ inline std::uint32_t packed(float low, float high, __half) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}

/// What ordinary and asynchronous copies wrote to shared memory is seen by products after the next barrier.
__device__ inline void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif  // __CUDACC__

}  // namespace rowan::cuda::sm90
