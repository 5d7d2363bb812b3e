# Shared by tests/run.sh and apps/demo.sh: what the machine offers, and one configure-and-build step. To be sourced.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# stage NAME COMMAND...: runs it and says how many seconds it took.
stage() {
  local name=$1 began=$SECONDS status=0
  shift
  echo "== $name"
  "$@" || status=$?
  echo "== $name: $((SECONDS - began)) s"
  return "$status"
}

# As many compilers at once as there are cores, and 2 GiB of free memory for each.
build_jobs() {
  local cores memory
  cores=$(nproc)
  memory=$(awk '/^MemAvailable/ { print int($2 / 2097152) }' /proc/meminfo)
  if [[ -r /sys/fs/cgroup/memory.max && $(< /sys/fs/cgroup/memory.max) != max ]]; then
    local limit=$(($(< /sys/fs/cgroup/memory.max) / 2147483648))
    memory=$((limit < memory ? limit : memory))
  fi
  local jobs=$((memory < cores ? memory : cores))
  echo $((jobs > 1 ? jobs : 1))
}

has_nvcc() { [[ -n "${CUDACXX:-}" || -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" || -x /usr/local/cuda/bin/nvcc ]] || command -v nvcc > /dev/null; }
has_gpu() { nvidia-smi -L 2> /dev/null | grep -q '^GPU '; }

# configure_and_build PRESET TARGET [CMAKE ARGUMENT...]; the compilers' output is also kept in build/PRESET/build.log.
configure_and_build() {
  local preset=$1 target=$2
  shift 2
  stage "configure $preset" cmake --preset "$preset" "$@"
  stage "build $preset" build_target "$preset" "$target"
}
build_target() {  # -k 0: goes on after an error, to show all of them
  cmake --build --preset "$1" --target "$2" --parallel "$(build_jobs)" -- -k 0 2>&1 | tee "build/$1/build.log"
}

if command -v ccache > /dev/null; then
  export CMAKE_CXX_COMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER:-ccache} CMAKE_CUDA_COMPILER_LAUNCHER=${CMAKE_CUDA_COMPILER_LAUNCHER:-ccache}
  export CCACHE_BASEDIR=${CCACHE_BASEDIR:-$PWD} CCACHE_NOHASHDIR=${CCACHE_NOHASHDIR:-1}
fi
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive} # idle threads leave the cores to others
