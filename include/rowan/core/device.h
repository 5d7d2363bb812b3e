// Where memory lives and work runs.
#pragma once

#include <string>

namespace rowan {

enum class DeviceType { kCpu, kCuda };

/// The CPU, or one CUDA device by its index.
struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;

  static Device cpu() noexcept { return {}; }
  static Device cuda(int index = 0) noexcept { return {DeviceType::kCuda, index}; }
  bool is_cpu() const noexcept { return type == DeviceType::kCpu; }
  bool is_cuda() const noexcept { return type == DeviceType::kCuda; }
  friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu" or "cuda:0".
std::string to_string(Device device);

/// Parses "cpu", "cuda", "cuda:N" or "auto" (the first CUDA device when there is one, else the CPU).
/// Throws InvalidArgument on other text, Unsupported when CUDA is named but not built in or no such device is present.
Device parse_device(const std::string& text);

/// Number of usable CUDA devices: 0 in a build without CUDA and on a machine without a driver. Never throws.
int cuda_device_count() noexcept;

/// Checks that this build holds code for the device, and names the architecture to add when it does not (Unsupported).
void require_device(Device device);

/// What a CUDA device is. Throws Unsupported where there is none.
struct DeviceInfo {
  std::string name;
  int major = 0;  ///< compute capability
  int minor = 0;
  int multiprocessors = 0;
  std::size_t memory_bytes = 0;
  std::size_t l2_bytes = 0;
  int driver = 0;   ///< CUDA version the driver supports, 1000 * major + 10 * minor
  int runtime = 0;  ///< CUDA runtime version, the same way
};
DeviceInfo device_info(Device device);

}  // namespace rowan
