// The CUDA runtime behind the core's types.
#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/cuda_check.h"
#include "core/runtime.h"
#include "rowan/core/build_info.h"

namespace rowan::cuda {

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a later check must not report this one again
  const ErrorKind kind = status == cudaErrorMemoryAllocation ? ErrorKind::kOutOfMemory : ErrorKind::kCuda;
  detail::fail(kind, "{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

DeviceGuard::DeviceGuard(Device device) {
  int current = 0;
  check(cudaGetDevice(&current), "cudaGetDevice");
  if (current == device.index) return;
  check(cudaSetDevice(device.index), "cudaSetDevice");
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

int device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {  // no driver, or one that is too old, counts as no device
    cudaGetLastError();
    return 0;
  }
  return count;
}

namespace {

int attribute(cudaDeviceAttr which, Device device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device.index), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

int multiprocessor_count(Device device) {
  static std::mutex mutex;
  static std::map<int, int> counts;
  const std::lock_guard lock(mutex);
  int& count = counts[device.index];
  if (count == 0) count = attribute(cudaDevAttrMultiProcessorCount, device);
  return count;
}

bool has_warpgroup_products(Device device) {
#ifdef ROWAN_WITH_SM90A
  return attribute(cudaDevAttrComputeCapabilityMajor, device) == 9 &&
         attribute(cudaDevAttrComputeCapabilityMinor, device) == 0;
#else
  (void)device;
  return false;
#endif
}

DeviceInfo device_info(Device device) {
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, device.index), "cudaGetDeviceProperties");
  DeviceInfo info;
  info.name = properties.name;
  info.major = properties.major;
  info.minor = properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  info.memory_bytes = properties.totalGlobalMem;
  info.l2_bytes = static_cast<std::size_t>(properties.l2CacheSize);
  check(cudaDriverGetVersion(&info.driver), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&info.runtime), "cudaRuntimeGetVersion");
  return info;
}

void require_device(Device device) {
  static std::mutex mutex;
  static std::map<int, bool> ready;
  const std::lock_guard lock(mutex);
  if (ready[device.index]) return;
  const int count = device_count();
  if (device.index < 0 || device.index >= count) {
    detail::fail(ErrorKind::kUnsupported, "device: expected one of the {} usable CUDA devices, got {}", count, device);
  }
  try {
    probe_kernels(device);
  } catch (const Error&) {
    const int major = attribute(cudaDevAttrComputeCapabilityMajor, device),
              minor = attribute(cudaDevAttrComputeCapabilityMinor, device);
    detail::fail(ErrorKind::kUnsupported,
                 "device: this rowan holds code for CUDA architectures {}, and {} is of {}.{}: configure with {}{} "
                 "added to ROWAN_CUDA_ARCHS",
                 build_info().architectures, device, major, minor, major, minor);
  }
  ready[device.index] = true;
}

// Streams

namespace {

struct StreamPool {
  std::mutex mutex;
  std::map<int, std::vector<cudaStream_t>> idle;
};

StreamPool& stream_pool() {
  static StreamPool* const pool = new StreamPool;  // never destroyed: streams may be released while the process ends
  return *pool;
}

}  // namespace

void* acquire_stream(Device device) {
  {
    StreamPool& pool = stream_pool();
    const std::lock_guard lock(pool.mutex);
    if (auto& idle = pool.idle[device.index]; !idle.empty()) {
      const cudaStream_t stream = idle.back();
      idle.pop_back();
      return stream;
    }
  }
  const DeviceGuard guard(device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return stream;
}

void release_stream(Device device, void* handle) noexcept {
  try {
    StreamPool& pool = stream_pool();
    const std::lock_guard lock(pool.mutex);
    pool.idle[device.index].push_back(static_cast<cudaStream_t>(handle));
  } catch (...) {  // out of host memory: the handle is lost, nothing else
  }
}

void synchronize(StreamRef stream) { check(cudaStreamSynchronize(to_cuda(stream)), "synchronize"); }

bool query(StreamRef stream) {
  const cudaError_t status = cudaStreamQuery(to_cuda(stream));
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check(status, "query");
  return true;
}

bool capturing(StreamRef stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(to_cuda(stream), &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

// Events

void* create_event(Device device, bool timing) {
  const DeviceGuard guard(device);
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, timing ? cudaEventDefault : cudaEventDisableTiming), "cudaEventCreate");
  return event;
}

void destroy_event(Device, void* event) noexcept { cudaEventDestroy(static_cast<cudaEvent_t>(event)); }

void record_event(void* event, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  check(cudaEventRecord(static_cast<cudaEvent_t>(event), to_cuda(stream)), "cudaEventRecord");
}

void wait_event(StreamRef stream, void* event) {
  const DeviceGuard guard(stream.device());
  check(cudaStreamWaitEvent(to_cuda(stream), static_cast<cudaEvent_t>(event), 0), "cudaStreamWaitEvent");
}

void synchronize_event(void* event) {
  check(cudaEventSynchronize(static_cast<cudaEvent_t>(event)), "cudaEventSynchronize");
}

bool query_event(void* event) {
  const cudaError_t status = cudaEventQuery(static_cast<cudaEvent_t>(event));
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check(status, "cudaEventQuery");
  return true;
}

double elapsed_ms(void* begin, void* end) {
  float ms = 0;
  check(cudaEventElapsedTime(&ms, static_cast<cudaEvent_t>(begin), static_cast<cudaEvent_t>(end)),
        "cudaEventElapsedTime");
  return static_cast<double>(ms);
}

// Memory

namespace {

class PoolAllocator final : public Allocator {
 public:
  explicit PoolAllocator(Device device) : device_(device) {
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = device.index;
    check(cudaMemPoolCreate(&pool_, &properties), "cudaMemPoolCreate");
    std::uint64_t keep = UINT64_MAX;  // freed memory stays in the pool: the driver's pool is the cache
    check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep), "cudaMemPoolSetAttribute");
  }

  void* allocate(std::size_t bytes, StreamRef stream) override {
    if (bytes == 0) return nullptr;
    const DeviceGuard guard(device_);
    void* pointer = nullptr;
    const cudaError_t status = cudaMallocFromPoolAsync(&pointer, bytes, pool_, to_cuda(stream));
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      std::size_t free = 0, total = 0;
      cudaMemGetInfo(&free, &total);
      detail::fail(ErrorKind::kOutOfMemory, "allocate: out of memory on {} for {} bytes ({} of {} bytes free)", device_,
                   bytes, free, total);
    }
    check(status, "cudaMallocFromPoolAsync");
    const std::lock_guard lock(mutex_);
    if (capturing(stream)) {
      captured_.insert(pointer);
    } else {
      free_postponed(stream);
    }
    return pointer;
  }

  void deallocate(void* pointer, std::size_t, StreamRef stream) noexcept override {
    if (pointer == nullptr) return;
    try {
      const std::lock_guard lock(mutex_);
      const bool from_capture = captured_.erase(pointer) > 0;
      if (!from_capture && capturing(stream)) {
        postponed_.emplace_back(pointer, stream);
        return;
      }
    } catch (...) {  // a dying process or context
    }
    free_async(pointer, stream);
  }

  Device device() const noexcept override { return device_; }

 private:
  static void free_async(void* pointer, StreamRef stream) noexcept {
    if (cudaFreeAsync(pointer, to_cuda(stream)) != cudaSuccess)
      cudaGetLastError();  // a dying process or context: nothing to free
  }

  void free_postponed(StreamRef stream) {
    std::erase_if(postponed_, [&](const auto& entry) {
      if (entry.second != stream) return false;
      free_async(entry.first, stream);
      return true;
    });
  }

  Device device_;
  cudaMemPool_t pool_ = nullptr;  // lives as long as the process
  // A capture can free only what it allocated. Memory from before it waits for the next allocation after it.
  std::mutex mutex_;
  std::unordered_set<void*> captured_;
  std::vector<std::pair<void*, StreamRef>> postponed_;
};

class PinnedAllocator final : public Allocator {
 public:
  void* allocate(std::size_t bytes, StreamRef) override {
    if (bytes == 0) return nullptr;
    void* pointer = nullptr;
    const cudaError_t status = cudaMallocHost(&pointer, bytes);
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      detail::fail(ErrorKind::kOutOfMemory, "allocate: out of page-locked host memory for {} bytes", bytes);
    }
    check(status, "cudaMallocHost");
    return pointer;
  }
  void deallocate(void* pointer, std::size_t, StreamRef) noexcept override {
    if (pointer != nullptr && cudaFreeHost(pointer) != cudaSuccess) cudaGetLastError();
  }
  Device device() const noexcept override { return Device::cpu(); }
};

}  // namespace

AllocatorPtr pool_allocator(Device device) { return std::make_shared<PoolAllocator>(device); }

AllocatorPtr pinned_allocator() {
  static const AllocatorPtr allocator = std::make_shared<PinnedAllocator>();
  return allocator;
}

void copy_rows(const StridedCopy& copy, StreamRef stream) {
  const DeviceGuard guard(stream.device());
  const bool rows = copy.rank == 2;
  const std::size_t size = copy.element_size;
  const std::size_t width = static_cast<std::size_t>(copy.extents[rows ? 1 : 0]) * size;
  const std::size_t height = rows ? static_cast<std::size_t>(copy.extents[0]) : 1;
  const std::size_t to_pitch = rows ? static_cast<std::size_t>(copy.destination_strides[0]) * size : width;
  const std::size_t from_pitch = rows ? static_cast<std::size_t>(copy.source_strides[0]) * size : width;
  const cudaStream_t handle = to_cuda(stream);
  if (copy.source == nullptr) {
    check(height == 1 ? cudaMemsetAsync(copy.destination, 0, width, handle)
                      : cudaMemset2DAsync(copy.destination, to_pitch, 0, width, height, handle),
          "zero");
  } else {
    check(height == 1 ? cudaMemcpyAsync(copy.destination, copy.source, width, cudaMemcpyDefault, handle)
                      : cudaMemcpy2DAsync(copy.destination, to_pitch, copy.source, from_pitch, width, height,
                                          cudaMemcpyDefault, handle),
          "copy");
  }
}

}  // namespace rowan::cuda
