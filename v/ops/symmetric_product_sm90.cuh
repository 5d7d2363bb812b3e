// A symmetric matrix product for Hopper (sm_90a): only tiles of the lower triangle are computed, and the epilogue writes
// both triangles. Clusters of two blocks share one column of tiles: each loads half of the shared operand for both (TMA
// multicast); in a block one warp feeds two warpgroups that multiply (wgmma) through a ring of tiles in shared memory.
// Blocks are persistent; which cluster computes which tiles follows from the shape alone.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "rowan/core/rng.h"  // ROWAN_HOST_DEVICE

namespace rowan::cuda::sm90 {

inline constexpr int kBox = 64;                       // side of the squares in which tiles are loaded and stored
inline constexpr int kBoxBytes = kBox * kBox * 2;     // a row of a box is 128 bytes: one swizzle row
inline constexpr int kTileRows = 128;                 // of a block
inline constexpr int kClusterRows = 2 * kTileRows;    // of a cluster
inline constexpr int kHalfCols = 128;                 // columns of the tiles at the diagonal
inline constexpr int kWarpgroup = 128;
inline constexpr int kThreads = 3 * kWarpgroup;

/// out = alpha A B^T + beta C + gamma I, of which the lower triangle is computed.
struct SymmetricProblem {
  int side = 0;        // a multiple of 64, as is depth
  int depth = 0;
  int batches = 0;
  float alpha = 1, beta = 0, gamma = 0;
  const __half* addend = nullptr;  // C; not read where beta is 0
  std::int64_t addend_stride = 0;
  std::int64_t addend_batch_stride = 0;
};

/// How many tiles of each kind a matrix has, by the width of a full tile (256, 192 or 128 columns). A strip of tiles is
/// 256 rows high. `strips(row)` full tiles lie in it; with 256 columns the square at the diagonal takes a tile of half
/// the width; with 256 and 128 columns its lower right corner is left, and two corners make a piece of work.
template <int kWide>
struct TriangleTiles {
  int rows;  // strips

  ROWAN_HOST_DEVICE explicit TriangleTiles(int side) : rows((side + kClusterRows - 1) / kClusterRows) {}
  ROWAN_HOST_DEVICE static int full_in(int row) {
    if (kWide == 256) return row;
    if (kWide == 128) return 2 * row + 1;
    return (kClusterRows * (row + 1) + kWide - 1) / kWide;
  }
  ROWAN_HOST_DEVICE int full() const {
    int count = 0;
    for (int row = 0; row < rows; ++row) count += full_in(row);
    return count;
  }
  ROWAN_HOST_DEVICE int lefts() const { return kWide == 256 ? rows : 0; }
  ROWAN_HOST_DEVICE int corners() const { return kWide == 192 ? 0 : rows; }
};

/// What the clusters share out: full tiles first, then tiles of half the width, two at a time where that evens out the
/// work.
template <int kWide>
struct Work {
  TriangleTiles<kWide> tiles;
  int full_each, full, lefts, corners, small;
  int small_a_unit;  // 1 or 2
  int units;

  ROWAN_HOST_DEVICE Work(int side, int batches, int clusters) : tiles(side) {
    full_each = tiles.full();
    full = batches * full_each;
    lefts = batches * tiles.lefts();
    corners = batches * tiles.corners();
    small = lefts + (corners + 1) / 2;
    // Small tiles of the 128-wide form are full tiles in all but sharing.
    small_a_unit = kWide == 256 && full + small > clusters ? 2 : 1;
    units = full + (small + small_a_unit - 1) / small_a_unit;
  }
};

#ifdef __CUDACC__

/// One tile of one block.
struct Tile {
  int batch, row, col;
  bool is_full;    // kWide columns, else kHalfCols
  bool is_shared;  // by the cluster's two blocks
  bool is_inside;  // false: computed in step with the other block, but not stored
};

/// The tiles of one block, in order.
template <int kWide>
class TileWalk {
 public:
  __device__ TileWalk(const SymmetricProblem& p, int cluster, int clusters, int rank)
      : work_(p.side, p.batches, clusters), unit_(cluster), clusters_(clusters), rank_(rank) {}

  __device__ bool next(Tile& tile) {
    while (unit_ < work_.units) {
      if (unit_ < work_.full) {
        tile = full_tile(unit_);
        unit_ += clusters_;
        return true;
      }
      const int index = (unit_ - work_.full) * work_.small_a_unit + part_;
      if (part_ == work_.small_a_unit || index >= work_.small) {
        part_ = 0;
        unit_ += clusters_;
        continue;
      }
      ++part_;
      tile = small_tile(index);
      return true;
    }
    return false;
  }

 private:
  __device__ Tile full_tile(int index) const {
    const int batch = index / work_.full_each;
    int col = index - batch * work_.full_each, row = 0;
    while (col >= work_.tiles.full_in(row)) col -= work_.tiles.full_in(row++);
    return {batch, row * kClusterRows + rank_ * kTileRows, col * kWide, true, true, true};
  }
  __device__ Tile small_tile(int index) const {
    if (index < work_.lefts) {
      const int row = index % work_.tiles.rows;
      return {index / work_.tiles.rows, row * kClusterRows + rank_ * kTileRows, row * kClusterRows, false, true, true};
    }
    const int corner = (index - work_.lefts) * 2 + rank_;
    const int mine = min(corner, work_.corners - 1);
    const int start = mine % work_.tiles.rows * kClusterRows + kTileRows;
    return {mine / work_.tiles.rows, start, start, false, false, corner < work_.corners};
  }

  Work<kWide> work_;
  int unit_, clusters_, rank_, part_ = 0;
};

// ---- the instructions
// ------------------------------------------------------------------------------------------------

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
__device__ inline int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
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
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
__device__ inline void barrier_wait(std::uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nretry:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\nbra retry;\nfinished:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ inline void load_box(std::uint32_t to, const CUtensorMap& map, std::uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(
          to),
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
__device__ inline void store_box(const CUtensorMap& map, std::uint32_t from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map), "r"(from),
               "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ inline void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ inline void stores_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void stores_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void warpgroup_sync(int which) {
  asm volatile("bar.sync %0, %1;" ::"r"(1 + which), "n"(kWarpgroup) : "memory");
}

/// Descriptor of a K-major operand in rows of 128 bytes, swizzled; rows in groups of 8.
__device__ inline std::uint64_t operand_descriptor(std::uint32_t address) {
  return (static_cast<std::uint64_t>(address & 0x3FFFF) >> 4) | (std::uint64_t{1} << 16) |
         (std::uint64_t{8 * 128 / 16} << 32) | (std::uint64_t{1} << 62);
}

#define ROWAN_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ROWAN_D16(i) ROWAN_D4(i), ROWAN_D4(i + 4), ROWAN_D4(i + 8), ROWAN_D4(i + 12)
#define ROWAN_D32(i) ROWAN_D16(i), ROWAN_D16(i + 16)
#define ROWAN_D64(i) ROWAN_D32(i), ROWAN_D32(i + 32)
#define ROWAN_R32_0                                                                                              \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29," \
  "%30,%31"
#define ROWAN_R32_32                                                                                               \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59," \
  "%60,%61,%62,%63"
#define ROWAN_R32_64                                                                                               \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91," \
  "%92,%93,%94,%95"
#define ROWAN_R32_96                                                                                             \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118," \
  "%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define ROWAN_WGMMA(n, registers, a, b, flag)                                             \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " flag ", 0;\nwgmma.mma_async.sync.aligned.m64n" n    \
  "k16.f32.f16.f16 {" registers "}, " a ", " b ", p, 1, 1, 0, 0;\n}"

/// d (64 x 2 kCount columns) = A B^T + (accumulate ? d : 0), for 16 positions of the depth.
template <int kCount>
__device__ void multiply(float (&d)[kCount], std::uint64_t a, std::uint64_t b, int accumulate) {
  if constexpr (kCount == 128) {
    asm volatile(ROWAN_WGMMA("256", ROWAN_R32_0 "," ROWAN_R32_32 "," ROWAN_R32_64 "," ROWAN_R32_96, "%128", "%129",
                             "%130")
                 : ROWAN_D64(0), ROWAN_D64(64)
                 : "l"(a), "l"(b), "r"(accumulate));
  } else if constexpr (kCount == 96) {
    asm volatile(ROWAN_WGMMA("192", ROWAN_R32_0 "," ROWAN_R32_32 "," ROWAN_R32_64, "%96", "%97", "%98")
                 : ROWAN_D64(0), ROWAN_D32(64)
                 : "l"(a), "l"(b), "r"(accumulate));
  } else {
    static_assert(kCount == 64);
    asm volatile(ROWAN_WGMMA("128", ROWAN_R32_0 "," ROWAN_R32_32, "%64", "%65", "%66")
                 : ROWAN_D64(0)
                 : "l"(a), "l"(b), "r"(accumulate));
  }
}
__device__ inline void multiplies_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void multiplies_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// At most kLeft groups are unfinished afterwards.
template <int kLeft, int kCount>
__device__ void multiplies_wait(float (&d)[kCount]) {
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ inline std::uint32_t packed(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}

// ---- shared memory
// ---------------------------------------------------------------------------------------------------

template <int kWide>
struct Ring {
  static constexpr int kStages = kWide == 128 ? 6 : 4;
  static constexpr int kFirstBytes = kTileRows * kBox * 2;
  static constexpr int kStageBytes = kFirstBytes + kWide * kBox * 2;
  static constexpr int kStoreBytes = 2 * 2 * kBoxBytes;  // two boxes a warpgroup
  static constexpr int kBytes = kStages * kStageBytes + kStoreBytes + 2 * kStages * 8 + 1024;  // 1024: alignment

  std::uint32_t base;
  int stage = 0, parity = 0;

  __device__ explicit Ring(const void* memory) : base((shared_address(memory) + 1023) & ~1023u) {}
  __device__ std::uint32_t first() const { return base + stage * kStageBytes; }
  __device__ std::uint32_t second() const { return first() + kFirstBytes; }
  __device__ std::uint32_t store(int warpgroup) const {
    return base + kStages * kStageBytes + warpgroup * 2 * kBoxBytes;
  }
  __device__ std::uint32_t filled(int s) const { return base + kStages * kStageBytes + kStoreBytes + 8 * s; }
  __device__ std::uint32_t emptied(int s) const { return filled(s) + 8 * kStages; }
  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// ---- the loading warp
// ------------------------------------------------------------------------------------------------

template <int kWide>
__device__ void load_tile(Ring<kWide>& ring, const Tile& tile, const CUtensorMap& a, const CUtensorMap& b, int depth,
                          int rank) {
  const int boxes = (tile.is_full ? kWide : kHalfCols) / kBox;
  const int begin = tile.is_shared && rank == 1 ? (boxes + 1) / 2 : 0;
  const int end = tile.is_shared && rank == 0 ? (boxes + 1) / 2 : boxes;
  for (int k = 0; k < depth; k += kBox, ring.advance()) {
    barrier_wait(ring.emptied(ring.stage), ring.parity ^ 1);
    const std::uint32_t filled = ring.filled(ring.stage);
    barrier_expect(filled, (kTileRows / kBox + boxes) * kBoxBytes);
    for (int i = 0; i < kTileRows / kBox; ++i)
      load_box(ring.first() + i * kBoxBytes, a, filled, k, tile.row + i * kBox, tile.batch);
    for (int i = begin; i < end; ++i) {
      const std::uint32_t to = ring.second() + i * kBoxBytes;
      if (tile.is_shared) {
        load_box_shared(to, b, filled, k, tile.col + i * kBox, tile.batch);
      } else {
        load_box(to, b, filled, k, tile.col + i * kBox, tile.batch);
      }
    }
  }
}

// ---- the multiplying warpgroups
// --------------------------------------------------------------------------------------

/// Both triangles of 64 x 64 results: registers v[8 j + ..] hold columns 8 j.. in wgmma's layout.
class BoxStore {
 public:
  __device__ BoxStore(std::uint32_t memory, int warpgroup)
      : memory_(memory), warpgroup_(warpgroup), thread_(static_cast<int>(threadIdx.x) % kWarpgroup) {}

  /// Box (row, col) and its mirror image.
  __device__ void off_diagonal(const std::uint32_t (&v)[16], const CUtensorMap& out, int row, int col, int batch) {
    begin();
    const int warp = thread_ / 32, lane = thread_ % 32, eighth = lane % 8, quarter = lane / 8;
    for (int j = 0; j < 8; j += 2) {
      const int r = 16 * warp + eighth + 8 * (quarter % 2), n = 8 * (j + quarter / 2) + eighth;
      const std::uint32_t straight = memory_ + r * 128 + (((j + quarter / 2) ^ (r % 8)) * 16);
      const std::uint32_t mirrored = memory_ + kBoxBytes + n * 128 + (((2 * warp + quarter % 2) ^ (n % 8)) * 16);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(straight), "r"(v[2 * j]),
                   "r"(v[2 * j + 1]), "r"(v[2 * j + 2]), "r"(v[2 * j + 3])
                   : "memory");
      asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(mirrored),
                   "r"(v[2 * j]), "r"(v[2 * j + 1]), "r"(v[2 * j + 2]), "r"(v[2 * j + 3])
                   : "memory");
    }
    finish(out, row, col, batch, true);
  }

  /// A box on the diagonal: its lower triangle, mirrored.
  __device__ void diagonal(const std::uint32_t (&v)[16], const CUtensorMap& out, int row, int batch) {
    begin();
    const int r = 16 * (thread_ / 32) + thread_ % 32 / 4, c = 2 * (thread_ % 4);
    for (int j = 0; j < 8; ++j) {
      for (int half = 0; half < 2; ++half) {
        put(r + 8 * half, 8 * j + c, v[2 * j + half] & 0xFFFF);
        put(r + 8 * half, 8 * j + c + 1, v[2 * j + half] >> 16);
      }
    }
    finish(out, row, row, batch, false);
  }

 private:
  __device__ void begin() {
    if (thread_ == 0) stores_wait_read();
    warpgroup_sync(warpgroup_);
  }
  __device__ void put(int r, int c, std::uint32_t bits) {
    if (r < c) return;
    const auto store = [&](int i, int j) {
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(memory_ + i * 128 + (((j / 8) ^ (i % 8)) * 16) + j % 8 * 2),
                   "h"(static_cast<std::uint16_t>(bits))
                   : "memory");
    };
    store(r, c);
    if (r != c) store(c, r);
  }
  __device__ void finish(const CUtensorMap& out, int row, int col, int batch, bool mirrored) {
    stores_fence();
    warpgroup_sync(warpgroup_);
    if (thread_ != 0) return;
    store_box(out, memory_, col, row, batch);
    if (mirrored) store_box(out, memory_ + kBoxBytes, row, col, batch);
    stores_commit();
  }

  std::uint32_t memory_;
  int warpgroup_, thread_;
};

/// The addend's elements under this thread's results of one box.
__device__ inline void load_addend(const SymmetricProblem& p, int batch, int row, int col, __half2 (&c)[16]) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
  const __half* const corner = p.addend + batch * p.addend_batch_stride +
                               (row + 16 * (thread / 32) + thread % 32 / 4) * p.addend_stride + col + 2 * (thread % 4);
#pragma unroll
  for (int i = 0; i < 16; ++i)
    c[i] = *reinterpret_cast<const __half2*>(corner + i % 2 * 8 * p.addend_stride + i / 2 * 8);
}

template <int kCount>
__device__ void store_tile(const float (&d)[kCount], const Tile& tile, const SymmetricProblem& p,
                           const CUtensorMap& out, BoxStore& store, int warpgroup) {
  const int row = tile.row + warpgroup * kBox;
  if (!tile.is_inside || row >= p.side) return;
  __half2 c[16];
#pragma unroll
  for (int box = 0; box < kCount / 32; ++box) {
    const int col = tile.col + box * kBox;
    if (col > row) break;
    if (p.beta != 0) load_addend(p, tile.batch, row, col, c);
    std::uint32_t v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float low = p.alpha * d[32 * box + 2 * i], high = p.alpha * d[32 * box + 2 * i + 1];
      if (p.beta != 0) {
        const float2 added = __half22float2(c[i]);
        low = fmaf(p.beta, added.x, low);
        high = fmaf(p.beta, added.y, high);
      }
      if (col == row && p.gamma != 0) {
        const int thread = static_cast<int>(threadIdx.x) % kWarpgroup;
        const int below = 16 * (thread / 32) + thread % 32 / 4 + i % 2 * 8 - (i / 2 * 8 + 2 * (thread % 4));
        if (below == 0) low += p.gamma;
        if (below == 1) high += p.gamma;
      }
      v[i] = packed(low, high);
    }
    if (col == row) {
      
    } else {
      store.off_diagonal(v, out, row, col, tile.batch);
    }
  }
}

template <int kCols, int kWide>
__device__ void compute_tile(Ring<kWide>& ring, const Tile& tile, const SymmetricProblem& p, const CUtensorMap& out,
                             BoxStore& store, int warpgroup) {
  const int signal = static_cast<int>(threadIdx.x) % kWarpgroup;  // threads 0 and 1 tell the two blocks
  float d[kCols / 2];
  int previous = 0;
  for (int k = 0; k < p.depth; k += kBox, ring.advance()) {
    barrier_wait(ring.filled(ring.stage), ring.parity);
    multiplies_begin();
    const std::uint64_t a = operand_descriptor(ring.first() + warpgroup * kBoxBytes);
    const std::uint64_t b = operand_descriptor(ring.second());
#pragma unroll
    for (int i = 0; i < kBox / 16; ++i) multiply(d, a + 2 * i, b + 2 * i, k > 0 || i > 0);
    multiplies_commit();
    if (k > 0) {
      multiplies_wait<1>(d);
      if (signal < 2) barrier_arrive(ring.emptied(previous), signal);
    }
    previous = ring.stage;
  }
  multiplies_wait<0>(d);
  if (signal < 2) barrier_arrive(ring.emptied(previous), signal);
  store_tile(d, tile, p, out, store, warpgroup);
}

template <int kWide>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    symmetric_product(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                      const __grid_constant__ CUtensorMap out, const __grid_constant__ SymmetricProblem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ std::byte memory[];
  Ring<kWide> ring(memory);
  const int rank = cluster_rank();
  if (threadIdx.x == 0) {
    for (int s = 0; s < Ring<kWide>::kStages; ++s) {
      barrier_init(ring.filled(s), 1);
      barrier_init(ring.emptied(s), 4);  // two warpgroups in each of two blocks
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();

  TileWalk<kWide> walk(p, static_cast<int>(blockIdx.x) / 2, static_cast<int>(gridDim.x) / 2, rank);
  Tile tile;
  const int role = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (role == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 2 * kWarpgroup) {
      while (walk.next(tile)) load_tile(ring, tile, a, b, p.depth, rank);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    BoxStore store(ring.store(role), role);
    while (walk.next(tile)) {
      if (tile.is_full) {
        compute_tile<kWide>(ring, tile, p, out, store, role);
      } else {
        compute_tile<kHalfCols>(ring, tile, p, out, store, role);
      }
    }
    if (threadIdx.x % kWarpgroup == 0) stores_wait_read();
  }
  __syncwarp();
  cluster_sync();  // no block leaves while the other may still signal it or write to its memory
#endif
}

#endif  // __CUDACC__

}  // namespace rowan::cuda::sm90
