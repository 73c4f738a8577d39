#!/usr/bin/env bash
# Runs a command under an MPS control daemon of its own, and ends that one afterwards.
#
#   tests/gpu/with_mps.sh COMMAND [ARGUMENT...]
set -uo pipefail
if [ $# -lt 1 ]; then
  sed -n '2,4p' "$0" >&2
  exit 2
fi
# A short path: those of sockets have a limit.
folder=$(mktemp -d /tmp/mps.XXXXXX)
export CUDA_MPS_PIPE_DIRECTORY=$folder/pipe CUDA_MPS_LOG_DIRECTORY=$folder/log
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
if ! nvidia-cuda-mps-control -d; then
  echo "MPS does not start" >&2
  rm -rf "$folder"
  exit 1
fi
"$@"
status=$?
echo quit | nvidia-cuda-mps-control >/dev/null 2>&1
if [ $status -ne 0 ]; then tail -n 20 "$CUDA_MPS_LOG_DIRECTORY"/*.log >&2; fi
rm -rf "$folder"
exit $status
