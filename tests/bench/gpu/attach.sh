#!/usr/bin/env bash
# How long a fresh engine takes to attach to a daemon with a large pool, and to its first step: tests/gpu/attach_bench.cc.
#
#   tests/bench/gpu/attach.sh BIN_DIR OUT_DIR
#
# Direct plane and calls without MPS, then server and direct plane under an MPS of its own, each ROUNDS times in a
# process of its own, and taken apart once more. Writes OUT_DIR/attach.jsonl. Fails if a run fails, or if the slowest whole one of
# a plane is above its goal: 500 ms on the server plane, 1,000 ms on the direct plane. Environment: POOL_GIB (16), LAYERS (61),
# ROUNDS (5), STOKER_COMMIT (what the programs were built from).
set -euo pipefail
if [ $# -lt 2 ] || [ ! -d "$1" ]; then
  sed -n '2,9p' "$0" >&2
  exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
bin=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
layers=${LAYERS:-61}
rounds=${ROUNDS:-5}
blocks=$((${POOL_GIB:-16} * (1 << 30) / (64 * layers * 656) + 1))
commit=${STOKER_COMMIT:-unknown}

. "$here/daemon.sh"
daemon_folder attach

# planes NAME PLANE...: a daemon, and every plane against it.
planes() {
  local name=$1 plane round
  shift
  start_daemon "$out/attach-stokerd-$name.log" \
    --pool="name: \"attach\" layers: $layers row_layout: ROW_LAYOUT_LINEAR row_bytes: 656 blocks: $blocks"
  for plane in "$@"; do
    for round in $(seq "$rounds"); do
      for phases in "" --phases; do
        if ! timeout 60 "$bin/stoker-attach-bench" --server="unix:$folder/s" --plane="$plane" --commit="$commit" $phases >>"$out/attach.jsonl"; then
          echo "FAILED $plane, round $round $phases" >&2
          failed=1
        fi
      done
    done
  done
  stop_daemon || failed=1
}

: >"$out/attach.jsonl"
failed=0
planes no-mps direct rpc
start_mps
planes mps server direct
stop_mps
cat "$out/attach.jsonl"
python3 - "$out/attach.jsonl" <<'END' || failed=1
import json, sys
goals = {"server": 500, "direct": 1000}
lines = [json.loads(line) for line in open(sys.argv[1])]
well = True
for plane, goal in goals.items():
    for mps in (False, True):
        times = sorted(l["attach_to_first_step_ms"] for l in lines if l["what"] == "whole" and l["plane"] == plane and l["mps"] == mps)
        if not times:
            well = well and plane == "server" and not mps  # which needs MPS
            continue
        print("%-6s plane, MPS %-3s: %.0f to %.0f ms to the first step, goal %d" % (plane, "on" if mps else "off", times[0], times[-1], goal))
        well = well and times[-1] < goal
sys.exit(0 if well else 1)
END
exit $failed
