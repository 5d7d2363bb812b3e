#!/usr/bin/env bash
# Installs what is missing, builds rowan and runs every test. Where nvcc is found the CUDA backend is compiled too, and where a GPU
# is present its tests run.
#   --werror     compiler warnings are errors
#   --all-archs  CUDA code for every listed architecture instead of this machine's GPU (or sm_90a where there is none)
#   --asan       also the CPU tests under the address and undefined-behaviour sanitizers
set -euo pipefail
options=()
all_archs=no
asan=no
for argument in "$@"; do
  case $argument in
    --werror) options+=(-DROWAN_WERROR=ON) ;;
    --all-archs) all_archs=yes ;;
    --asan) asan=yes ;;
    *) echo "tests/run.sh: unknown option $argument (known: --werror --all-archs --asan)" >&2 && exit 2 ;;
  esac
done
source "$(dirname "${BASH_SOURCE[0]}")/../third_party/build.sh"

stage dependencies bash third_party/install-deps.sh
configure_and_build cpu all "${options[@]}"
stage "test cpu" ctest --preset cpu --parallel "$(nproc)"

if has_nvcc; then
  archs=90a-real
  if has_gpu; then archs=""; fi
  if [[ $all_archs == yes ]]; then archs=all; fi
  configure_and_build cuda all "-DROWAN_CUDA_ARCHS=$archs" "${options[@]}"
  if has_gpu; then
    stage "test cuda" ctest --preset cuda --parallel 4
  else
    # Without a driver the program must start all the same, and each GPU case say that it is skipped.
    stage "start cuda without a GPU" bash -c 'build/cuda/bin/rowan-tests "[gpu]" > build/cuda/no-gpu.log'
    echo "tests/run.sh: no GPU here: $(grep -c "^SKIPPED: no CUDA device" build/cuda/no-gpu.log) GPU cases are compiled, not run"
  fi
fi
if [[ $asan == yes ]]; then
  configure_and_build asan all "${options[@]}"
  stage "test asan" ctest --preset asan --parallel "$(nproc)"
fi
