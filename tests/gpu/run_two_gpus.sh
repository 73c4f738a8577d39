#!/usr/bin/env bash
# One daemon on two GPUs, two ranks of one engine on one pool: each rank on a GPU of its own, rows stored once, every row of
# each rank's hot buffers compared, the pool pinned once. By calls and on the direct plane, and under MPS on the server plane.
#
#   tests/gpu/run_two_gpus.sh BIN_DIR OUT_DIR
#
# Also two_gpus_test (handles of the other GPU's memory) and devices_test on both GPUs. Writes OUT_DIR/two_gpus.jsonl and logs;
# fails if one fails, and on a machine with one GPU. BIN_DIR has the programs and stokerctl; nothing is built. Environment:
# POOL_BLOCKS (of 512 tokens, 400: 8 GB), LAYERS (61), STOKER_COMMIT (what the programs were built from).
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ $# -lt 2 ] || [ ! -d "$1" ]; then
  sed -n '2,9p' "$0" >&2
  exit 2
fi
bin=$(cd "$1" && pwd)
mkdir -p "$2"
out=$(cd "$2" && pwd)
layers=${LAYERS:-61}
export STOKER_TEST_DAEMON=$bin/stokerd STOKER_TEST_CLIENT=$bin/client_process STOKER_TEST_DEVICE=cuda:all

folder=
daemon=
replay=
finish() {
  if [ -n "$replay" ]; then kill "$replay" 2>/dev/null; fi
  if [ -n "$daemon" ] && kill "$daemon" 2>/dev/null; then wait "$daemon"; fi
  if [ -n "$folder" ]; then rm -rf "$folder"; fi
}
trap finish EXIT

# run_replay PLANE: a daemon, an engine of two ranks, and what is looked at meanwhile.
run_replay() {
  local plane=$1 status failed=0 before
  # A short path: those of sockets have a limit.
  folder=$(mktemp -d /tmp/two.XXXXXX)
  before=$(awk '$1 == "MemAvailable:" {print $2}' /proc/meminfo)
  "$bin/stokerd" --socket-path="$folder/s" --device=cuda:all --metrics-address=127.0.0.1:0 --log-format=json --max-hot-bytes=$((32 << 30)) \
    --pool="name: \"two\" layers: $layers row_layout: ROW_LAYOUT_LINEAR row_bytes: 656 prefix_rows: 512 blocks: $((${POOL_BLOCKS:-400} * 8))" \
    >"$out/two-stokerd-$plane.log" 2>&1 &
  daemon=$!
  for _ in $(seq 600); do
    if grep -q '"message":"serving"' "$out/two-stokerd-$plane.log" || ! kill -0 "$daemon" 2>/dev/null; then break; fi
    sleep 0.1
  done
  if ! grep -q '"message":"serving"' "$out/two-stokerd-$plane.log"; then
    tail -n 5 "$out/two-stokerd-$plane.log"
    return 1
  fi
  timeout 200 "$bin/stoker-replay" --server "unix:$folder/s" --device cuda:all --ranks 2 --transfer shared --plane "$plane" --pool two \
    --pool-blocks "${POOL_BLOCKS:-400}" --layers "$layers" --groups $(((layers + 3) / 4)) --row-bytes 656 --top-k 1024 --hot-rows 2048 --concurrency 6 \
    --requests 40 --input-length 4000 --output-length 120 --query-rows 2 --padding-rows 2 --json --progress none \
    >"$out/two-replay-$plane.log" 2>&1 &
  replay=$!
  python3 - "$bin" "$folder" "$out" "$plane" "$daemon" "$replay" "$before" <<'END' || failed=1
import json, os, pathlib, re, subprocess, sys, time, urllib.request

bin_dir, folder, out, plane = sys.argv[1:5]
daemon, replay, before_kb = (int(word) for word in sys.argv[5:8])


def sessions():
    command = [bin_dir + "/stokerctl", "--server", "unix:%s/s" % folder, "sessions", "--json"]
    text = subprocess.run(command, capture_output=True, text=True).stdout
    return json.loads(text).get("sessions", []) if text else []


def metrics():
    log = pathlib.Path(out, "two-stokerd-%s.log" % plane).read_text()
    port = re.search(r'"message":"metrics".*?"port":"?(\d+)', log).group(1)
    text = urllib.request.urlopen("http://127.0.0.1:%s/metrics" % port, timeout=10).read().decode()
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def memory_available():
    return next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemAvailable:"))


def children(pid):
    return [int(child) for child in open("/proc/%d/task/%d/children" % (pid, pid)).read().split()]


faults = []
found = []
deadline = time.monotonic() + 60
while time.monotonic() < deadline and os.path.exists("/proc/%d" % replay):
    found = sessions()
    if len(found) == 2 and all(int(session.get("steps", 0)) >= 20 for session in found):
        break
    time.sleep(0.1)
devices = sorted(session.get("device", "") for session in found)
if len(set(devices)) != 2:
    faults.append("the ranks are on %s" % devices)
scrape = metrics()
capacity = float(scrape['stoker_pool_capacity_bytes{pool="two"}'])
populated = float(scrape['stoker_pool_populated_bytes{pool="two"}'])
taken = (before_kb - memory_available()) * 1024
resident = {}
processes = [daemon]
try:
    processes += [rank for top in children(replay) for rank in [top] + children(top)]
    for process in processes:
        fields = dict(line.split(":", 1) for line in open("/proc/%d/status" % process) if ":" in line)
        resident[process] = {name: fields[name].strip() for name in ("Name", "VmRSS", "RssShmem", "VmLck", "VmPin") if name in fields}
except OSError as error:
    faults.append("the engine had ended: %s" % error)
if len(processes) < 4:
    faults.append("the replay has no two ranks")
if populated != capacity:
    faults.append("%d of the pool's %d bytes were pinned" % (populated, capacity))
# Twice the pool would be another one for the second GPU, or for an engine.
if not 0.9 * capacity < taken < 1.6 * capacity:
    faults.append("the machine has %d bytes less of memory, the pool %d" % (taken, capacity))
while os.path.exists("/proc/%d" % replay) and open("/proc/%d/stat" % replay).read().split(") ")[1][0] != "Z":
    time.sleep(0.1)
lines = pathlib.Path(out, "two-replay-%s.log" % plane).read_text().splitlines()
result = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
if result.get("wrong_rows", 1) != 0 or result.get("checked_rows_device", 0) == 0:
    faults.append("%s wrong rows of %s" % (result.get("wrong_rows"), result.get("checked_rows_device")))
if result.get("plane") != plane:
    faults.append("on the plane %s" % result.get("plane"))
if result.get("stored_rows") != result.get("unique_rows"):
    faults.append("%s rows were stored, %s were to be" % (result.get("stored_rows"), result.get("unique_rows")))
line = dict(bench="two_gpus", plane_wanted=plane, commit=os.environ.get("STOKER_COMMIT", "unknown"), devices=devices, pool_bytes=capacity,
            pinned_bytes=populated, memory_taken_bytes=taken, processes=resident, faults=faults, **result)
with open(os.path.join(out, "two_gpus.jsonl"), "a") as file:
    file.write(json.dumps(line) + "\n")
for fault in faults:
    print("       " + fault)
sys.exit(1 if faults else 0)
END
  wait "$replay"
  status=$?
  replay=
  if [ $status -ne 0 ]; then
    echo "       stoker-replay: exit status $status, see $out/two-replay-$plane.log"
    failed=1
  fi
  if kill "$daemon" 2>/dev/null; then
    wait "$daemon" || failed=1
  else
    echo "       stokerd has ended, see $out/two-stokerd-$plane.log"
    failed=1
  fi
  daemon=
  rm -rf "$folder"
  return $failed
}

failed=0
# report NAME COMMAND...
report() {
  local name=$1 begin=$SECONDS
  shift
  if "$@"; then
    printf 'ok     %-24s %4d s\n' "$name" $((SECONDS - begin))
  else
    printf 'FAILED %-24s %4d s\n' "$name" $((SECONDS - begin))
    failed=1
  fi
}
# test_program NAME
test_program() {
  timeout 200 "$bin/$1" >"$out/$1.log" 2>&1 && grep -qaE '^\[  PASSED  \] [1-9]' "$out/$1.log" && return 0
  tail -n 20 "$out/$1.log"
  return 1
}

# Under MPS this program calls itself.
if [ -n "${STOKER_TWO_GPUS_PLANE:-}" ]; then
  run_replay "$STOKER_TWO_GPUS_PLANE"
  exit
fi
: >"$out/two_gpus.jsonl"
report two_gpus_test test_program two_gpus_test
report devices_test test_program devices_test
report rpc run_replay rpc
report direct run_replay direct
report server env STOKER_TWO_GPUS_PLANE=server "$here/with_mps.sh" "$0" "$bin" "$out"
exit $failed
