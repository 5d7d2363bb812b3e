// The launcher of the Hopper kernel.
#include <algorithm>

#include "core/cuda_check.h"
#include "ops/symmetric_product_backend.h"
#include "ops/symmetric_product_sm90.cuh"

namespace rowan::cuda {

namespace {

constexpr const char* kOp = "newton_schulz";

/// Below so many steps of a cluster, starting, sharing tiles and writing them takes longer than a whole product's
/// second half (H200: sides and depth 2048, 17 steps, 27 us against 25; 2560, 33 steps, 38 against 52; 3072, 47 steps,
/// 58 against 77). A polynomial saves a pass over its diagonal, too.
constexpr std::int64_t kLeastSteps = 24, kLeastStepsWithIdentity = 16;

int clusters_of(StreamRef stream) { return multiprocessor_count(stream.device()) / 2; }

sm90::SymmetricProblem problem_of(const SymmetricProductArguments& a, StreamRef stream) {
  sm90::SymmetricProblem p;
  p.side = static_cast<int>(a.side);
  p.depth = static_cast<int>(a.depth);
  p.batches = static_cast<int>(a.batches);
  // Tiles that nearly fill the card are not shared: 2560 x 2560 x 2560 takes 34 us so, and 41 else.
  const int clusters = clusters_of(stream);
  const std::int64_t tiles = a.batches * p.tiles_each();
  p.clusters = tiles <= clusters && 5 * tiles >= 4 * clusters ? static_cast<int>(tiles) : clusters;
  p.alpha = static_cast<float>(a.alpha);
  p.beta = static_cast<float>(a.beta);
  p.gamma = static_cast<float>(a.gamma);
  return p;
}

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

/// The driver's function, found at run time: the library does not link the driver.
EncodeTensorMap tensor_map_encoder() {
  static const EncodeTensorMap encoder = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result), kOp);
    if (result != cudaDriverEntryPointSuccess || !found)
      throw Error(ErrorKind::kCuda, "newton_schulz: expected cuTensorMapEncodeTiled in the driver, got none");
    return reinterpret_cast<EncodeTensorMap>(found);
  }();
  return encoder;
}

CUtensorMap tensor_map(const SymmetricOperand& m, std::int64_t rows, std::int64_t cols, std::int64_t batches) {
  const cuuint64_t extents[] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows),
                                static_cast<cuuint64_t>(batches)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(m.stride) * sizeof(__half),
                                static_cast<cuuint64_t>(m.batch_stride) * sizeof(__half)};
  const cuuint32_t box[] = {sm90::kBox, sm90::kBox, 1}, steps[] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status = tensor_map_encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3, m.data, extents, strides, box,
                                               steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) throw Error(ErrorKind::kCuda, "newton_schulz: expected a tensor map, got an error");
  return map;
}

std::int64_t partial_bytes(StreamRef stream) {
  return std::int64_t{2} * clusters_of(stream) * sm90::kRegisters * sm90::kMultipliers * sizeof(float);
}

}  // namespace

bool symmetric_product_pays(const SymmetricProductArguments& a, StreamRef stream) {
  constexpr std::int64_t kMostSide = std::int64_t{1} << 20;
  if (a.dtype != DType::kFloat16 || a.side % sm90::kBox != 0 || a.depth % sm90::kBox != 0) return false;
  if (a.side > kMostSide || a.depth > kMostSide || a.batches > kMostSide || !has_warpgroup_products(stream.device()))
    return false;
  const sm90::SymmetricProblem p = problem_of(a, stream);
  return p.all_steps() >= (a.gamma != 0 ? kLeastStepsWithIdentity : kLeastSteps) * clusters_of(stream);
}

std::int64_t symmetric_product_workspace(StreamRef stream) {
  return partial_bytes(stream) + (2 * clusters_of(stream) + 1) * static_cast<std::int64_t>(sizeof(std::uint32_t));
}

void symmetric_product(const SymmetricProductArguments& a, void* workspace, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  sm90::SymmetricProblem p = problem_of(a, stream);
  p.partials = static_cast<float*>(workspace);
  p.signals = reinterpret_cast<std::uint32_t*>(static_cast<std::byte*>(workspace) + partial_bytes(stream));
  const CUtensorMap first = tensor_map(a.a, a.side, a.depth, a.batches),
                    second = tensor_map(a.b, a.side, a.depth, a.batches),
                    addend = tensor_map(a.beta != 0 ? a.c : a.out, a.side, a.side, a.batches);
  const sm90::Output out{static_cast<__half*>(a.out.data), a.out.stride, a.out.batch_stride};

  check(cudaFuncSetAttribute(sm90::symmetric_product, cudaFuncAttributeMaxDynamicSharedMemorySize, sm90::Ring::kBytes),
        kOp);
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = 2;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(2 * p.clusters));
  config.blockDim = dim3(sm90::kThreads);
  config.dynamicSmemBytes = sm90::Ring::kBytes;
  config.stream = to_cuda(stream);
  config.attrs = attributes;
  config.numAttrs = 2;
  check(cudaLaunchKernelEx(&config, sm90::symmetric_product, first, second, addend, out, p), kOp);
}

}  // namespace rowan::cuda
