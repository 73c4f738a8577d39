#!/bin/sh
# Builds the daemon and the benchmark as they are released, runs everything, and writes results/DATE-cpu.jsonl. Further
# arguments go to stoker-bench: `run_bench.sh --check` fails when a target is missed.
set -eu
source=$(cd "$(dirname "$0")/../.." && pwd)
build=${STOKER_BENCH_BUILD:-$source/build/bench-release}
commit=$(git -C "$source" rev-parse --short HEAD)
if [ -n "$(git -C "$source" status --porcelain --untracked-files=no)" ]; then
  commit=$commit+changes
fi
cmake -S "$source" --preset release -B "$build" -DSTOKER_TESTS=ON -DSTOKER_CUDA=OFF >/dev/null
cmake --build "$build" --parallel "$(nproc)" --target stoker-bench stokerd
out=$source/tests/bench/results/$(date -u +%Y-%m-%d)-cpu.jsonl
mkdir -p "$(dirname "$out")"
cd "$build/bin"
./stoker-bench --commit="$commit" --out="$out" "$@"
echo "$out"
