#include "rowan/core/build_info.h"

#include "rowan_build_config.h"

namespace rowan {

const BuildInfo& build_info() {
  static const BuildInfo info{ROWAN_VERSION, ROWAN_CUDA_VERSION,      ROWAN_NCCL_VERSION,
                              ROWAN_BLAS,    ROWAN_CUDA_ARCHS_STRING, ROWAN_COMPILER, ROWAN_COMMIT};
  return info;
}

}  // namespace rowan
