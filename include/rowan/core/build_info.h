// What this library was built with.
#pragma once

#include <string>

namespace rowan {

struct BuildInfo {
  std::string version;
  std::string cuda;           ///< toolkit version, empty in a build without CUDA
  std::string nccl;           ///< empty in a build without NCCL
  std::string blas;           ///< for example "OpenBLAS 0.3.21 (openmp)", empty when plain loops are used
  std::string architectures;  ///< CUDA architectures compiled in
  std::string compiler;
  std::string commit;  ///< of the source, empty where it was not built from a checkout
};

const BuildInfo& build_info();

}  // namespace rowan
