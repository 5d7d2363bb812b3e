#include <algorithm>
#include <bit>
#include <utility>

#include "core/check.h"
#include "core/cuda_check.h"
#include "ops/gemm_plan.h"

namespace rowan::cuda {

namespace {

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  detail::fail(ErrorKind::kCublas, "gemm: {} failed with {}", what, cublasGetStatusName(status));
}

cudaDataType_t cuda_type(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return CUDA_R_16BF;
    case DType::kFloat16:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

/// The largest power of two up to 256 that divides an address.
std::uint32_t alignment(const void* pointer) {
  const auto address = std::bit_cast<std::uintptr_t>(pointer);
  return static_cast<std::uint32_t>(std::min<std::uintptr_t>(256, address & (~address + 1)));
}

/// What one device needs for products. Never destroyed: products may run while the process ends.
struct DeviceState {
  cublasLtHandle_t handle = nullptr;
  GemmPlanCache plans;
  std::mutex mutex;
  std::map<void*, void*> workspaces;  // by stream; streams live as long as the process
};

DeviceState& device_state(Device device) {
  static std::mutex mutex;
  static auto& states = *new std::map<int, std::unique_ptr<DeviceState>>;
  const std::lock_guard lock(mutex);
  std::unique_ptr<DeviceState>& state = states[device.index];
  if (!state) {
    auto fresh = std::make_unique<DeviceState>();
    check(cublasLtCreate(&fresh->handle), "cublasLtCreate");
    state = std::move(fresh);
  }
  return *state;
}

void* workspace(DeviceState& state, StreamRef stream) {
  const std::lock_guard lock(state.mutex);
  void*& pointer = state.workspaces[stream.handle()];
  if (pointer == nullptr) {
    // Not from the stream's pool: memory allocated while a graph is captured would belong to that graph.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cuda::check(cudaThreadExchangeStreamCaptureMode(&mode), "gemm: cudaThreadExchangeStreamCaptureMode");
    const cudaError_t status = cudaMalloc(&pointer, kGemmWorkspaceBytes);
    cudaThreadExchangeStreamCaptureMode(&mode);
    cuda::check(status, "gemm: workspace");
  }
  return pointer;
}

cublasLtMatrixLayout_t make_layout(DType dtype, std::int64_t rows, std::int64_t cols, std::int64_t ld,
                                   std::int64_t batch, std::int64_t batch_stride) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(cublasLtMatrixLayoutCreate(&layout, cuda_type(dtype), static_cast<std::uint64_t>(rows),
                                   static_cast<std::uint64_t>(cols), ld),
        "cublasLtMatrixLayoutCreate");
  if (batch > 1) {
    const auto count = static_cast<std::int32_t>(batch);
    cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count));
    cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch_stride,
                                     sizeof(batch_stride));
  }
  return layout;
}

class Preference {
 public:
  Preference() { check(cublasLtMatmulPreferenceCreate(&handle_), "cublasLtMatmulPreferenceCreate"); }
  ~Preference() { cublasLtMatmulPreferenceDestroy(handle_); }
  Preference(const Preference&) = delete;
  Preference& operator=(const Preference&) = delete;
  template <class T>
  void set(cublasLtMatmulPreferenceAttributes_t attribute, T value) {
    check(cublasLtMatmulPreferenceSetAttribute(handle_, attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute");
  }
  cublasLtMatmulPreference_t get() const { return handle_; }

 private:
  cublasLtMatmulPreference_t handle_ = nullptr;
};

}  // namespace

GemmKey::GemmKey(const GemmArguments& g, int device_index)
    : device(device_index),
      batch(g.batch),
      m(g.m),
      n(g.n),
      k(g.k),
      lda(g.a.ld),
      ldb(g.b.ld),
      ldc(g.ldc),
      a_batch_stride(g.a.batch_stride),
      b_batch_stride(g.b.batch_stride),
      c_batch_stride(g.c_batch_stride),
      a_transposed(g.a.transposed),
      b_transposed(g.b.transposed),
      reads_c(g.beta != 0),
      allow_tf32(g.allow_tf32),
      dtype(g.dtype),
      c_dtype(g.c_dtype),
      a_alignment(alignment(g.a.data)),
      b_alignment(alignment(g.b.data)),
      c_alignment(alignment(g.c)) {}

GemmPlan::GemmPlan(const GemmKey& key, cublasLtHandle_t handle) {
  try {
    const bool tf32 = key.allow_tf32 && key.dtype == DType::kFloat32;
    check(cublasLtMatmulDescCreate(&product_, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    const cublasOperation_t first = key.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N,
                            second = key.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof(first));
    cublasLtMatmulDescSetAttribute(product_, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof(second));
    first_ = make_layout(key.dtype, key.b_transposed ? key.k : key.n, key.b_transposed ? key.n : key.k, key.ldb,
                         key.batch, key.b_batch_stride);
    second_ = make_layout(key.dtype, key.a_transposed ? key.m : key.k, key.a_transposed ? key.k : key.m, key.lda,
                          key.batch, key.a_batch_stride);
    result_ = make_layout(key.c_dtype, key.n, key.m, key.ldc, key.batch, key.c_batch_stride);

    Preference preference;
    preference.set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kGemmWorkspaceBytes);
    // Split sums are added in float32 and in a fixed order: no atomics, no sums in the output type.
    preference.set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                   static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.b_alignment);
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.a_alignment);
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.c_alignment);
    preference.set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.c_alignment);
    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, product_, first_, second_, result_, result_,
                                                                 preference.get(), 1, &found, &count);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0) {
      detail::fail(ErrorKind::kCublas, "gemm: cuBLASLt has no algorithm for {} x {} x {} (batch {}, {} to {}): {}",
                   key.m, key.k, key.n, key.batch, key.dtype, key.c_dtype, cublasGetStatusName(status));
    }
    algorithm_ = found.algo;
  } catch (...) {
    destroy();
    throw;
  }
}

GemmPlan::~GemmPlan() { destroy(); }

void GemmPlan::destroy() noexcept {
  if (result_ != nullptr) cublasLtMatrixLayoutDestroy(result_);
  if (second_ != nullptr) cublasLtMatrixLayoutDestroy(second_);
  if (first_ != nullptr) cublasLtMatrixLayoutDestroy(first_);
  if (product_ != nullptr) cublasLtMatmulDescDestroy(product_);
}

void GemmPlan::run(const GemmArguments& g, cublasLtHandle_t handle, void* workspace, StreamRef stream) const {
  const auto alpha = static_cast<float>(g.alpha), beta = static_cast<float>(g.beta);
  check(cublasLtMatmul(handle, product_, &alpha, g.b.data, first_, g.a.data, second_, &beta, g.c, result_, g.c, result_,
                       &algorithm_, workspace, kGemmWorkspaceBytes, to_cuda(stream)),
        "cublasLtMatmul");
}

std::shared_ptr<const GemmPlan> GemmPlanCache::find_or_make(const GemmKey& key, const Factory& make) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<const GemmPlan>& plan = plans_[key];
  if (!plan) plan = make(key);
  return plan;
}

void gemm(const GemmArguments& g, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  DeviceState& state = device_state(stream.device());
  const auto plan = state.plans.find_or_make(GemmKey(g, stream.device().index), [&](const GemmKey& key) {
    return std::make_shared<const GemmPlan>(key, state.handle);
  });
  plan->run(g, state.handle, workspace(state, stream), stream);
}

}  // namespace rowan::cuda
