// Ordered queues of work and marks in them. The CPU stream is synchronous and answers the same calls, so that code
// above the operations is written once for both devices.
#pragma once

#include "rowan/core/device.h"

namespace rowan {

class Event;

/// A cheap view of a stream, passed by value. Default: the CPU stream.
class StreamRef {
 public:
  StreamRef() noexcept = default;
  /// Wraps a foreign cudaStream_t of the device; it must outlive every use.
  StreamRef(Device device, void* handle) noexcept : device_(device), handle_(handle) {}

  Device device() const noexcept { return device_; }
  /// The cudaStream_t; null for the CPU.
  void* handle() const noexcept { return handle_; }
  /// Blocks until all work so far is done; throws Cuda if any of it failed.
  void synchronize() const;
  /// True when all work so far is done; throws Cuda if any of it failed.
  bool query() const;
  /// Later work on this stream waits for the event.
  void wait(const Event& event) const;
  /// True while a CUDA graph is being captured from this stream.
  bool capturing() const;
  friend bool operator==(const StreamRef&, const StreamRef&) = default;

 private:
  Device device_;
  void* handle_ = nullptr;
};

/// Owns a stream of a device (non-blocking with respect to CUDA's default stream).
class Stream {
 public:
  /// Throws Unsupported when the device is not available.
  explicit Stream(Device device);
  ~Stream();
  Stream(Stream&& other) noexcept;
  Stream& operator=(Stream&& other) noexcept;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  StreamRef ref() const noexcept { return ref_; }
  operator StreamRef() const noexcept { return ref_; }
  Device device() const noexcept { return ref_.device(); }
  void synchronize() const { ref_.synchronize(); }

 private:
  StreamRef ref_;
};

/// A mark in a stream that other streams and the host can wait for.
class Event {
 public:
  /// With `timing`, elapsed_ms works between two such events.
  explicit Event(Device device, bool timing = false);
  ~Event();
  Event(Event&& other) noexcept;
  Event& operator=(Event&& other) noexcept;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(StreamRef stream);
  void synchronize() const;
  bool query() const;
  /// Milliseconds from this event to `end`; both recorded, with timing. On the CPU: wall time between the two records.
  double elapsed_ms(const Event& end) const;
  void* handle() const noexcept { return handle_; }
  Device device() const noexcept { return device_; }

 private:
  Device device_;
  void* handle_ = nullptr;  // cudaEvent_t
  double recorded_ms_ = 0;  // CPU
};

}  // namespace rowan
