#!/usr/bin/env python3
"""Times Stoker's kernels beside the seeds' on the same workload files, and prints the ratios.

    grid.py --bin DIR --shared DIR --out FILE [--pools 2,16] [--batches 1,2,...] [--row-bytes 576,656,1152]
            [--misses 0,2,7,14,30,100] [--steps 48] [--also-still]

DIR of --bin has stoker-gpu-bench and stoker-replay; DIR of --shared has peers/ and seeds/. Needs a GPU, nvcc and about
2.5 GB of /dev/shm. FILE gets one JSON object a line: a first one that describes the run, then those of both benches with
the workload's share of misses ("miss_percent", as asked for; "misses_per_step" is what was counted). Exit status 1 when
a gathered row had wrong bytes.

Context 65,536, top_k 2048, hot_rows 4096. 14 % is the realistic workload; 2, 7 and 30 % are the realistic model with
scores that change less or more; in 0 % a random half of 4,096 tokens is selected each step, and with --also-still also
the same 2,048 tokens each step; in 100 % half of all tokens
are selected once each in 16 steps.
"""

import argparse
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

CONTEXT, TOP_K, HOT_ROWS = 65536, 2048, 4096
# Of a workload without hits: half of all tokens, each once, so that the hot rows are replaced eight times. Its steps are
# the longest.
FRESH_STEPS = 16
# In the peers' bench, where it writes all rows of its pool: peer_bench.cu tells which it has written already.
PEER_LOOP = "for (int64_t r = 0; r < pool_rows; ++r) {"
PEER_LOOP_FROM = "for (int64_t r = RowsWritten(pool_rows, row_bytes); r < pool_rows; ++r) {"
HEADER = struct.Struct("<4s8I")
# Lines that a file gets of each bench: stoker-gpu-bench, and the peers'.
SYSTEMS = (3, 4)
MODELS = {
    "0": ["--workload-model=resident"],
    "still": ["--workload-model=realistic", "--drift-percent=0", "--white-percent=0"],
    "2": ["--workload-model=realistic", "--drift-percent=10", "--white-percent=100"],
    "7": ["--workload-model=realistic", "--drift-percent=65", "--white-percent=65"],
    "14": ["--workload-model=realistic"],
    "30": ["--workload-model=realistic", "--white-percent=290"],
    "100": ["--workload-model=fresh"],
}


def numbers(text):
    return [int(n) for n in text.split(",")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--shared", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--pools", type=numbers, default=[2, 16])
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--row-bytes", type=numbers, default=[576, 656, 1152])
    parser.add_argument("--misses", type=lambda text: text.split(","), default=["0", "2", "7", "14", "30", "100"])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--also-still", action="store_true")
    args = parser.parse_args()
    misses = args.misses + (["still"] if args.also_still else [])
    work = pathlib.Path(tempfile.mkdtemp(prefix="stoker-grid-", dir="/dev/shm"))
    try:
        sys.exit(run(args, misses, work))
    finally:
        shutil.rmtree(work)


def run(args, misses, work):
    peer, building = build_peer(args.shared, work)
    bases = write_bases(args, misses, work)
    if building.wait() != 0:
        return 1
    lines = []
    with args.out.open("w") as out:
        first = {
            "grid": " ".join(sys.argv),
            "commit": os.environ.get("STOKER_COMMIT", "unknown"),
            "gpu": subprocess.run(
                ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                capture_output=True, text=True, check=True).stdout.strip(),
        }
        out.write(json.dumps(first) + "\n")
        for pool in args.pools:
            files = []
            for row_bytes in args.row_bytes:
                for miss in misses:
                    for batch in args.batches:
                        path = work / f"{row_bytes}-{miss}-{batch}"
                        if not path.exists():
                            write_slice(bases[miss], path, batch, row_bytes)
                        files.append((miss, path))
            # One process of each for all: to pin the pool takes longer than to time a file.
            for bench in (peer, args.bin / "stoker-gpu-bench"):
                running = subprocess.Popen(
                    [bench, "--pool-gib", str(pool)] + [path for _, path in files], stdout=subprocess.PIPE, text=True)
                found = 0
                for text in running.stdout:
                    line = json.loads(text)
                    line["miss_percent"] = files[found // SYSTEMS[bench == peer]][0]
                    line["pool"] = pool
                    out.write(json.dumps(line) + "\n")
                    out.flush()
                    lines.append(line)
                    found += 1
                if running.wait() == 0 and found != len(files) * SYSTEMS[bench == peer]:
                    raise SystemExit(f"{bench} wrote {found} lines for {len(files)} files")
                if running.returncode != 0:
                    print(f"{bench} ended with status {running.returncode}", file=sys.stderr)
                    return 1
    return report(lines)


def build_peer(shared, work):
    """The program's path, and the compiler that writes it."""
    seeds, binary = work / "seed", work / "peer_bench"
    source = (shared / "peers/seed_kernels_bench.cu").read_text()
    if source.count(PEER_LOOP) != 1:
        raise SystemExit(f"peers/seed_kernels_bench.cu does not have once: {PEER_LOOP}")
    (work / "seed_kernels_bench.cu").write_text(source.replace(PEER_LOOP, PEER_LOOP_FROM))
    subprocess.run([sys.executable, shared / "peers/extract_seed_kernels.py", shared / "seeds", seeds], check=True)
    return binary, subprocess.Popen(
        ["nvcc", "-std=c++20", "-O3", "-arch=sm_90", "-I", seeds, "-I", work, "-o", binary,
         pathlib.Path(__file__).parent / "peer_bench.cu"])


def write_bases(args, misses, work):
    """A workload of the largest batch for each share of misses."""
    bases = {miss: work / f"base-{miss}" for miss in misses}
    running = []
    for miss in misses:
        steps = min(args.steps, FRESH_STEPS) if miss == "100" else args.steps
        running.append(subprocess.Popen(
            [args.bin / "stoker-replay", f"--write-workload={bases[miss]}", f"--rows={max(args.batches)}",
             f"--steps={steps}", f"--context={CONTEXT}", f"--top-k={TOP_K}", f"--hot-rows={HOT_ROWS}",
             "--row-bytes=656"] + MODELS[miss], stdout=subprocess.DEVNULL))
    if any([process.wait() for process in running]):
        raise SystemExit("a workload could not be written")
    return bases


def write_slice(base, path, batch, row_bytes):
    """The first `batch` sequences of a workload."""
    with base.open("rb") as source, path.open("wb") as target:
        magic, version, steps, rows, top_k, context, hot_rows, _, reserved = HEADER.unpack(source.read(HEADER.size))
        target.write(HEADER.pack(magic, version, steps, batch, top_k, context, hot_rows, row_bytes, reserved))
        for step in range(steps):
            source.seek(HEADER.size + 4 * step * rows * top_k)
            target.write(source.read(4 * batch * top_k))


def report(lines):
    """Stoker's resolve with gather against the fastest that each seed has for the same."""
    cells = {}
    for line in lines:
        key = (line["pool"], line["row_bytes"], line["miss_percent"], line["rows"])
        cells.setdefault(key, {})[line["system"]] = line
    print("pool row_bytes misses batch   us  GB/s   seed A  seed B  ratio A  ratio B  ratio faster")
    slower = wrong = 0
    for (pool, row_bytes, miss, batch), cell in cells.items():
        ours = cell["stoker_fused"]
        seed_a = cell["seed_a_fused"]["us_per_step"]
        seed_b = min(cell["seed_b_resolve_compact"]["us_per_step"], cell["seed_b_resolve_plan"]["us_per_step"])
        us = ours["us_per_step"]
        ratio = min(seed_a, seed_b) / us
        slower += ratio < 1
        wrong += any(line["bad_rows"] for line in cell.values())
        print(f"{pool:4} {row_bytes:9} {miss:>6} {batch:5} {us:7.2f} {ours['gathered_gb_per_s']:5.1f} {seed_a:8.2f} "
              f"{seed_b:7.2f} {seed_a / us:8.2f} {seed_b / us:8.2f} {ratio:8.2f}" + ("  slower" if ratio < 1 else ""))
    print(f"{len(cells)} cells, {slower} slower than the faster seed, {wrong} with wrong rows")
    return 1 if wrong else 0


if __name__ == "__main__":
    main()
