#!/usr/bin/env bash
# Installs what is needed, builds, starts a stokerd and replays a small bundled workload through it.
#
#   deploy/quick_start.sh [REPLAY OPTION ...]     stoker-replay --help lists them
#
# Everything goes into build/; the daemon listens on a Unix socket in a temporary directory and is stopped at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
deploy/install_packages.sh
cmake --preset dev -DSTOKER_TESTS=OFF -B build/quick_start
cmake --build build/quick_start --parallel "$(nproc)" --target stokerd stokerctl stoker-replay
if [ $# -eq 0 ]; then set -- --trace client/replay/chat_trace.jsonl --layers 4 --groups 2; fi
exec build/quick_start/bin/stoker-replay "$@"
