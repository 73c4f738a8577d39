# A stokerd and an MPS control daemon for benchmarks, to be sourced. Set before: bin (programs), out (logs).
#
#   daemon_folder NAME        makes $folder, which goes when the script ends, and with it what was started
#   start_mps, stop_mps       an MPS of the script's own
#   start_daemon LOG FLAG...  a stokerd on $folder/s that serves, or the script ends
#   stop_daemon               fails if it did not end well
folder=
daemon=
mps=

daemon_folder() {
  # A short path: those of sockets have a limit.
  folder=$(mktemp -d "/tmp/$1.XXXXXX")
  trap daemon_finish EXIT
}
daemon_finish() {
  stop_daemon || true
  stop_mps
  rm -rf "$folder"
}
start_mps() {
  export CUDA_MPS_PIPE_DIRECTORY=$folder/pipe CUDA_MPS_LOG_DIRECTORY=$folder/log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  nvidia-cuda-mps-control -d >>"$out/mps.log" 2>&1
  mps=1
}
stop_mps() {
  if [ -n "$mps" ]; then echo quit | nvidia-cuda-mps-control >>"$out/mps.log" 2>&1 || true; fi
  mps=
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}
start_daemon() {
  local log=$1
  shift
  "$bin/stokerd" --socket-path="$folder/s" --device=cuda --max-hot-bytes=$((32 << 30)) --metrics-address=127.0.0.1:0 \
    --log-format=json "$@" >"$log" 2>&1 &
  daemon=$!
  for _ in $(seq 600); do
    if grep -q '"message":"serving"' "$log"; then return; fi
    if ! kill -0 "$daemon" 2>/dev/null; then break; fi
    sleep 0.1
  done
  echo "stokerd does not serve, see $log" >&2
  exit 1
}
stop_daemon() {
  local ended=$daemon
  daemon=
  if [ -z "$ended" ]; then return; fi
  kill "$ended" 2>/dev/null || true
  wait "$ended"
}
