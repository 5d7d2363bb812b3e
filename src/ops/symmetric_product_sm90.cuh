// A symmetric matrix product for Hopper (sm_90a): only tiles of the lower triangle are computed, and the epilogue
// writes both triangles. Clusters of two blocks share one column of tiles: each loads half of the shared operand for
// both (TMA multicast); in a block one warp feeds two warpgroups that multiply (wgmma) through a ring of tiles in
// shared memory. The work is shared out evenly whatever the number of tiles (stream-K, arXiv 2301.03598): a cluster
// takes a run of steps along the depth of consecutive tiles, and a tile that several clusters share is added up by the
// one that has its end. How it is shared out, and the order of every sum, follow from shapes and the number of clusters
// alone.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

#include "ops/warpgroup_sm90.cuh"
#include "rowan/core/rng.h"  // ROWAN_HOST_DEVICE

namespace rowan::cuda::sm90 {

inline constexpr int kBox = 64;                      // side of the squares in which operands are loaded
inline constexpr int kBoxBytes = kBox * kBox * 2;    // a row of a box is 128 bytes: one swizzle row
inline constexpr int kTileRows = 128;                // of a block
inline constexpr int kTile = 256;                    // rows and columns of a cluster's tile
inline constexpr int kMultipliers = 2 * kWarpgroup;  // threads
inline constexpr int kThreads = 3 * kWarpgroup;
inline constexpr int kRegisters = kTile / 2;  // that hold a thread's results

/// out = alpha A B^T + beta C + gamma I for symmetric results.
struct SymmetricProblem {
  int side = 0;  // a multiple of 64, as is depth
  int depth = 0;
  int batches = 0;
  int clusters = 0;  // of the grid
  float alpha = 1, beta = 0, gamma = 0;
  float* partials = nullptr;         // [2 clusters, kRegisters, kMultipliers]
  std::uint32_t* signals = nullptr;  // [2 clusters + 1], zero before and after: partials are there; tickets taken

  ROWAN_HOST_DEVICE int rows() const { return (side + kTile - 1) / kTile; }
  ROWAN_HOST_DEVICE int tiles_each() const { return rows() * (rows() + 1) / 2; }
  ROWAN_HOST_DEVICE int steps() const { return depth / kBox; }
  ROWAN_HOST_DEVICE std::int64_t all_steps() const {
    return static_cast<std::int64_t>(batches) * tiles_each() * steps();
  }
  /// Where the run of a cluster begins.
  ROWAN_HOST_DEVICE std::int64_t run_begin(int cluster) const { return all_steps() * cluster / clusters; }
};

#ifdef __CUDACC__

/// Steps [begin, end) of one tile, of which this block computes rows from `row` on. They are taken from `first` on, and
/// round to it again: so all clusters walk along the depth together and find each other's operands in the cache.
struct Segment {
  int batch, row, col;
  int begin, end, first;
  std::int64_t tile;
};

/// A cluster's run, its end first: what others wait for comes before what waits for others.
class RunWalk {
 public:
  __device__ RunWalk(const SymmetricProblem& p, int cluster, int rank)
      : p_(p), begin_(p.run_begin(cluster)), position_(p.run_begin(cluster + 1)), rank_(rank) {}

  __device__ bool next(Segment& s) {
    if (position_ <= begin_) return false;
    const int steps = p_.steps();
    s.tile = (position_ - 1) / steps;
    const std::int64_t start = s.tile * steps;
    s.begin = static_cast<int>(max(begin_, start) - start);
    s.end = static_cast<int>(position_ - start);
    s.first = s.end - s.begin == steps ? phase_ : s.begin;
    if (s.end < steps) phase_ = s.end;
    position_ = start + s.begin;
    s.batch = static_cast<int>(s.tile / p_.tiles_each());
    int col = static_cast<int>(s.tile - static_cast<std::int64_t>(s.batch) * p_.tiles_each()), row = 0;
    while (col > row) col -= ++row;
    s.row = row * kTile + rank_ * kTileRows;
    s.col = col * kTile;
    return true;
  }

 private:
  const SymmetricProblem& p_;
  std::int64_t begin_, position_;
  int rank_, phase_ = 0;
};

// ---- the instructions
// ------------------------------------------------------------------------------------------------

__device__ inline int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// This thread's place in its warpgroup, read anew: addresses made from it are not kept in registers while the tiles
/// are multiplied, which need them all.
__device__ inline int warpgroup_thread() {
  int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  asm volatile("" : "+r"(thread));
  return thread;
}
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline void barrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ inline void barrier_expect(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/// Arrives at the barrier of the same offset in block `rank` of the cluster.
__device__ inline void barrier_arrive(std::uint32_t barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
__device__ inline void barrier_wait(std::uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nretry:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra retry;\nfinished:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ inline void load_box(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
/// To both blocks of the cluster.
__device__ inline void load_box_shared(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier, int x, int y,
                                       int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "h"(static_cast<std::uint16_t>(3))
      : "memory");
}
__device__ inline void warpgroup_sync(int which) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + which), "n"(kWarpgroup) : "memory");
}
__device__ inline void multipliers_sync() { asm volatile("bar.sync 3, %0;" ::"n"(kMultipliers) : "memory"); }
__device__ inline void store_to_block(std::uint32_t address, int rank, std::uint32_t value) {
  asm volatile(
      "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\nst.shared::cluster.u32 [remote], %2;\n}" ::"r"(
          address),
      "r"(rank), "r"(value)
      : "memory");
}
__device__ inline uint4 load_shared(std::uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ inline std::uint32_t load_shared_word(std::uint32_t address) {
  std::uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

#define ROWAN_R32_32                                                                                                 \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"
#define ROWAN_R32_64                                                                                                 \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91," \
  "%92,%93,%94,%95"
#define ROWAN_R32_96                                                                                                \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118," \
  "%119,%120,%121,%122,%123,%124,%125,%126,%127"
/// d (64 x 256) = A B^T + (accumulate ? d : 0), for 16 positions of the depth.
__device__ inline void multiply(float (&d)[kRegisters], std::uint64_t a, std::uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" ROWAN_R32_0
      "," ROWAN_R32_32 "," ROWAN_R32_64 "," ROWAN_R32_96 "}, %128, %129, p, 1, 1, 0, 0;\n}"
      : ROWAN_D64(0), ROWAN_D64(64)
      : "l"(a), "l"(b), "r"(accumulate));
}
// ---- shared memory
// ---------------------------------------------------------------------------------------------------

/// A ring of stages that hold a step's operands, or the addend under half of a tile; behind it two boxes for each
/// multiplying warpgroup, the barriers and a word.
struct Ring {
  static constexpr int kStages = 4;
  static constexpr int kFirstBytes = kTileRows * kBox * 2;
  static constexpr int kStageBytes = kFirstBytes + kTile * kBox * 2;
  static constexpr int kBoxesBytes = 2 * 2 * kBoxBytes;
  static constexpr int kAlignment = 1024;
  static constexpr int kBytes = kStages * kStageBytes + kBoxesBytes + 2 * kStages * 8 + 8 + kAlignment;

  std::uint32_t base;
  int stage = 0, parity = 0;

  __device__ explicit Ring(const void* memory)
      : base((shared_address(memory) + kAlignment - 1) / kAlignment * kAlignment) {}
  __device__ std::uint32_t first() const { return base + stage * kStageBytes; }
  __device__ std::uint32_t second() const { return first() + kFirstBytes; }
  __device__ std::uint32_t addend(int warpgroup, int box) const { return first() + (2 * warpgroup + box) * kBoxBytes; }
  __device__ std::uint32_t boxes(int warpgroup) const {
    return base + kStages * kStageBytes + warpgroup * 2 * kBoxBytes;
  }
  __device__ std::uint32_t filled(int s) const { return base + kStages * kStageBytes + kBoxesBytes + 8 * s; }
  __device__ std::uint32_t emptied(int s) const { return filled(s) + 8 * kStages; }
  __device__ std::uint32_t word() const { return filled(2 * kStages); }
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

/// Address of 16 bytes of a swizzled box.
__device__ inline std::uint32_t chunk_of(std::uint32_t box, int row, int chunk) {
  return box + row * 128 + (chunk ^ row % 8) * 16;
}

// ---- the loading warp
// ------------------------------------------------------------------------------------------------

__device__ inline void load_segment(Ring& ring, const Segment& s, const CUtensorMap& a, const CUtensorMap& b,
                                    const CUtensorMap& addend, const SymmetricProblem& p, int rank) {
  int step = s.first;
  for (int i = s.begin; i < s.end; ++i, ring.advance()) {
    barrier_wait(ring.emptied(ring.stage), ring.parity ^ 1);
    const std::uint32_t filled = ring.filled(ring.stage);
    barrier_expect(filled, Ring::kStageBytes);
    for (int box = 0; box < 2; ++box) {
      load_box(ring.first() + box * kBoxBytes, a, filled, step * kBox, s.row + box * kBox, s.batch);
      const int shared = 2 * rank + box;
      load_box_shared(ring.second() + shared * kBoxBytes, b, filled, step * kBox, s.col + shared * kBox, s.batch);
    }
    if (++step == s.end) step = s.begin;
  }
  if (s.end < p.steps() || p.beta == 0) return;
  for (int half = 0; half < 2; ++half, ring.advance()) {
    barrier_wait(ring.emptied(ring.stage), ring.parity ^ 1);
    const std::uint32_t filled = ring.filled(ring.stage);
    barrier_expect(filled, 4 * kBoxBytes);
    for (int i = 0; i < 4; ++i)
      load_box(ring.addend(i / 2, i % 2), addend, filled, s.col + (2 * half + i % 2) * kBox, s.row + i / 2 * kBox,
               s.batch);
  }
}

// ---- the multiplying warpgroups
// --------------------------------------------------------------------------------------

/// Where a warpgroup writes its 64 x 64 results.
struct Output {
  __half* data;
  std::int64_t stride, batch_stride;
};

/// Writes box (row, col) and its mirror image; of a box on the diagonal the lower triangle, mirrored. v holds two
/// adjacent elements each, in wgmma's layout. `boxes`: two boxes of the warpgroup.
__device__ inline void store_box(const std::uint32_t (&v)[16], const Output& out, int batch, int row, int col,
                                 std::uint32_t boxes, int warpgroup) {
  const int thread = warpgroup_thread(), warp = thread / 32, eighth = thread % 8, quarter = thread % 32 / 8;
  const std::uint32_t mirror = boxes + kBoxBytes;
  warpgroup_sync(warpgroup);  // what was there is read
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    const std::uint32_t to = chunk_of(boxes, 16 * warp + eighth + 8 * (quarter % 2), j + quarter / 2);
    const std::uint32_t to_mirror = chunk_of(mirror, 8 * (j + quarter / 2) + eighth, 2 * warp + quarter % 2);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v[2 * j]),
                 "r"(v[2 * j + 1]), "r"(v[2 * j + 2]), "r"(v[2 * j + 3])
                 : "memory");
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to_mirror),
                 "r"(v[2 * j]), "r"(v[2 * j + 1]), "r"(v[2 * j + 2]), "r"(v[2 * j + 3])
                 : "memory");
  }
  warpgroup_sync(warpgroup);
  __half* const matrix = out.data + batch * out.batch_stride;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int line = 16 * i + thread / 8, chunk = thread % 8;
    uint4 straight = load_shared(chunk_of(boxes, line, chunk));
    const uint4 mirrored = load_shared(chunk_of(mirror, line, chunk));
    if (row == col) {
      const auto below = [&](std::uint32_t own, std::uint32_t other, int word) {
        const int first = 8 * chunk + 2 * word;  // column of the lower half of the word
        return (first <= line ? own & 0xFFFFu : other & 0xFFFFu) |
               (first + 1 <= line ? own & 0xFFFF0000u : other & 0xFFFF0000u);
      };
      straight = {below(straight.x, mirrored.x, 0), below(straight.y, mirrored.y, 1), below(straight.z, mirrored.z, 2),
                  below(straight.w, mirrored.w, 3)};
    } else {
      *reinterpret_cast<uint4*>(matrix + (col + line) * out.stride + row + 8 * chunk) = mirrored;
    }
    *reinterpret_cast<uint4*>(matrix + (row + line) * out.stride + col + 8 * chunk) = straight;
  }
}

__device__ inline void release_stage(const Ring& ring, int stage) {
  const int signal = static_cast<int>(threadIdx.x) % kWarpgroup;  // threads 0 and 1 tell the two blocks
  if (signal < 2) barrier_arrive(ring.emptied(stage), signal);
}

/// d = the products of a segment.
__device__ inline void multiply_segment(float (&d)[kRegisters], Ring& ring, int steps, int warpgroup) {
  int previous = 0;
#pragma unroll 1
  for (int i = 0; i < steps; ++i, ring.advance()) {
    barrier_wait(ring.filled(ring.stage), ring.parity);
    multiplies_begin();
    const std::uint64_t a = operand_descriptor(ring.first() + warpgroup * kBoxBytes);
    const std::uint64_t b = operand_descriptor(ring.second());
#pragma unroll
    for (int k = 0; k < kBox / 16; ++k) multiply(d, a + 2 * k, b + 2 * k, i > 0 || k > 0);
    multiplies_commit();
    if (i > 0) {
      multiplies_wait<1>(d);
      release_stage(ring, previous);
    }
    previous = ring.stage;
  }
  multiplies_wait<0>(d);
  release_stage(ring, previous);
}

/// Sums that one block leaves for another, adjacent threads in adjacent memory.
__device__ inline float4* partials_of(const SymmetricProblem& p, int block) {
  return reinterpret_cast<float4*>(p.partials) + static_cast<std::int64_t>(block) * (kRegisters / 4 * kMultipliers) +
         threadIdx.x;
}

__device__ inline void leave_partials(const float (&d)[kRegisters], const SymmetricProblem& p, int block) {
  float4* const to = partials_of(p, block);
#pragma unroll
  for (int i = 0; i < kRegisters / 4; ++i)
    __stcg(to + i * kMultipliers, make_float4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]));
  __threadfence();
  multipliers_sync();
  if (threadIdx.x == 0) asm volatile("st.release.gpu.u32 [%0], 1;" ::"l"(p.signals + block) : "memory");
}

/// Adds what the clusters before this one have of the tile that starts at `start`.
__device__ inline void add_partials(float (&d)[kRegisters], const SymmetricProblem& p, std::int64_t start, int cluster,
                                    int rank) {
  for (int other = cluster - 1;; --other) {
    const int block = 2 * other + rank;
    if (threadIdx.x == 0) {
      std::uint32_t signal = 0;
      while (signal == 0)
        asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(signal) : "l"(p.signals + block) : "memory");
    }
    multipliers_sync();
    const float4* const from = partials_of(p, block);
#pragma unroll
    for (int i = 0; i < kRegisters / 4; ++i) {
      const float4 part = __ldcg(from + i * kMultipliers);
      d[4 * i] += part.x;
      d[4 * i + 1] += part.y;
      d[4 * i + 2] += part.z;
      d[4 * i + 3] += part.w;
    }
    multipliers_sync();
    if (threadIdx.x == 0) p.signals[block] = 0;  // for the next launch
    if (p.run_begin(other) <= start) return;
  }
}

__device__ inline void store_tile(const float (&d)[kRegisters], Ring& ring, const Segment& s, const SymmetricProblem& p,
                                  const Output& out, int warpgroup) {
  const int row = s.row + warpgroup * kBox;
#pragma unroll
  for (int box = 0; box < kTile / kBox; ++box) {
    const int col = s.col + box * kBox;
    if (p.beta != 0 && box % 2 == 0) barrier_wait(ring.filled(ring.stage), ring.parity);
    if (col <= row && row < p.side) {
      const int thread = warpgroup_thread(), line = 16 * (thread / 32) + thread % 32 / 4;
      const std::uint32_t addend = ring.addend(warpgroup, box % 2) + thread % 4 * 4;
      std::uint32_t v[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float low = p.alpha * d[32 * box + 2 * i], high = p.alpha * d[32 * box + 2 * i + 1];
        if (p.beta != 0) {
          const std::uint32_t both = load_shared_word(chunk_of(addend, line + i % 2 * 8, i / 2));
          const float2 added = __half22float2(*reinterpret_cast<const __half2*>(&both));
          low = fmaf(p.beta, added.x, low);
          high = fmaf(p.beta, added.y, high);
        }
        if (col == row) {
          const int below = line + i % 2 * 8 - (i / 2 * 8 + thread % 4 * 2);  // the diagonal, of the first element
          if (below == 0) low += p.gamma;
          if (below == 1) high += p.gamma;
        }
        v[i] = packed(low, high, __half());
      }
      store_box(v, out, s.batch, row, col, ring.boxes(warpgroup), warpgroup);
    }
    if (p.beta != 0 && box % 2 == 1) {
      warpgroup_sync(warpgroup);
      release_stage(ring, ring.stage);
      ring.advance();
    }
  }
}

__device__ inline void compute_segment(Ring& ring, const Segment& s, const SymmetricProblem& p, const Output& out,
                                       int cluster, int rank, int warpgroup) {
  float d[kRegisters];
  multiply_segment(d, ring, s.end - s.begin, warpgroup);
  if (s.end < p.steps()) {
    leave_partials(d, p, 2 * cluster + rank);
    return;
  }
  if (s.begin > 0) add_partials(d, p, s.tile * p.steps(), cluster, rank);
  store_tile(d, ring, s, p, out, warpgroup);
}

/// Clusters take their numbers as they start, so that none waits for one that has not started.
__device__ inline int take_number(const SymmetricProblem& p, const Ring& ring, int rank) {
  if (rank == 0 && threadIdx.x == 0) {
    std::uint32_t* const tickets = p.signals + 2 * p.clusters;
    const std::uint32_t number = atomicAdd(tickets, 1u);
    if (number + 1 == static_cast<std::uint32_t>(p.clusters)) *tickets = 0;  // for the next launch
    for (int block = 0; block < 2; ++block) store_to_block(ring.word(), block, number);
  }
  cluster_sync();
  return static_cast<int>(load_shared_word(ring.word()));
}

/// To be launched in clusters of two blocks. The kernel before it may still run when it starts.
__global__ void __launch_bounds__(kThreads, 1)
    symmetric_product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                      const __grid_constant__ CUtensorMap addend, const Output out,
                      const __grid_constant__ SymmetricProblem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::byte memory[];
  Ring ring(memory);
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int s = 0; s < Ring::kStages; ++s) {
      barrier_init(ring.filled(s), 1);
      barrier_init(ring.emptied(s), 4);  // two warpgroups in each of two blocks
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
  const int cluster = take_number(p, ring, rank);

  RunWalk walk(p, cluster, rank);
  Segment segment;
  const int role = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (role == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == kMultipliers) {
      while (walk.next(segment)) load_segment(ring, segment, a, b, addend, p, rank);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    while (walk.next(segment)) compute_segment(ring, segment, p, out, cluster, rank, role);
  }
  __syncwarp();
  cluster_sync();  // no block leaves while the other may still signal it or write to its memory
#endif
}

#endif  // __CUDACC__

}  // namespace rowan::cuda::sm90
