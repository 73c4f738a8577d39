#!/usr/bin/env bash
# What a decode step costs on each plane of a GPU, with MPS and without it: see tests/gpu/plane_bench.cc.
#
#   tests/bench/gpu/planes.sh BIN_DIR OUT_DIR [--no-mps | --only-mps]
#
# Writes OUT_DIR/planes.jsonl and logs. Starts an MPS control daemon of its own, in a folder of its own, and stokerd, and
# ends these and nothing else. Environment: STEPS, BATCHES ("1 8"), CONTEXT (rows of a sequence of the realistic
# workload), GROUPS_OF (layers that share a selection, "4 1"), LAYERS, ARENA (how arenas are shared, "ipc" or
# "descriptor"), STOKER_COMMIT (what the programs were built from).
set -euo pipefail
if [ $# -lt 2 ] || [ ! -d "$1" ]; then
  sed -n '2,9p' "$0" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
mode=${3:-}
steps=${STEPS:-500}
batches=${BATCHES:-1 8}
context=${CONTEXT:-32768}
groups=${GROUPS_OF:-4 1}
layers=${LAYERS:-61}
arena=${ARENA:-ipc}
commit=${STOKER_COMMIT:-$(git -C "$here" rev-parse --short HEAD 2>/dev/null || echo unknown)}
. "$here/daemon.sh"
daemon_folder planes

# bench PLANES ENTRIES BATCH GROUP [IDLE_SESSIONS]: a run that fails is told, and the others go on.
failed=0
bench() {
  local planes=$1 entries=$2 batch=$3 group=$4 idle=${5:-0}
  if ! timeout 240 "$bin/stoker-plane-bench" --server="unix:$folder/s" --plane="$planes" --entries="$entries" --batch="$batch" \
    --arena="$arena" --layers="$layers" --group="$group" --steps="$steps" --waits=separate,fused --idle_sessions="$idle" --commit="$commit" >>"$out/planes.jsonl" 2>>"$out/errors.log"; then
    echo "FAILED $planes $entries batch $batch group $group, $idle idle sessions: see $out/errors.log" >&2
    failed=1
  fi
}

: >"$out/planes.jsonl"
: >"$out/errors.log"
most=0
for batch in $batches; do most=$((batch > most ? batch : most)); done
workload=$out/realistic.stkw
"$bin/stoker-replay" --write-workload "$workload" --steps 48 --rows "$most" --top-k 2048 --hot-rows 4096 --row-bytes 656 \
  --context "$context" --progress=none >/dev/null

run_all() {
  local planes=same,rpc,rpc_group
  if [ "$1" = mps ]; then planes=same,server,rpc,rpc_group; fi
  start_daemon "$out/stokerd-$1.log"
  for group in $groups; do
    for batch in $batches; do
      bench "$planes" "empty,hot,$workload" "$batch" "$group"
      bench direct "empty,hot,$workload" "$batch" "$group"
    done
  done
  # What armed sessions that are idle cost the others; without them these are among the lines above.
  if [ "$1" = mps ]; then bench server,rpc empty,hot "${batches%% *}" "${groups%% *}" 7; fi
  stop_daemon || failed=1
}
if [ "$mode" != --no-mps ]; then
  start_mps
  run_all mps
  stop_mps
fi
if [ "$mode" != --only-mps ]; then run_all no-mps; fi
cat "$out/planes.jsonl"
exit $failed
