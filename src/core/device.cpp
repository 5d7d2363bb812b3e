#include "rowan/core/device.h"

#include <charconv>

#include "core/check.h"
#include "core/runtime.h"

namespace rowan {

std::string to_string(Device device) { return device.is_cpu() ? "cpu" : "cuda:" + std::to_string(device.index); }

int cuda_device_count() noexcept { return cuda::device_count(); }

Device parse_device(const std::string& text) {
  if (text == "cpu") return Device::cpu();
  if (text == "auto") return cuda_device_count() > 0 ? Device::cuda(0) : Device::cpu();
  constexpr std::string_view kCuda = "cuda";
  if (text.starts_with(kCuda)) {
    int index = 0;
    bool valid = text == kCuda;
    if (!valid && text[kCuda.size()] == ':') {
      const char* first = text.data() + kCuda.size() + 1;
      const char* last = text.data() + text.size();
      const auto [end, error] = std::from_chars(first, last, index);
      valid = error == std::errc() && end == last && index >= 0;
    }
    if (valid) {
      require_device(Device::cuda(index));
      return Device::cuda(index);
    }
  }
  detail::fail(ErrorKind::kInvalidArgument, "device: expected cpu, cuda, cuda:N or auto, got '{}'", text);
}

void require_device(Device device) {
  if (device.is_cuda()) cuda::require_device(device);
}

DeviceInfo device_info(Device device) {
  detail::require(device.is_cuda(), "device_info: expected a CUDA device, got {}", device);
  require_device(device);
  return cuda::device_info(device);
}

}  // namespace rowan
