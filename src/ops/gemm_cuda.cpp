#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <utility>

#include "core/check.h"
#include "core/cuda_check.h"
#include "ops/gemm_plan.h"
#include "ops/tuning_table.h"
#include "rowan/core/allocator.h"

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

/// Card, driver and cuBLAS version.
std::string machine_of(Device device) {
  const DeviceInfo info = device_info(device);
  std::string name = info.name;
  std::replace(name.begin(), name.end(), '=', '-');
  return fmt::format("{} sm {}.{} x {} driver {} cublas {}", name, info.major, info.minor, info.multiprocessors,
                     info.driver, cublasLtGetVersion());
}

/// What one device needs for products. Never destroyed: products may run while the process ends.
struct DeviceState {
  cublasLtHandle_t handle = nullptr;
  std::string machine;  // part of what choices are filed under
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
    fresh->machine = machine_of(device);
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
      c_alignment(std::min(alignment(g.c), alignment(g.addend ? g.addend : g.c))) {}

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
    cublasLtMatmulHeuristicResult_t found[kMostCandidates] = {};
    int count = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, product_, first_, second_, result_, result_,
                                                                 preference.get(), kMostCandidates, found, &count);
    if (status != CUBLAS_STATUS_SUCCESS || count == 0) {
      detail::fail(ErrorKind::kCublas, "gemm: cuBLASLt has no algorithm for {} x {} x {} (batch {}, {} to {}): {}",
                   key.m, key.k, key.n, key.batch, key.dtype, key.c_dtype, cublasGetStatusName(status));
    }
    for (int i = 0; i < count; ++i) {
      if (found[i].state == CUBLAS_STATUS_SUCCESS) candidates_.push_back(found[i].algo);
    }
    if (candidates_.empty()) detail::fail(ErrorKind::kCublas, "gemm: cuBLASLt's algorithms for this product all fail");
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

cublasStatus_t GemmPlan::launch(std::size_t candidate, const GemmArguments& g, void* c, cublasLtHandle_t handle,
                                void* workspace, StreamRef stream) const {
  const auto alpha = static_cast<float>(g.alpha), beta = static_cast<float>(g.beta);
  const void* const addend = g.addend ? g.addend : c;
  return cublasLtMatmul(handle, product_, &alpha, g.b.data, first_, g.a.data, second_, &beta, addend, result_, c,
                        result_, &candidates_[candidate], workspace, kGemmWorkspaceBytes, to_cuda(stream));
}

void GemmPlan::run(const GemmArguments& g, cublasLtHandle_t handle, void* workspace, StreamRef stream) const {
  check(launch(chosen_, g, g.c, handle, workspace, stream), "cublasLtMatmul");
}

bool GemmPlan::try_candidate(int candidate, const GemmArguments& g, void* c, cublasLtHandle_t handle, void* workspace,
                             StreamRef stream) const {
  const bool ran =
      launch(static_cast<std::size_t>(candidate), g, c, handle, workspace, stream) == CUBLAS_STATUS_SUCCESS;
  return cudaGetLastError() == cudaSuccess && ran;
}

std::shared_ptr<const GemmPlan> GemmPlanCache::find_or_make(const GemmKey& key, const Factory& make) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<const GemmPlan>& plan = plans_[key];
  if (!plan) plan = make(key);
  return plan;
}

namespace {

/// What a choice is filed under.
std::string tuning_key(const GemmKey& k, const std::string& machine) {
  return fmt::format(
      "gemm {} batch {} m {} n {} k {} ld {} {} {} batch strides {} {} {} transposed {} {} reads c {} tf32 {} {} to {} "
      "aligned {} {} {}",
      machine, k.batch, k.m, k.n, k.k, k.lda, k.ldb, k.ldc, k.a_batch_stride, k.b_batch_stride, k.c_batch_stride,
      int{k.a_transposed}, int{k.b_transposed}, int{k.reads_c}, int{k.allow_tf32}, to_string(k.dtype),
      to_string(k.c_dtype), k.a_alignment, k.b_alignment, k.c_alignment);
}

/// Device memory from the stream's allocator while it lives.
class Scratch {
 public:
  Scratch(std::size_t bytes, StreamRef stream)
      : allocator_(current_allocator(stream.device())), bytes_(bytes), stream_(stream) {
    data_ = allocator_->allocate(bytes, stream);
  }
  ~Scratch() { allocator_->deallocate(data_, bytes_, stream_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  AllocatorPtr allocator_;
  std::size_t bytes_;
  StreamRef stream_;
  void* data_ = nullptr;
};

/// Times the candidates of a plan on the caller's a and b, with a result of its own: c may hold what beta adds to.
class GemmTimer {
 public:
  GemmTimer(const GemmPlan& plan, const GemmArguments& g, cublasLtHandle_t handle, void* workspace, StreamRef stream)
      : plan_(plan),
        arguments_(g),
        handle_(handle),
        workspace_(workspace),
        stream_(stream),
        cold_bytes_(std::max<std::size_t>(device_info(stream.device()).l2_bytes, 1)),
        result_(result_bytes(g) + 256, stream),
        cold_(cold_bytes_, stream),
        begin_(stream.device(), true),
        end_(stream.device(), true) {}

  /// The fastest candidate; the first where it is as fast.
  int best() {
    constexpr std::size_t kFinalists = 4;
    std::vector<std::pair<double, int>> times;
    for (int candidate = 0; candidate < plan_.candidates(); ++candidate) {
      measure(candidate);  // loads the kernel
      times.emplace_back(std::min(measure(candidate), measure(candidate)), candidate);
    }
    std::sort(times.begin(), times.end());
    times.resize(std::min(times.size(), kFinalists));
    for (int round = 0; round < 8; ++round) {
      for (auto& [time, candidate] : times) time = std::min(time, measure(candidate));
    }
    std::sort(times.begin(), times.end());
    for (const auto& [time, candidate] : times) {
      if (candidate == 0 && time <= 1.005 * times.front().first) return 0;
    }
    return std::isfinite(times.front().first) ? times.front().second : 0;
  }

 private:
  static std::size_t result_bytes(const GemmArguments& g) {
    const std::int64_t elements = (g.batch - 1) * g.c_batch_stride + (g.m - 1) * g.ldc + g.n;
    return static_cast<std::size_t>(elements) * size_of(g.c_dtype);
  }

  /// Milliseconds of one run with nothing of it in the L2 cache; infinite where it cannot run.
  double measure(int candidate) {
    cuda::check(cudaMemsetAsync(cold_.data(), 0, cold_bytes_, to_cuda(stream_)), "gemm: tuning");
    begin_.record(stream_);
    const std::uint32_t offset = alignment(arguments_.c) % 256;  // the scratch result is aligned as c is
    const bool ran = plan_.try_candidate(candidate, arguments_, result_.data() + offset, handle_, workspace_, stream_);
    end_.record(stream_);
    while (!end_.query()) std::this_thread::yield();
    return ran ? begin_.elapsed_ms(end_) : std::numeric_limits<double>::infinity();
  }

  const GemmPlan& plan_;
  const GemmArguments& arguments_;
  cublasLtHandle_t handle_;
  void* workspace_;
  StreamRef stream_;
  std::size_t cold_bytes_;
  Scratch result_, cold_;
  Event begin_, end_;
};

/// Below this many operations the candidates differ by less than a launch takes.
constexpr double kLeastOperationsToTune = 1e8;

bool worth_tuning(const GemmPlan& plan, const GemmArguments& g, StreamRef stream) {
  const double operations = 2.0 * static_cast<double>(g.batch) * static_cast<double>(g.m) * static_cast<double>(g.n) *
                            static_cast<double>(g.k);
  return plan.candidates() > 1 && operations >= kLeastOperationsToTune && Tuning::process().measures() &&
         !stream.capturing();
}

/// A plan with the candidate on file, or the one that is measured now, or cuBLASLt's first.
std::shared_ptr<const GemmPlan> make_plan(const GemmKey& key, const GemmArguments& g, DeviceState& state,
                                          StreamRef stream) {
  auto plan = std::make_shared<GemmPlan>(key, state.handle);
  if (plan->candidates() == 1 || !Tuning::process().on()) return plan;
  const std::string name = tuning_key(key, state.machine);
  if (const auto known = Tuning::process().find(name); known && known->candidates == plan->candidates()) {
    plan->choose(known->candidate);
  } else if (worth_tuning(*plan, g, stream)) {
    try {
      const int best = GemmTimer(*plan, g, state.handle, workspace(state, stream), stream).best();
      plan->choose(best);
      Tuning::process().put(name, {best, plan->candidates()});
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kOutOfMemory) throw;  // without room to measure the first candidate serves
    }
  }
  return plan;
}

}  // namespace

void gemm(const GemmArguments& g, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  DeviceState& state = device_state(stream.device());
  const auto plan = state.plans.find_or_make(GemmKey(g, stream.device().index),
                                             [&](const GemmKey& key) { return make_plan(key, g, state, stream); });
  plan->run(g, state.handle, workspace(state, stream), stream);
}

}  // namespace rowan::cuda
