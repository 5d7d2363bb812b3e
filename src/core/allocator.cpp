#include "rowan/core/allocator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

#include "core/check.h"
#include "core/runtime.h"

namespace rowan {

namespace {

constexpr std::size_t kAlignment = 256;

class HostAllocator final : public Allocator {
 public:
  void* allocate(std::size_t bytes, StreamRef) override {
    if (bytes == 0) return nullptr;
    void* pointer = ::operator new(bytes, std::align_val_t(kAlignment), std::nothrow);
    if (pointer == nullptr) detail::fail(ErrorKind::kOutOfMemory, "allocate: out of host memory for {} bytes", bytes);
    return pointer;
  }
  void deallocate(void* pointer, std::size_t, StreamRef) noexcept override {
    ::operator delete(pointer, std::align_val_t(kAlignment));
  }
  Device device() const noexcept override { return Device::cpu(); }
};

struct Registry {
  std::mutex mutex;
  std::map<int, AllocatorPtr> cuda;  // by device index
  AllocatorPtr cpu = std::make_shared<HostAllocator>();
};

Registry& registry() {
  static Registry* const instance =
      new Registry;  // never destroyed: tensors with static lifetime may outlive everything else
  return *instance;
}

AllocatorPtr& slot(Registry& all, Device device) {
  if (device.is_cpu()) return all.cpu;
  AllocatorPtr& allocator = all.cuda[device.index];
  if (!allocator) allocator = cuda::pool_allocator(device);
  return allocator;
}

thread_local const char* current_label = "unnamed";

}  // namespace

AllocatorPtr current_allocator(Device device) {
  require_device(device);
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return slot(all, device);
}

AllocatorPtr pinned_allocator() { return cuda::pinned_allocator(); }

ScopedAllocator::ScopedAllocator(AllocatorPtr allocator) {
  detail::require(allocator != nullptr, "ScopedAllocator: expected an allocator, got none");
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  previous_ = std::exchange(slot(all, allocator->device()), allocator);
}

ScopedAllocator::~ScopedAllocator() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  slot(all, previous_->device()) = previous_;
}

AllocationLabel::AllocationLabel(const char* label) noexcept : previous_(std::exchange(current_label, label)) {}
AllocationLabel::~AllocationLabel() { current_label = previous_; }
const char* AllocationLabel::current() noexcept { return current_label; }

// TrackingAllocator

TrackingAllocator::TrackingAllocator(AllocatorPtr upstream) : upstream_(std::move(upstream)) {}

void* TrackingAllocator::allocate(std::size_t bytes, StreamRef stream) {
  if (bytes == 0) return nullptr;
  void* pointer = nullptr;
  try {
    pointer = upstream_->allocate(bytes, stream);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kOutOfMemory) throw;
    const std::lock_guard lock(mutex_);
    detail::fail(ErrorKind::kOutOfMemory, "{} (for {})\nheld now:\n{}", error.what(), AllocationLabel::current(),
                 report_locked());
  }
  const std::lock_guard lock(mutex_);
  Usage& usage = labels_[AllocationLabel::current()];
  usage.label = AllocationLabel::current();
  usage.bytes += bytes;
  usage.peak_bytes = std::max(usage.peak_bytes, usage.bytes);
  ++usage.allocations;
  living_[pointer] = usage.label;
  bytes_ += bytes;
  peak_bytes_ = std::max(peak_bytes_, bytes_);
  ++total_;
  return pointer;
}

void TrackingAllocator::deallocate(void* pointer, std::size_t bytes, StreamRef stream) noexcept {
  if (pointer == nullptr) return;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = living_.find(pointer); found != living_.end()) {
      Usage& usage = labels_[found->second];
      usage.bytes -= bytes;
      --usage.allocations;
      bytes_ -= bytes;
      living_.erase(found);
    }
  }
  upstream_->deallocate(pointer, bytes, stream);
}

std::size_t TrackingAllocator::bytes() const {
  const std::lock_guard lock(mutex_);
  return bytes_;
}

std::size_t TrackingAllocator::peak_bytes() const {
  const std::lock_guard lock(mutex_);
  return peak_bytes_;
}

std::size_t TrackingAllocator::total_allocations() const {
  const std::lock_guard lock(mutex_);
  return total_;
}

void TrackingAllocator::reset_peak() {
  const std::lock_guard lock(mutex_);
  peak_bytes_ = bytes_;
  for (auto& [label, usage] : labels_) usage.peak_bytes = usage.bytes;
}

std::vector<TrackingAllocator::Usage> TrackingAllocator::usage() const {
  const std::lock_guard lock(mutex_);
  std::vector<Usage> all;
  for (const auto& [label, usage] : labels_) all.push_back(usage);
  std::stable_sort(all.begin(), all.end(), [](const Usage& a, const Usage& b) { return a.bytes > b.bytes; });
  return all;
}

std::string TrackingAllocator::report() const {
  const std::lock_guard lock(mutex_);
  return report_locked();
}

std::string TrackingAllocator::report_locked() const {
  std::string text;
  for (const auto& [label, usage] : labels_) {
    if (usage.allocations > 0)
      text += fmt::format("  {:<24} {:>14} bytes in {} allocations\n", label, usage.bytes, usage.allocations);
  }
  return text;
}

// LimitingAllocator

LimitingAllocator::LimitingAllocator(AllocatorPtr upstream, std::size_t limit)
    : upstream_(std::move(upstream)), limit_(limit) {}

void* LimitingAllocator::allocate(std::size_t bytes, StreamRef stream) {
  {
    const std::lock_guard lock(mutex_);
    if (bytes > limit_ || bytes_ > limit_ - bytes) {
      detail::fail(ErrorKind::kOutOfMemory, "allocate: {} bytes would pass the limit of {} bytes ({} held)", bytes,
                   limit_, bytes_);
    }
    bytes_ += bytes;
  }
  try {
    return upstream_->allocate(bytes, stream);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    bytes_ -= bytes;
    throw;
  }
}

void LimitingAllocator::deallocate(void* pointer, std::size_t bytes, StreamRef stream) noexcept {
  upstream_->deallocate(pointer, bytes, stream);
  const std::lock_guard lock(mutex_);
  bytes_ -= bytes;
}

void LimitingAllocator::set_limit(std::size_t limit) {
  const std::lock_guard lock(mutex_);
  limit_ = limit;
}

// PoisonAllocator

namespace {

constexpr std::size_t kGuardBytes = kAlignment;  // keeps the alignment of what lies between
constexpr unsigned char kPoison = 0xFF;          // all ones: NaN in float64, float32, bfloat16 and float16
constexpr unsigned char kGuard = 0xA5;

void fill_bytes(void* destination, unsigned char value, std::size_t bytes, StreamRef stream) {
  if (stream.device().is_cpu()) {
    std::memset(destination, value, bytes);
    return;
  }
  const std::vector<unsigned char> host(bytes, value);
  cuda::copy_rows({destination, host.data(), 1, 1, {static_cast<std::int64_t>(bytes)}, {1}, {1}}, stream);
  stream.synchronize();
}

bool all_bytes(const void* source, unsigned char value, std::size_t bytes, StreamRef stream) {
  std::vector<unsigned char> host(bytes);
  if (stream.device().is_cpu()) {
    std::memcpy(host.data(), source, bytes);
  } else {
    cuda::copy_rows({host.data(), source, 1, 1, {static_cast<std::int64_t>(bytes)}, {1}, {1}}, stream);
    stream.synchronize();
  }
  return std::ranges::all_of(host, [value](unsigned char byte) { return byte == value; });
}

}  // namespace

PoisonAllocator::PoisonAllocator(AllocatorPtr upstream) : upstream_(std::move(upstream)) {}

void* PoisonAllocator::allocate(std::size_t bytes, StreamRef stream) {
  if (bytes == 0) return nullptr;
  auto* base = static_cast<std::byte*>(upstream_->allocate(bytes + 2 * kGuardBytes, stream));
  fill_bytes(base, kGuard, kGuardBytes, stream);
  fill_bytes(base + kGuardBytes, kPoison, bytes, stream);
  fill_bytes(base + kGuardBytes + bytes, kGuard, kGuardBytes, stream);
  return base + kGuardBytes;
}

void PoisonAllocator::deallocate(void* pointer, std::size_t bytes, StreamRef stream) noexcept {
  if (pointer == nullptr) return;
  std::byte* const base = static_cast<std::byte*>(pointer) - kGuardBytes;
  bool intact = false;
  try {
    intact = all_bytes(base, kGuard, kGuardBytes, stream) &&
             all_bytes(base + kGuardBytes + bytes, kGuard, kGuardBytes, stream);
  } catch (...) {  // a device that cannot be read counts as damaged
  }
  if (!intact) {
    const std::lock_guard lock(mutex_);
    ++violations_;
  }
  upstream_->deallocate(base, bytes + 2 * kGuardBytes, stream);
}

std::size_t PoisonAllocator::violations() const {
  const std::lock_guard lock(mutex_);
  return violations_;
}

}  // namespace rowan
