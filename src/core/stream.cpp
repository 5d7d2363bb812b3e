#include "rowan/core/stream.h"

#include <chrono>
#include <utility>

#include "core/check.h"
#include "core/runtime.h"

namespace rowan {

void StreamRef::synchronize() const {
  if (device_.is_cuda()) cuda::synchronize(*this);
}

bool StreamRef::query() const { return device_.is_cpu() || cuda::query(*this); }

bool StreamRef::capturing() const { return device_.is_cuda() && cuda::capturing(*this); }

void StreamRef::wait(const Event& event) const {
  if (event.device().is_cpu()) return;  // CPU work is done when it returns
  if (device_.is_cpu()) {
    event.synchronize();
  } else {
    cuda::wait_event(*this, event.handle());
  }
}

Stream::Stream(Device device) {
  require_device(device);
  ref_ = StreamRef(device, device.is_cuda() ? cuda::acquire_stream(device) : nullptr);
}

Stream::~Stream() {
  if (ref_.handle() != nullptr) cuda::release_stream(ref_.device(), ref_.handle());
}

Stream::Stream(Stream&& other) noexcept : ref_(std::exchange(other.ref_, StreamRef())) {}

Stream& Stream::operator=(Stream&& other) noexcept {
  std::swap(ref_, other.ref_);
  return *this;
}

Event::Event(Device device, bool timing) : device_(device) {
  require_device(device);
  if (device.is_cuda()) handle_ = cuda::create_event(device, timing);
}

Event::~Event() {
  if (handle_ != nullptr) cuda::destroy_event(device_, handle_);
}

Event::Event(Event&& other) noexcept
    : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)), recorded_ms_(other.recorded_ms_) {}

Event& Event::operator=(Event&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(handle_, other.handle_);
  std::swap(recorded_ms_, other.recorded_ms_);
  return *this;
}

void Event::record(StreamRef stream) {
  detail::require(stream.device() == device_, "Event::record: expected a stream of {}, got {}", device_,
                  stream.device());
  if (device_.is_cuda()) {
    cuda::record_event(handle_, stream);
  } else {
    recorded_ms_ =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
}

void Event::synchronize() const {
  if (device_.is_cuda()) cuda::synchronize_event(handle_);
}

bool Event::query() const { return device_.is_cpu() || cuda::query_event(handle_); }

double Event::elapsed_ms(const Event& end) const {
  detail::require(end.device_ == device_, "Event::elapsed_ms: expected two events of {}, got one of {}", device_,
                  end.device_);
  return device_.is_cuda() ? cuda::elapsed_ms(handle_, end.handle_) : end.recorded_ms_ - recorded_ms_;
}

}  // namespace rowan
