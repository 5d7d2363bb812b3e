// How a matrix product runs on CUDA: which cuBLASLt algorithm, remembered per problem. Only for files that are compiled
// with CUDA.
#pragma once

#include <cublasLt.h>

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "ops/gemm_backend.h"
#include "rowan/core/device.h"

namespace rowan::cuda {

/// Bytes of scratch memory that every product may use; one buffer a (device, stream).
inline constexpr std::size_t kGemmWorkspaceBytes = std::size_t{32} << 20;

/// All that the choice of an algorithm may depend on. Addresses count by their alignment alone.
struct GemmKey {
  int device = 0;
  std::int64_t batch = 0, m = 0, n = 0, k = 0;
  std::int64_t lda = 0, ldb = 0, ldc = 0;
  std::int64_t a_batch_stride = 0, b_batch_stride = 0, c_batch_stride = 0;
  bool a_transposed = false, b_transposed = false, reads_c = false, allow_tf32 = false;
  DType dtype = DType::kFloat32, c_dtype = DType::kFloat32;
  std::uint32_t a_alignment = 0, b_alignment = 0, c_alignment = 0;

  GemmKey(const GemmArguments& arguments, int device);
  friend auto operator<=>(const GemmKey&, const GemmKey&) = default;
};

/// cuBLASLt's view of one product (column-major, so it computes c^T = b^T a^T) and the algorithms for it, best guess
/// first. Immutable once it is in the cache.
class GemmPlan {
 public:
  static constexpr int kMostCandidates = 32;

  /// Makes the descriptors, asks cuBLASLt's heuristics for candidates and takes the first.
  GemmPlan(const GemmKey& key, cublasLtHandle_t handle);
  ~GemmPlan();
  GemmPlan(const GemmPlan&) = delete;
  GemmPlan& operator=(const GemmPlan&) = delete;

  int candidates() const { return static_cast<int>(candidates_.size()); }
  void choose(int candidate) { chosen_ = static_cast<std::size_t>(candidate); }

  void run(const GemmArguments& arguments, cublasLtHandle_t handle, void* workspace, StreamRef stream) const;
  /// Runs one candidate with result `c` instead of arguments.c; false where cuBLASLt refuses.
  bool try_candidate(int candidate, const GemmArguments& arguments, void* c, cublasLtHandle_t handle, void* workspace,
                     StreamRef stream) const;

 private:
  void destroy() noexcept;
  cublasStatus_t launch(std::size_t candidate, const GemmArguments& arguments, void* c, cublasLtHandle_t handle,
                        void* workspace, StreamRef stream) const;

  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t first_ = nullptr, second_ = nullptr, result_ = nullptr;
  std::vector<cublasLtMatmulAlgo_t> candidates_;
  std::size_t chosen_ = 0;
};

/// Plans by problem, made on first use and kept for the life of the process.
class GemmPlanCache {
 public:
  using Factory = std::function<std::shared_ptr<const GemmPlan>(const GemmKey&)>;

  std::shared_ptr<const GemmPlan> find_or_make(const GemmKey& key, const Factory& make);

 private:
  std::mutex mutex_;
  std::map<GemmKey, std::shared_ptr<const GemmPlan>> plans_;
};

}  // namespace rowan::cuda
