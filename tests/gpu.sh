#!/usr/bin/env bash
# Everything that needs a GPU, in one call: builds the CUDA preset, runs the whole suite, [sanitize] under the tools of
# compute-sanitizer, the demo on CPU and CUDA, the benchmarks, and the study of default rates. Logs and results go to the folder
# given; a short table closes the output, and the status is 1 when anything failed.
# Usage: tests/gpu.sh LOG_FOLDER [build] [tests] [sanitize] [demo] [bench] [study]   (default: build tests sanitize demo)
# initcheck does not see what cuBLAS stores by the bulk copy engine of Hopper, and reports every reader of a product (seen with
# CUDA 13.0: a program of one cublasGemmEx and a kernel that sums its result).
# Environment: SANITIZE_TOOLS (default: all four), BENCHES (default: lora muown step), ROWAN_COMMIT (named in results where the
# checkout has no git).
set -uo pipefail
logs=$(realpath -m "${1:?usage: tests/gpu.sh LOG_FOLDER [build] [tests] [sanitize] [demo] [bench] [study]}")
shift
stages=${*:-build tests sanitize demo}
source "$(dirname "${BASH_SOURCE[0]}")/../third_party/build.sh"
mkdir -p "$logs"
table=()
failed=0
cores=$(nproc)

# timed NAME LOG COMMAND...: one row of the table.
timed() {
  local name=$1 log=$logs/$2 began=$SECONDS status=0
  shift 2
  "$@" > "$log" 2>&1 || status=$?
  table+=("$(printf '%-28s status %-3s %4d s' "$name" "$status" $((SECONDS - began)))")
  if ((status != 0)); then failed=1; fi
  return "$status"
}

# together NAME LOG COMMAND... beside others of its kind; finish_together waits for all and reports each.
together() {
  (timed "$@"; printf '%s\n' "${table[-1]}" > "$logs/$2.row"; exit "$failed") &
  started+=("$2")
}
finish_together() {
  local log
  wait
  for log in "${started[@]}"; do
    table+=("$(cat "$logs/$log.row")")
    rm "$logs/$log.row"
    [[ ${table[-1]} == *"status 0 "* ]] || { failed=1; grep -E -B12 "FAILED|due to|=========" "$logs/$log" | head -100; }
    tail -3 "$logs/$log"
  done
  started=()
}
started=()

# in_shards NAME LOG THREADS [SPECIFICATION] [TOOL...]: the tests as four processes side by side (Catch2 2 knows no shards: one).
in_shards() {
  local name=$1 log=$2 threads=$3 specification=${4:-} shards=1 shard
  shift $(($# < 4 ? 3 : 4))
  build/cuda/bin/rowan-tests --help | grep -q shard-count && shards=4
  for ((shard = 0; shard < shards; ++shard)); do
    together "$name, part $((shard + 1)) of $shards" "$log-$shard.log" env ROWAN_TUNE=0 OMP_NUM_THREADS="$threads" "$@" \
      build/cuda/bin/rowan-tests ${specification:+"$specification"} $( ((shards > 1)) && echo --shard-count $shards --shard-index $shard)
  done
}

build() {
  cmake --preset cuda -DROWAN_CUDA_ARCHS=90a-real -DROWAN_COMMIT="${ROWAN_COMMIT:-}" && cmake --build --preset cuda --parallel "$(nproc)" -- -k 0
}

for stage in $stages; do
  case $stage in
    build) timed build build.log build || grep -E "error|FAILED" "$logs/build.log" | head -40 ;;
    tests)
      in_shards rowan-tests tests $(((cores + 3) / 4))
      finish_together
      ;;
    sanitize)
      for tool in ${SANITIZE_TOOLS:-memcheck racecheck initcheck synccheck}; do
        in_shards "$tool" "$tool" 1 "[sanitize]" compute-sanitizer --tool "$tool" --error-exitcode 9
      done
      finish_together
      ;;
    bench)
      for bench in ${BENCHES:-lora muown step}; do
        timed "rowan-bench $bench" "bench-$bench.log" build/cuda/bin/rowan-bench "$bench" --peers --results "$logs"
        cat "$logs/bench-$bench.log"
      done
      ;;
    study)
      timed "rowan-bench study" study.log build/cuda/bin/rowan-bench study --results "$logs"
      cat "$logs/study.log"
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
