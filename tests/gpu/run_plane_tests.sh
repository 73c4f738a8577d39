#!/usr/bin/env bash
# The planes of a GPU between processes, with MPS and without it: the tests, garbage in the mailbox, a replay on the server and
# on the direct plane with every row compared, and what a step costs.
#
#   tests/gpu/run_plane_tests.sh BIN_DIR OUT_DIR [--no-bench]
#
# Environment: as tests/bench/gpu/planes.sh. Logs and results lie in OUT_DIR; fails if one fails.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ $# -lt 2 ] || [ ! -d "$1" ]; then
  sed -n '2,7p' "$0" >&2
  exit 2
fi
bin=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
failed=0

# run NAME COMMAND...
run() {
  local name=$1 begin=$SECONDS status
  shift
  timeout 300 "$@" >"$out/$name.log" 2>&1
  status=$?
  if [ $status -eq 0 ] && [[ $name == test-* ]] && ! grep -qaE '^\[  PASSED  \] [1-9]' "$out/$name.log"; then
    status=9  # no test of that name
  fi
  if [ $status -eq 0 ]; then
    printf 'ok     %-24s %4d s\n' "$name" $((SECONDS - begin))
  else
    printf 'FAILED %-24s %4d s  status %d, see %s\n' "$name" $((SECONDS - begin)) $status "$out/$name.log"
    tail -n 25 "$out/$name.log"
    failed=1
  fi
}

export STOKER_TEST_DAEMON=$bin/stokerd STOKER_TEST_REPLAY=$bin/stoker-replay
run test-mps "$here/with_mps.sh" "$bin/plane_process_gpu_test" --gtest_filter='-*Killed'
# A process of its own, and an MPS: the daemon's end takes them along.
run test-mps-killed "$here/with_mps.sh" "$bin/plane_process_gpu_test" --gtest_filter='*Killed'
run test-no-mps "$bin/plane_process_gpu_test"
run test-garbage-mps "$here/with_mps.sh" "$bin/garbage_plane_gpu_test"
run test-garbage-no-mps "$bin/garbage_plane_gpu_test"
run test-arena-mps "$here/with_mps.sh" "$bin/arena_gpu_test"
run test-order-mps "$here/with_mps.sh" "$bin/order_gpu_test" --gtest_filter='-*Killed*'
# Each in an MPS of its own, as above.
run test-order-killed-mps "$here/with_mps.sh" "$bin/order_gpu_test" --gtest_filter='*EngineThatIsKilled*'
run test-order-daemon-killed-mps "$here/with_mps.sh" "$bin/order_gpu_test" --gtest_filter='*AWaitEnds/Killed'
run test-order-no-mps "$bin/order_gpu_test"
run test-lost-context-mps "$here/with_mps.sh" "$bin/lost_context_gpu_test"
run test-lost-context-no-mps "$bin/lost_context_gpu_test"
replay=("$bin/stoker-replay" --stokerd "$bin/stokerd" --device cuda --transfer shared --requests 24 --input-length 8000 --output-length 100
  --layers 61 --groups 16 --row-bytes 656 --top-k 2048 --hot-rows 4096 --concurrency 8 --pool-blocks 4000 --json --progress none)
run replay-mps "$here/with_mps.sh" "${replay[@]}" --plane server
run replay-direct "${replay[@]}" --plane direct
run replay-mps-descriptor "$here/with_mps.sh" "${replay[@]}" --plane server --arena descriptor
run replay-direct-descriptor "${replay[@]}" --plane direct --arena descriptor
run replay-rpc-descriptor "${replay[@]}" --plane rpc --arena descriptor
if [ "${3:-}" != --no-bench ]; then
  "$here/../bench/gpu/planes.sh" "$bin" "$out" || failed=1
fi
exit $failed
