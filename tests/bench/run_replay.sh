#!/usr/bin/env bash
# Replays a Mooncake-format trace through a private daemon and keeps what stoker-replay says, one JSON object a line, each behind a line
# with its command.
#
#   tests/bench/run_replay.sh BIN_DIR TRACE [--long | --cuda]
#
# --long: also 500 requests with 4 layers, in every row layout (20 minutes). --cuda: instead of all others, 500 requests with 61 layers on the
# first GPU, every row compared there; needs 3.5 GB of its memory and 52 GB of the host's.
#
# Environment: STOKER_COMMIT (what the programs were built from, where there is no repository).
set -euo pipefail
bin=$(cd "$1" && pwd)
trace=$(realpath "$2")
cd "$(dirname "$0")/../.."
mode=${3:-}
out=tests/bench/results/$(date -u +%F)-replay${mode/#--/-}.jsonl
: >"$out"

replay() {
  local shown="$*"
  printf '{"command": "stoker-replay --trace conversation_trace.jsonl %s", "commit": "%s"}\n' "$shown" \
    "${STOKER_COMMIT:-$(git rev-parse --short HEAD)}" >>"$out"
  "$bin/stoker-replay" --trace "$trace" --json --progress=none "$@" | tail -n 1 >>"$out"
}

if [ "$mode" = --cuda ]; then
  replay --device cuda --transfer shared --plane rpc --requests 500 --layers 61 --groups 16 --row-bytes 656 --top-k 2048 --hot-rows 4096 \
    --concurrency 16 --pool-blocks 2500
  echo "$out"
  exit
fi
replay --pool-blocks 30000 --top-k 64 --hot-rows 128 --row-bytes 16 --concurrency 64
for blocks in 1000 5000 10000 30000 50000 100000 0; do replay --prefix-only --pool-blocks "$blocks"; done
if [ "$mode" = --long ]; then
  common=(--requests 500 --layers 4 --groups 2 --top-k 512 --hot-rows 1024 --engines 2)
  replay "${common[@]}" --row-bytes 656 --pool-blocks 3000
  replay "${common[@]}" --row-bytes 1152 --pool-blocks 2000
  replay "${common[@]}" --row-layout split_kv --row-bytes 656 --v-row-bytes 512 --pool-blocks 2000
  replay "${common[@]}" --row-layout dsv4_paged --pool-blocks 3000
fi
echo "$out"
