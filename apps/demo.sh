#!/usr/bin/env bash
# Installs what is missing, builds rowan and runs its demo: on the GPU where there is one with nvcc beside it, otherwise on the CPU.
# Arguments go to `rowan demo`; `apps/demo.sh --help` lists them.
set -euo pipefail
caller=$PWD
source "$(dirname "${BASH_SOURCE[0]}")/../third_party/build.sh"

preset=cpu
if has_nvcc && has_gpu; then preset=cuda; fi
stage dependencies bash third_party/install-deps.sh
configure_and_build "$preset" rowan-program
program=$PWD/build/$preset/bin/rowan
cd "$caller"  # relative paths in the arguments are the caller's
exec "$program" demo "$@"
