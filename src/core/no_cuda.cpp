// Stands in for the CUDA runtime in a build without it.
#include "core/runtime.h"
#include "rowan/core/error.h"

namespace rowan::cuda {

namespace {
[[noreturn]] void unsupported() { throw Error(ErrorKind::kUnsupported, "CUDA: this rowan was built without CUDA"); }
}  // namespace

int device_count() noexcept { return 0; }
DeviceInfo device_info(Device) { unsupported(); }
void require_device(Device) { unsupported(); }
void* acquire_stream(Device) { unsupported(); }
void release_stream(Device, void*) noexcept {}
void synchronize(StreamRef) { unsupported(); }
bool query(StreamRef) { unsupported(); }
bool capturing(StreamRef) { unsupported(); }
void* create_event(Device, bool) { unsupported(); }
void destroy_event(Device, void*) noexcept {}
void record_event(void*, StreamRef) { unsupported(); }
void wait_event(StreamRef, void*) { unsupported(); }
void synchronize_event(void*) { unsupported(); }
bool query_event(void*) { unsupported(); }
double elapsed_ms(void*, void*) { unsupported(); }
AllocatorPtr pool_allocator(Device) { unsupported(); }
AllocatorPtr pinned_allocator() { return current_allocator(Device::cpu()); }
void copy_rows(const StridedCopy&, StreamRef) { unsupported(); }
void copy_strided(const StridedCopy&, StreamRef) { unsupported(); }
void probe_kernels(Device) { unsupported(); }

}  // namespace rowan::cuda
