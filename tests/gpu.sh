#!/usr/bin/env bash
# Everything that needs a GPU, in one call: builds the CUDA preset, runs the whole suite in one process, then [sanitize] under
# compute-sanitizer, then the demo on CPU and CUDA. Logs go to the folder given; a short table closes the output, and the status is 1
# when anything failed.
# Usage: tests/gpu.sh LOG_FOLDER [build] [tests] [sanitize] [demo]   (default: all)
set -uo pipefail
logs=$(realpath -m "${1:?usage: tests/gpu.sh LOG_FOLDER [build] [tests] [sanitize] [demo]}")
shift
stages=${*:-build tests sanitize demo}
source "$(dirname "${BASH_SOURCE[0]}")/../third_party/build.sh"
mkdir -p "$logs"
table=()
failed=0

# timed NAME LOG COMMAND...: one row of the table.
timed() {
  local name=$1 log=$logs/$2 began=$SECONDS status=0
  shift 2
  "$@" > "$log" 2>&1 || status=$?
  table+=("$(printf '%-28s status %-3s %4d s' "$name" "$status" $((SECONDS - began)))")
  if ((status != 0)); then failed=1; fi
  return "$status"
}

build() {
  cmake --preset cuda -DROWAN_CUDA_ARCHS=90a-real && cmake --build --preset cuda --parallel "$(nproc)" -- -k 0
}

for stage in $stages; do
  case $stage in
    build) timed build build.log build || grep -E "error|FAILED" "$logs/build.log" | head -40 ;;
    tests)
      timed "rowan-tests, all cases" tests.log build/cuda/bin/rowan-tests || grep -E -B12 "FAILED|due to" "$logs/tests.log" | head -150
      tail -3 "$logs/tests.log"
      ;;
    sanitize)
      for tool in ${SANITIZE_TOOLS:-memcheck}; do
        timed "compute-sanitizer $tool" "$tool.log" compute-sanitizer --tool "$tool" --error-exitcode 9 build/cuda/bin/rowan-tests "[sanitize]" ||
          grep -E "=========|FAILED" "$logs/$tool.log" | head -40
        tail -2 "$logs/$tool.log"
      done
      ;;
    demo)
      for device in cuda cpu; do
        for optimizer in muown adamw; do
          timed "demo $device $optimizer" "demo-$device-$optimizer.log" build/cuda/bin/rowan demo --json --device "$device" --optimizer "$optimizer" --out "build/demo-$device-$optimizer"
          tail -1 "$logs/demo-$device-$optimizer.log"
        done
      done
      # What one device saved, evaluated on the other.
      for device in cuda cpu; do
        for saved in cuda cpu; do
          printf 'eval on %-4s of the %-4s run: ' "$device" "$saved"
          build/cuda/bin/rowan eval --json --device "$device" --model "build/demo-$saved-muown/base" --adapter "build/demo-$saved-muown/adapter" --data "build/demo-$saved-muown/held-out-2.jsonl" || failed=1
        done
      done
      for run in cuda-muown cpu-muown; do head -20 "build/demo-$run/metrics.jsonl" | sed 's/.*"loss"://; s/,.*//' > "$logs/$run.losses"; done
      paste "$logs/cuda-muown.losses" "$logs/cpu-muown.losses" | awk '{ d = ($1 - $2) / $2; if (d < 0) d = -d; if (d > m) m = d } END { print "first 20 losses, CUDA against CPU: largest relative difference " m; exit !(NR > 0 && m <= 1e-3) }' || failed=1
      ;;
    *) echo "tests/gpu.sh: unknown stage $stage" >&2 && exit 2 ;;
  esac
done
printf '%s\n' "${table[@]}"
exit "$failed"
