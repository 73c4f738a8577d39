#!/usr/bin/env bash
# How long a fresh engine takes to attach to a daemon with a large pool, and to its first step: tests/gpu/attach_bench.cc.
#
#   tests/bench/gpu/attach.sh BIN_DIR OUT_DIR
#
# Direct plane and calls without MPS, then server and direct plane under an MPS of its own (with_mps.sh), each ROUNDS times in a
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

folder=
daemon=
finish() {
  if [ -n "$daemon" ] && kill "$daemon" 2>/dev/null; then wait "$daemon" || true; fi
  if [ -n "$folder" ]; then rm -rf "$folder"; fi
}
trap finish EXIT

# planes WORDS: a daemon, and every plane against it.
planes() {
  local plane round failed=0
  # A short path: those of sockets have a limit.
  folder=$(mktemp -d /tmp/attach.XXXXXX)
  "$bin/stokerd" --socket-path="$folder/s" --device=cuda --metrics-address=127.0.0.1:0 --log-format=json --max-hot-bytes=$((32 << 30)) \
    --pool="name: \"attach\" layers: $layers row_layout: ROW_LAYOUT_LINEAR row_bytes: 656 blocks: $blocks" >"$folder/log" 2>&1 &
  daemon=$!
  for _ in $(seq 600); do
    if grep -q '"message":"serving"' "$folder/log" || ! kill -0 "$daemon" 2>/dev/null; then break; fi
    sleep 0.1
  done
  if ! grep -q '"message":"serving"' "$folder/log"; then
    cat "$folder/log" >&2
    return 1
  fi
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
  if kill "$daemon" 2>/dev/null; then wait "$daemon" || failed=1; fi
  daemon=
  cp "$folder/log" "$out/attach-stokerd-$1.log"
  rm -rf "$folder"
  return $failed
}

# Under MPS this program calls itself.
if [ "${STOKER_ATTACH_PLANES:-}" != "" ]; then
  planes $STOKER_ATTACH_PLANES
  exit
fi
: >"$out/attach.jsonl"
failed=0
planes direct rpc || failed=1
STOKER_ATTACH_PLANES="server direct" "$here/../../gpu/with_mps.sh" "$0" "$bin" "$out" || failed=1
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
