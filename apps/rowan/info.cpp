#include "info.h"

#include <fmt/format.h>

#include "rowan/core/build_info.h"
#include "rowan/core/device.h"

namespace rowan::app {

void print_info(std::ostream& out) {
  const BuildInfo& info = build_info();
  const auto or_none = [](const std::string& text) { return text.empty() ? std::string("none") : text; };
  out << fmt::format("rowan {}\ncompiler  {}\nBLAS      {}\nCUDA      {}\nNCCL      {}\n", info.version, info.compiler,
                     info.blas.empty() ? "none (plain loops)" : info.blas,
                     info.cuda.empty() ? "none" : fmt::format("{}, code for {}", info.cuda, info.architectures),
                     or_none(info.nccl));
  const int devices = cuda_device_count();
  if (devices == 0) out << "devices   cpu\n";
  for (int i = 0; i < devices; ++i) {
    const DeviceInfo d = device_info(Device::cuda(i));
    out << fmt::format(
        "devices   cuda:{} {} (compute capability {}.{}, {} multiprocessors, {:.1f} GiB, driver for CUDA {}.{})\n", i,
        d.name, d.major, d.minor, d.multiprocessors, static_cast<double>(d.memory_bytes) / (1 << 30), d.driver / 1000,
        d.driver % 1000 / 10);
  }
}

}  // namespace rowan::app
