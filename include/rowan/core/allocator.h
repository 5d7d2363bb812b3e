// Stream-ordered memory, and adaptors that observe or restrict it. Behaviours stack: each adaptor wraps another
// allocator.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "rowan/core/stream.h"

namespace rowan {

/// Hands out memory of one device in the order of a stream. Thread-safe.
class Allocator {
 public:
  virtual ~Allocator() = default;
  /// At least `bytes` bytes (zero gives null), aligned to 256, usable by work on `stream` from now on.
  /// Throws OutOfMemory with the byte count; an earlier failure does not affect later calls.
  virtual void* allocate(std::size_t bytes, StreamRef stream) = 0;
  /// Returns memory; work already on `stream` may still use it.
  virtual void deallocate(void* pointer, std::size_t bytes, StreamRef stream) noexcept = 0;
  virtual Device device() const noexcept = 0;
};

using AllocatorPtr = std::shared_ptr<Allocator>;

/// The allocator that Tensor uses on a device. CPU: aligned host memory. CUDA: one stream-ordered pool a device that
/// keeps freed memory (cudaMallocAsync with the release threshold at maximum).
AllocatorPtr current_allocator(Device device);

/// Page-locked host memory for overlapping copies; plain host memory in a build without CUDA. Its device is the CPU.
AllocatorPtr pinned_allocator();

/// Replaces the current allocator of a device for the whole process while it lives; nests.
class ScopedAllocator {
 public:
  explicit ScopedAllocator(AllocatorPtr allocator);
  ~ScopedAllocator();
  ScopedAllocator(const ScopedAllocator&) = delete;
  ScopedAllocator& operator=(const ScopedAllocator&) = delete;

 private:
  AllocatorPtr previous_;
};

/// Names the allocations that this thread makes while it lives ("activations", "optimizer"); nests, the innermost
/// counts.
class AllocationLabel {
 public:
  explicit AllocationLabel(const char* label) noexcept;
  ~AllocationLabel();
  AllocationLabel(const AllocationLabel&) = delete;
  AllocationLabel& operator=(const AllocationLabel&) = delete;
  /// The innermost label of this thread, "unnamed" when there is none.
  static const char* current() noexcept;

 private:
  const char* previous_;
};

/// Counts bytes by label, with peaks; out-of-memory errors that pass through it carry its table of who holds what.
class TrackingAllocator final : public Allocator {
 public:
  struct Usage {
    std::string label;
    std::size_t bytes = 0;
    std::size_t peak_bytes = 0;
    std::size_t allocations = 0;  ///< living now
  };

  explicit TrackingAllocator(AllocatorPtr upstream);
  void* allocate(std::size_t bytes, StreamRef stream) override;
  void deallocate(void* pointer, std::size_t bytes, StreamRef stream) noexcept override;
  Device device() const noexcept override { return upstream_->device(); }

  std::size_t bytes() const;
  std::size_t peak_bytes() const;
  /// Allocations made so far, freed ones included.
  std::size_t total_allocations() const;
  /// Sets the peak to what is held now.
  void reset_peak();
  /// By label, largest first.
  std::vector<Usage> usage() const;
  /// The same as text, one line a label; empty when nothing is held (a leak report at the end of a test).
  std::string report() const;

 private:
  std::string report_locked() const;

  AllocatorPtr upstream_;
  mutable std::mutex mutex_;
  std::unordered_map<void*, std::string> living_;
  std::map<std::string, Usage> labels_;
  std::size_t bytes_ = 0;
  std::size_t peak_bytes_ = 0;
  std::size_t total_ = 0;
};

/// Throws OutOfMemory where more than `limit` bytes would be held at once: forces those paths in tests.
class LimitingAllocator final : public Allocator {
 public:
  LimitingAllocator(AllocatorPtr upstream, std::size_t limit);
  void* allocate(std::size_t bytes, StreamRef stream) override;
  void deallocate(void* pointer, std::size_t bytes, StreamRef stream) noexcept override;
  Device device() const noexcept override { return upstream_->device(); }
  void set_limit(std::size_t limit);

 private:
  AllocatorPtr upstream_;
  std::mutex mutex_;
  std::size_t limit_;
  std::size_t bytes_ = 0;
};

/// Fills new memory with bytes that read as NaN in every floating type, and keeps guard zones on both sides that
/// deallocate checks. For tests; `violations()` counts damaged guards.
class PoisonAllocator final : public Allocator {
 public:
  explicit PoisonAllocator(AllocatorPtr upstream);
  void* allocate(std::size_t bytes, StreamRef stream) override;
  void deallocate(void* pointer, std::size_t bytes, StreamRef stream) noexcept override;
  Device device() const noexcept override { return upstream_->device(); }
  std::size_t violations() const;

 private:
  AllocatorPtr upstream_;
  mutable std::mutex mutex_;
  std::size_t violations_ = 0;
};

}  // namespace rowan
