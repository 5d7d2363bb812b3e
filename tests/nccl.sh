#!/usr/bin/env bash
# Ranks over NCCL, each a process of its own: the checks that run on every communicator, failures, and the demo. With fewer GPUs than
# ranks they share the first one, which NCCL takes for tests alone. A short table closes the output; logs go to the folder given.
# Usage: tests/nccl.sh LOG_FOLDER [build] [checks] [failures] [demo]   (default: all; RANKS="2 4")
set -uo pipefail
logs=$(realpath -m "${1:?usage: tests/nccl.sh LOG_FOLDER [build] [checks] [failures] [demo]}")
shift
stages=${*:-build checks failures demo}
rank_counts=${RANKS:-2 4}
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
mkdir -p "$logs"
table=()
failed=0
gpus=$(nvidia-smi -L 2> /dev/null | grep -c '^GPU ')
tests=build/cuda/bin/rowan-tests
port=29600

# row NAME BEGAN STATUS
row() {
  table+=("$(printf '%-44s %-6s %4d s' "$1" "$([[ $3 == 0 ]] && echo passed || echo FAILED)" $((SECONDS - $2)))")
  [[ $3 == 0 ]] || failed=1
}

# start_ranks ROLE RANKS [VARIABLE=VALUE...]: their process numbers go to pids.
start_ranks() {
  local role=$1 ranks=$2
  shift 2
  port=$((port + 1))
  pids=()
  for ((r = 0; r < ranks; ++r)); do
    env RANK="$r" LOCAL_RANK="$r" WORLD_SIZE="$ranks" MASTER_ADDR=127.0.0.1 MASTER_PORT="$port" OMP_NUM_THREADS=1 \
      ROWAN_TEST_ROLE="$role" ROWAN_TEST_DEVICE="cuda:$((gpus >= ranks ? r : 0))" "$@" \
      timeout "${CHECK_TIMEOUT:-120}" "$tests" "[.rank]" > "$logs/$role-$ranks-$r.log" 2>&1 &
    pids+=($!)
  done
}

# All ranks of a check end with status 0.
check() {
  local role=$1 ranks=$2 began=$SECONDS status=0
  start_ranks "$role" "$ranks"
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  row "$role, $ranks ranks" "$began" "$status"
  [[ $status == 0 ]] || head -c 1500 "$logs/$role-$ranks-0.log"
}

# failure ROLE VICTIM SIGNAL TEXT [VARIABLE=VALUE...]: the ranks but the victim end with another status than 0, saying TEXT. With a
# signal, the victim gets it once it is at work.
failure() {
  local role=$1 victim=$2 signal=$3 text=$4 began=$SECONDS status=0 others=
  shift 4
  start_ranks "$role" 2 ROWAN_TEST_TIMEOUT_MS=5000 "$@"
  if [[ -n $signal ]]; then
    for ((i = 0; i < 300; ++i)); do
      grep -q reducing "$logs/$role-2-$victim.log" && break
      sleep 0.1
    done
    pkill "-$signal" -P "${pids[$victim]}"  # the rank below its timeout
  fi
  for r in 0 1; do
    [[ $r == "$victim" ]] && continue
    wait "${pids[$r]}" && status=1
    grep -q "$text" "$logs/$role-2-$r.log" || status=1
    others="$logs/$role-2-$r.log"
  done
  [[ -n ${pids[$victim]:-} ]] && pkill -KILL -P "${pids[$victim]}"
  row "failure: $role $signal" "$began" "$status"
  grep -h "communicator:" "$others" | head -1
}

for stage in $stages; do
  case $stage in
    build)
      began=$SECONDS
      cmake --preset cuda -DROWAN_CUDA_ARCHS=90a-real > "$logs/build.log" 2>&1 &&
        cmake --build --preset cuda --parallel "$(nproc)" --target rowan-tests rowan-program -- -k 0 >> "$logs/build.log" 2>&1
      status=$?
      row build "$began" "$status"
      grep NCCL "$logs/build.log" | head -2
      [[ $status == 0 ]] || grep -E "error|FAILED" "$logs/build.log" | head -30
      ;;
    checks)
      for ranks in $rank_counts; do
        for role in collectives column_parallel sharded_muown data_parallel; do check "$role" "$ranks"; done
      done
      ;;
    failures)
      failure differ 9 "" "rank 1 called all_reduce(sum) of 999 float32" ROWAN_TEST_CHECK_OPERATIONS=1
      failure loop 1 KILL "rank 1 ended"
      failure loop 1 STOP "rank 1 stopped"
      failure throw 1 "" "rank 1 failed"
      ;;
    demo)
      for ranks in $rank_counts; do
        began=$SECONDS
        build/cuda/bin/rowan demo --json --ranks "$ranks" --device "$([[ $gpus -ge $ranks ]] && echo cuda || echo cuda:0)" \
          --out "$logs/demo-$ranks" > "$logs/demo-$ranks.log" 2>&1
        row "rowan demo --ranks $ranks" "$began" $?
        tail -1 "$logs/demo-$ranks.log"
      done
      ;;
    *) echo "tests/nccl.sh: unknown stage $stage" >&2 && exit 2 ;;
  esac
done
printf '%s\n' "${table[@]}"
exit "$failed"
