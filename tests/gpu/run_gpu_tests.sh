#!/usr/bin/env bash
# Runs the test programs that need a GPU, one line each; fails if one fails.
#
#   tests/gpu/run_gpu_tests.sh BIN_DIR [--sanitize | --only-sanitize]
#
# --sanitize: afterwards a reduced set under the four tools of compute-sanitizer (README.md), which run side by side.
# Logs lie in BIN_DIR/logs, or in STOKER_GPU_LOGS. STOKER_GPU_TESTS: only these programs, before the sanitizers. backend_gpu_test
# fills the GPU's memory, and pool_memory_gpu_test looks at the host's: nothing else may run beside them.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
kernels=$here/../../kernels/cuda
mode=${2:-}
if [ $# -lt 1 ] || [ ! -d "$1" ] || [[ ! $mode =~ ^(|--sanitize|--only-sanitize)$ ]]; then
  sed -n '2,8p' "$0" >&2
  exit 2
fi
bin=$(cd "$1" && pwd)
logs=${STOKER_GPU_LOGS:-$bin/logs}
mkdir -p "$logs"
programs=(kernels_resolve_gpu_test kernels_rows_gpu_test graph_gpu_test hostile_gpu_test)
# Not under compute-sanitizer: they wait for other streams or processes, or for the driver.
others=(kernels_plane_gpu_test backend_gpu_test pool_memory_gpu_test replay_rows_gpu_test tensors_gpu_test direct_plane_gpu_test
  arena_gpu_test)
export STOKER_TEST_DAEMON=${STOKER_TEST_DAEMON:-$bin/stokerd} STOKER_TEST_CLIENT=${STOKER_TEST_CLIENT:-$bin/client_process}
failed=0

# report NAME STATUS SECONDS LOG
report() {
  local what
  what=$(grep -aE '^\[  (PASSED|FAILED)  \] [1-9][0-9]* tests?' "$4" | tail -1)
  if [ "$2" -eq 0 ] && [ -n "$what" ]; then
    printf 'ok     %-44s %4d s  %s\n' "$1" "$3" "$what"
  else
    printf 'FAILED %-44s %4d s  status %d, see %s\n' "$1" "$3" "$2" "$4"
    failed=1
  fi
}

if [ "$mode" != --only-sanitize ]; then
  read -ra chosen <<<"${STOKER_GPU_TESTS:-${programs[*]} ${others[*]}}"
  for program in "${chosen[@]}"; do
    log=$logs/$program.log
    begin=$SECONDS
    timeout 300 "$bin/$program" >"$log" 2>&1
    report "$program" $? $((SECONDS - begin)) "$log"
  done
fi

# Whether both ends of every hazard in the log are in racecheck_allowed.txt. Says which are not.
hazards_allowed() {
  local location file line text bad=0
  while IFS= read -r location; do
    file=$(sed -nE 's|.* in ([^ ]*/)?([^ /]+\.cuh?):([0-9]+).*|\2|p' <<<"$location")
    line=$(sed -nE 's|.* in ([^ ]*/)?([^ /]+\.cuh?):([0-9]+).*|\3|p' <<<"$location")
    if [ -z "$file" ]; then
      echo "       a hazard without a line (build with -DCMAKE_CUDA_FLAGS=-lineinfo): $location"
      bad=1
      continue
    fi
    text=$(sed -n "${line}{s/^ *//;s/ *$//;p}" "$kernels/$file" 2>/dev/null)
    if ! grep -v '^#' "$here/racecheck_allowed.txt" | grep -qxF -- "$file|$text"; then
      echo "       a hazard at $file:$line: $text"
      bad=1
    fi
  done < <(grep -aE '^=========.* access (at|by) ' "$1" | sed -E 's/ \[[0-9]+ hazards?\]//' | sort -u)
  return $bad
}

if [ -n "$mode" ]; then
  sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1)
  if [ -z "$sanitizer" ]; then
    echo "FAILED compute-sanitizer is not installed"
    exit 1
  fi
  export STOKER_TEST_CASES=${STOKER_TEST_CASES:-2}
  # Tests whose sizes, or oracles, take long and whose kernels others run as well.
  skipped='*EdgeSizes*:*Golden*:*LargestTopK*:*8192_32768*:*BatchesOfCommonShapes*:*SlotKeysAtAnyAddress*'
  skipped+=':*TransferInBothDirections*:*EqualsTheTwo*:*Oracle*:*CudaStreamTest*'
  # The same kernels once more, but for what follows.
  skipped+=':*/cuda_without_clusters*'
  # Of kernels_rows_gpu_test: racecheck does not end where a block waits at a cluster's barrier for the end of another.
  # That barrier orders copies and guards no memory; the same kernel without it is what racecheck looks at.
  turns='BatchesThatTakeTurns:LargeBatchOfTheLargestShape'
  # turns_on BACKEND: the filter
  turns_on() { echo "*${turns//:/\/$1:*}/$1"; }
  # check TOOL PROGRAM FILTER [NAME]
  check() {
    local tool=$1 program=$2 filter=$3 log begin exitcode=9 status
    log=$logs/$tool.${4:-$program}.log
    begin=$SECONDS
    # Racecheck's hazards are read from the log: some are meant.
    if [ "$tool" = racecheck ]; then exitcode=0; fi
    timeout 240 "$sanitizer" --tool "$tool" --error-exitcode $exitcode --print-limit 10000 "$bin/$program" --gtest_filter="$filter" >"$log" 2>&1
    status=$?
    if [ "$tool" = racecheck ] && ! hazards_allowed "$log"; then status=9; fi
    report "$tool ${4:-$program}" $status $((SECONDS - begin)) "$log"
  }
  # sanitize TOOL: fails if one program fails.
  sanitize() {
    local tool=$1 program
    failed=0
    for program in "${programs[@]}"; do
      # Racecheck looks at shared memory only: nothing that a stranger writes.
      if [ "$tool" = racecheck ] && [ "$program" = hostile_gpu_test ]; then continue; fi
      if [ "$tool" = racecheck ] && [ "$program" = kernels_rows_gpu_test ]; then
        check racecheck "$program" "-$skipped:$(turns_on cuda)"
      else
        check "$tool" "$program" "-$skipped"
      fi
    done
    if [ "$tool" = racecheck ]; then
      check racecheck kernels_rows_gpu_test "$(turns_on cuda_without_clusters)" kernels_rows_gpu_test.turns
    fi
    return $failed
  }
  tools=()
  for tool in memcheck racecheck initcheck synccheck; do
    sanitize $tool &
    tools+=($!)
  done
  for tool in "${tools[@]}"; do
    wait "$tool" || failed=1
  done
fi
exit $failed
