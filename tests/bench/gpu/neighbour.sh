#!/usr/bin/env bash
# What a neighbour's bulk loads and stores do to an engine's decode steps, for several limits of the daemon's launches, with MPS
# and without it: see tests/gpu/neighbour_bench.cc.
#
#   tests/bench/gpu/neighbour.sh BIN_DIR OUT_DIR [--no-mps | --only-mps]
#
# Writes OUT_DIR/neighbour.jsonl and logs. Starts an MPS control daemon of its own, in a folder of its own, and for each limit a
# stokerd, and ends these and nothing else. Environment: LIMITS (daemon flags, one setting a line; an empty line: none), NO_MPS_LIMITS
# (likewise, without MPS), STEPS (at batch 1), BATCHES ("8,1"), CONTEXT (rows of a sequence), NEIGHBOUR_ROWS, LAYERS, STOKER_COMMIT (what
# the programs were built from).
set -euo pipefail
if [ $# -lt 2 ] || [ ! -d "$1" ]; then
  sed -n '2,10p' "$0" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
mode=${3:-}
steps=${STEPS:-1000}
batches=${BATCHES:-8,1}
context=${CONTEXT:-16384}
layers=${LAYERS:-61}
rows=${NEIGHBOUR_ROWS:-32768}
limits=${LIMITS-$'\n--max-bulk-copy-blocks=16\n--max-bulk-copy-blocks=4\n--max-bulk-copy-blocks=16 --max-bulk-copy-bytes=16777216'}
no_mps_limits=${NO_MPS_LIMITS-$'\n--max-bulk-copy-blocks=16 --max-bulk-copy-bytes=16777216'}
commit=${STOKER_COMMIT:-$(git -C "$here" rev-parse --short HEAD 2>/dev/null || echo unknown)}
. "$here/daemon.sh"
daemon_folder neighbour

: >"$out/neighbour.jsonl"
: >"$out/errors.log"
failed=0
workload=$out/realistic.stkw
"$bin/stoker-replay" --write-workload "$workload" --steps 48 --rows 8 --top-k 2048 --hot-rows 4096 --row-bytes 656 --context "$context" \
  --progress=none >/dev/null

# run_all NAME PLANES LIMITS: a run that fails is told, and the others go on.
run_all() {
  local name=$1 planes=$2 number=0 setting flags
  while IFS= read -r setting; do
    number=$((number + 1))
    read -ra flags <<<"$setting"
    start_daemon "$out/stokerd-$name-$number.log" --sequence-retention-ms=0 "${flags[@]}"
    if ! timeout 120 "$bin/stoker-neighbour-bench" --server="unix:$folder/s" --plane="$planes" --entries="$workload" --batch="$batches" \
      --layers="$layers" --steps="$steps" --neighbour_rows="$rows" --limits="${setting:-off}" --commit="$commit" \
      </dev/null >>"$out/neighbour.jsonl" 2>>"$out/errors.log"; then
      echo "FAILED $name, limits ${setting:-off}: see $out/errors.log" >&2
      failed=1
    fi
    stop_daemon || failed=1
  done <<<"$3"
}
if [ "$mode" != --no-mps ]; then
  start_mps
  run_all mps direct,server "$limits"
  stop_mps
fi
if [ "$mode" != --only-mps ]; then run_all no-mps direct "$no_mps_limits"; fi
cat "$out/neighbour.jsonl"
exit $failed
