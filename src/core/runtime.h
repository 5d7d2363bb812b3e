// The seam between the core and the CUDA runtime. Implemented by runtime_cuda.cpp and copy_cuda.cu, or by no_cuda.cpp.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "rowan/core/allocator.h"
#include "rowan/core/device.h"
#include "rowan/core/shape.h"
#include "rowan/core/stream.h"

namespace rowan::cuda {

int device_count() noexcept;
DeviceInfo device_info(Device device);
void require_device(Device device);

/// Streams come from a pool and go back to it; none is ever destroyed, so that a storage may outlive the Stream it was
/// made on.
void* acquire_stream(Device device);
void release_stream(Device device, void* handle) noexcept;
void synchronize(StreamRef stream);
bool query(StreamRef stream);
bool capturing(StreamRef stream);

void* create_event(Device device, bool timing);
void destroy_event(Device device, void* event) noexcept;
void record_event(void* event, StreamRef stream);
void wait_event(StreamRef stream, void* event);
void synchronize_event(void* event);
bool query_event(void* event);
double elapsed_ms(void* begin, void* end);

AllocatorPtr pool_allocator(Device device);
AllocatorPtr pinned_allocator();

/// A copy of equal-shaped strided arrays, innermost dimension last, adjacent dimensions already merged. A null source
/// means zeros.
struct StridedCopy {
  void* destination = nullptr;
  const void* source = nullptr;
  std::size_t element_size = 0;
  int rank = 0;
  std::array<std::int64_t, Shape::kMaxRank> extents{};
  std::array<std::int64_t, Shape::kMaxRank> destination_strides{};  // elements
  std::array<std::int64_t, Shape::kMaxRank> source_strides{};
};

/// At most two dimensions with adjacent elements in rows: any direction between host and device.
void copy_rows(const StridedCopy& copy, StreamRef stream);
/// Any strides, within one device.
void copy_strided(const StridedCopy& copy, StreamRef stream);
/// Throws when the kernels of this build cannot run on the device (a probe, without a launch).
void probe_kernels(Device device);

}  // namespace rowan::cuda
