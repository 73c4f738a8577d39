#!/usr/bin/env python3
"""Decodes 10,000 steps and more on each plane, over a matrix of shapes, and compares every row that a step hands out.

    tests/gpu/decode_steps.py BIN_DIR OUT_DIR [--planes rpc,direct,server] [--steps 10000] [--jobs 4] [--server-jobs 2]

Each case is a stoker-replay with a stokerd of its own; so many run side by side. The server plane runs under an MPS control
daemon of its own (with_mps.sh), the others without MPS. --device cpu tries it without a GPU; --layers makes it smaller.

Writes OUT_DIR/decode_steps.jsonl: the result of each case, and for each plane the sum. Fails if a row was wrong, a case did not
do what it is there for, or a plane made fewer steps. BIN_DIR has stoker-replay and stokerd; nothing is built.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
TIMEOUT_S = 280

# Sequences join and leave in all of them: there are more requests than fit at a time. `groups_of` are the layers that share a
# selection. `accepted` are the tokens that a sequence gains in a step, on average. A prompt of the generator's is up to
# about five times as long as the mean, so that with 700 no sequence outgrows 4,096 hot rows, and with 6,000 most have more
# than 2,048. Pools hold the open sequences at their longest, and little more: blocks are evicted.
CASES = [
    dict(name="short", groups_of=4, concurrency=8, output=60, accepted=1,
         options="--input-length 700 --top-k 512 --hot-rows 4096 --pool-blocks 130"),
    dict(name="short", groups_of=1, concurrency=6, output=60, accepted=1,
         options="--input-length 700 --top-k 256 --hot-rows 4096 --pool-blocks 130"),
    dict(name="long", groups_of=4, concurrency=4, output=80, accepted=1,
         options="--input-length 6000 --top-k 1024 --hot-rows 2048 --pool-blocks 320"),
    dict(name="long", groups_of=1, concurrency=4, output=80, accepted=1,
         options="--input-length 6000 --top-k 512 --hot-rows 1024 --pool-blocks 320"),
    dict(name="speculative-padded", groups_of=4, concurrency=4, output=120, accepted=2, speculative=True,
         options="--input-length 3000 --top-k 512 --hot-rows 2048 --pool-blocks 200 --query-rows 3 --padding-rows 5"),
    dict(name="speculative-padded", groups_of=1, concurrency=4, output=90, accepted=1.5, speculative=True,
         options="--input-length 3000 --top-k 256 --hot-rows 768 --pool-blocks 200 --query-rows 2 --padding-rows 3"),
    dict(name="two-engines", groups_of=4, concurrency=3, output=80, accepted=1, engines=2,
         options="--input-length 6000 --top-k 2048 --hot-rows 4096 --pool-blocks 420"),
    dict(name="two-engines-padded", groups_of=1, concurrency=4, output=60, accepted=1, engines=2,
         options="--input-length 1500 --top-k 256 --hot-rows 1024 --pool-blocks 200 --padding-rows 2"),
]


def command_of(case, plane, arguments):
    groups = -(-arguments.layers // case["groups_of"])
    engines = case.get("engines", 1)
    # A tenth more than the case's share: when requests run out, batches become smaller, not longer.
    steps = 1.1 * arguments.steps / len(CASES)
    requests = max(int(steps * case["concurrency"] * case["accepted"] / case["output"]), 2 * engines * case["concurrency"])
    return [
        str(arguments.bin / "stoker-replay"), "--stokerd", str(arguments.bin / "stokerd"), "--device", arguments.device,
        "--transfer", "shared", "--plane", plane, "--layers", str(arguments.layers), "--groups", str(groups), "--row-bytes", "656",
        "--requests", str(requests), "--output-length", str(case["output"]), "--concurrency", str(case["concurrency"]), "--engines",
        str(engines), "--json", "--progress", "none", *case["options"].split()
    ]


def faults_of(case, plane, status, result, device):
    """What is wrong with a run, beside nothing."""
    if status != 0 or not result:
        return ["exit status %d" % status]
    faults = []
    if result["wrong_rows"] != 0:
        faults.append("%d wrong rows" % result["wrong_rows"])
    if result["plane"] != plane:
        faults.append("on the plane %s" % result["plane"])
    if (result["checked_rows_device"] == 0) != (device == "cpu") or result["checked_rows"] == 0:
        faults.append("%d rows compared, %d of them on the device" % (result["checked_rows"], result["checked_rows_device"]))
    if result["stored_rows"] != result["unique_rows"]:
        faults.append("%d rows stored, %d were to be" % (result["stored_rows"], result["unique_rows"]))
    if result["prefix_hit_ratio"] == 0:
        faults.append("no prefix shared")
    if result["lookups_miss"] == 0:
        faults.append("no row missed")
    if case.get("speculative") and result["output_tokens"] < 1.1 * case["concurrency"] * result["steps"]:
        faults.append("%d tokens in %d steps" % (result["output_tokens"], result["steps"]))
    return faults


def run_case(case, plane, arguments):
    name = "%s-%s-groups-of-%d" % (plane, case["name"], case["groups_of"])
    command = command_of(case, plane, arguments)
    log = arguments.out / (name + ".log")
    begin = time.monotonic()
    with open(log, "wb") as output:
        try:
            status = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=TIMEOUT_S).returncode
        except subprocess.TimeoutExpired:
            status = 124
    lines = log.read_text(errors="replace").splitlines()
    result = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}
    faults = faults_of(case, plane, status, result, arguments.device)
    print("%-6s %-44s %4d s  %s" % ("FAILED" if faults else "ok", name, time.monotonic() - begin,
                                    "%s, see %s" % ("; ".join(faults), log) if faults else "%d steps, %d rows" %
                                    (result["steps"], result["checked_rows"])), flush=True)
    shown = " ".join(["stoker-replay"] + command[3:])
    return dict(case=name, plane_wanted=plane, mps=plane == "server" and arguments.device != "cpu", commit=arguments.commit,
                command=shown, exit_status=status, faults=faults, **result)


def run_plane(plane, arguments):
    jobs = arguments.server_jobs if plane == "server" else arguments.jobs
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda case: run_case(case, plane, arguments), CASES))
    total = lambda field: sum(result.get(field, 0) for result in results)
    summary = dict(summary="decode_steps", plane=plane, cases=len(results), steps=total("steps"), steps_wanted=arguments.steps,
                   checked_rows=total("checked_rows"), wrong_rows=total("wrong_rows"),
                   failed_cases=sum(1 for result in results if result["faults"]), commit=arguments.commit,
                   seconds=round(time.monotonic() - begin, 1))
    summary["ok"] = summary["failed_cases"] == 0 and summary["wrong_rows"] == 0 and summary["steps"] >= arguments.steps
    with open(arguments.out / "decode_steps.jsonl", "a") as file:
        for line in results + [summary]:
            file.write(json.dumps(line) + "\n")
    print(json.dumps(summary), flush=True)
    return summary["ok"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--planes", default="rpc,direct,server")
    parser.add_argument("--steps", type=int, default=10000, help="of each plane")
    parser.add_argument("--jobs", type=int, default=4, help="cases side by side, on the rpc and the direct plane")
    parser.add_argument("--server-jobs", type=int, default=2, help="likewise on the server plane")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--commit", default=os.environ.get("STOKER_COMMIT", "unknown"), help="of the source, for the result lines")
    parser.add_argument("--mps-runs", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.bin = arguments.bin.resolve()
    arguments.out = arguments.out.resolve()
    planes = arguments.planes.split(",")
    if not (arguments.bin / "stoker-replay").exists() or not set(planes) <= {"rpc", "direct", "server"}:
        parser.error("BIN_DIR has no stoker-replay, or --planes is not of rpc, direct and server")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.mps_runs:
        (arguments.out / "decode_steps.jsonl").write_text("")
    well = True
    for plane in planes:
        if plane == "server" and arguments.device != "cpu" and not arguments.mps_runs:
            # This program once more, under MPS.
            again = [str(HERE / "with_mps.sh"), sys.executable, *sys.argv, "--planes", "server", "--mps-runs"]
            well = subprocess.run(again).returncode == 0 and well
        else:
            well = run_plane(plane, arguments) and well
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
