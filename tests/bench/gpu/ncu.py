#!/usr/bin/env python3
"""Looks at each of the CUDA kernels with Nsight Compute.

    ncu.py --bin DIR --out FILE [--rows 16]

DIR has stoker-replay, stoker-gpu-bench, kernels_rows_gpu_test and kernels_plane_gpu_test; ncu must be on the PATH. FILE
gets one JSON object a line: a first one that describes the run, then one for each launch that was looked at, with the
metrics by ncu's names. The step is the realistic workload with --rows sequences (context 65,536, top_k 2048, hot_rows
4096, 656-byte rows), from a pool of 2 GiB.

ncu runs one kernel at a time, with the L2 cache flushed before each: times are longer than those of grid.py. Exit status
1 when a kernel of the list was not seen.
"""

import argparse
import csv
import json
import os
import pathlib
import subprocess
import sys
import tempfile

METRICS = [
    "gpu__time_duration.sum",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_dynamic",
    "launch__shared_mem_per_block_static",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_bytes.sum",
    "pcie__read_bytes.sum",
    "pcie__write_bytes.sum",
    "smsp__inst_executed.sum",
    "smsp__inst_executed_op_local_ld.sum",
    "smsp__inst_executed_op_local_st.sum",
]
STEPS = 24
STEP = ("stoker-gpu-bench", "--pool-gib", "2", "WORKLOAD")
RATES = ("stoker-gpu-bench", "--rates", "--pool-gib", "2", "WORKLOAD")
ROWS, PLANE = "kernels_rows_gpu_test", "kernels_plane_gpu_test"
# What to look at: the kernel's name, with its template arguments where it is one of several; launches of that name
# without arguments to skip, and to take; the program.
FUSED_LAUNCHES = 6 * STEPS  # of stoker-gpu-bench, before those of resolve alone
LOOKS = [
    ("ResolveKernel<1, 0, 1, 2048, 4096, 1, 1>", 60, 3, STEP),
    ("ResolveKernel<1, 0, 1, 2048, 4096, 0, 0>", FUSED_LAUNCHES + 60, 3, STEP),
    ("GatherCompactKernel", 60, 3, STEP),
    ("TransferKernel", 0, 12, RATES),
    ("GatherDenseKernel", 0, 3, (ROWS, "--gtest_filter=*GatherFromTheDensePlan*")),
    ("InvalidateKernel", 0, 3, (ROWS, "--gtest_filter=*ResidencyOpsTest*")),
    ("ResetKernel", 0, 3, (ROWS, "--gtest_filter=*ResidencyOpsTest*")),
    ("PlaceKernel", 0, 3, (ROWS, "--gtest_filter=*ResidencyOpsTest*")),
    ("BeginBatchKernel", 0, 3, (PLANE, "--gtest_filter=*PlaneBatchTest.ManySequences*")),
    ("PlanCommitsKernel", 0, 3, (PLANE, "--gtest_filter=*PlaneBatchTest.ManySequences*")),
    ("EndBatchKernel", 0, 3, (PLANE, "--gtest_filter=*PlaneBatchTest.ManySequences*")),
    ("AwaitDoorbellKernel", 0, 2, (PLANE, "--gtest_filter=*PlaneTest.RequestBeforeTheWait*")),
    ("RingDoorbellKernel", 0, 2, (PLANE, "--gtest_filter=*PlaneTest.RequestBeforeTheWait*")),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--rows", type=int, default=16)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        workload = pathlib.Path(folder) / "workload"
        subprocess.run(
            [args.bin / "stoker-replay", f"--write-workload={workload}", f"--rows={args.rows}", f"--steps={STEPS}",
             "--context=65536", "--top-k=2048", "--hot-rows=4096", "--row-bytes=656"],
            check=True, stdout=subprocess.DEVNULL)
        sys.exit(run(args, workload))


def run(args, workload):
    missing = []
    with args.out.open("w") as out:
        first = {"ncu": " ".join(sys.argv), "commit": os.environ.get("STOKER_COMMIT", "unknown"), "rows": args.rows}
        out.write(json.dumps(first) + "\n")
        for name, skip, count, program in LOOKS:
            command = [str(args.bin / program[0])] + [str(workload) if a == "WORKLOAD" else a for a in program[1:]]
            launches = look(name, skip, count, command)
            if not launches:
                missing.append(name)
            for launch in launches:
                out.write(json.dumps(launch) + "\n")
                out.flush()
    for name in missing:
        print(f"not seen: {name}", file=sys.stderr)
    return 1 if missing else 0


def look(name, skip, count, command):
    """The launches of one kernel, each as a dictionary."""
    result = subprocess.run(
        ["ncu", "--clock-control", "none", "--csv", "-k", name.partition("<")[0], "--launch-skip", str(skip), "-c",
         str(count), "--metrics", ",".join(METRICS)] + command,
        capture_output=True, text=True)
    launches = {}
    for row in csv.DictReader(line for line in result.stdout.splitlines() if line.startswith('"')):
        if row.get("Metric Value") is None or name not in row["Kernel Name"]:
            continue
        launch = launches.setdefault(row["ID"], {
            "kernel": row["Kernel Name"], "grid": row["Grid Size"], "block": row["Block Size"],
            "program": " ".join(command[1:2] if command[1].startswith("--gtest") else command[1:-1])})
        text = row["Metric Value"].replace(",", "")
        try:
            launch[row["Metric Name"]] = float(text)
        except ValueError:
            launch[row["Metric Name"]] = text
    return list(launches.values())


if __name__ == "__main__":
    main()
