#!/usr/bin/env python3
"""Times of one job's steps with random weights, twice: call by call while some steps are traced, then as it trains by itself.

    one_job.py [--case 8b-8k] [--steps 12] [--kind gpu|cpu]

The traces of ranks stay in traces/ of the working folder. The last line is JSON: seconds of each step and tokens per second, of
both runs, and what `ravelctl trace overlap` says. Exit code 3: no device, or the job does not fit it. Standard library only.
"""
import argparse
import json
import pathlib
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "bench"), str(TESTS / "bench/peers"), str(TESTS / "testing")]
import cluster  # noqa: E402
import gpu_jobs  # noqa: E402
from gpu_shapes import SHAPES  # noqa: E402

NO_DEVICE, WARM_UP, SECONDS, LR = 3, 5, 270, 1e-4


class Unusable(Exception):
    """The job cannot run here; the text says why."""


def write_tokens(folder, shape, steps):
    count = shape["sequences"] * shape["tokens"] * (steps + 1) + 1
    size = "I" if gpu_jobs.token_format(shape) == "flat_u32" else "H"
    ids = random.Random(1)
    (folder / "tokens.bin").write_bytes(struct.pack(f"<{count}{size}", *(ids.randrange(shape["vocabulary"]) for _ in range(count))))


def step_seconds(ravel, folder, arguments, name, **observability):
    """Of the first steps of a job, which is cancelled then."""
    job = json.loads(gpu_jobs.job_text(arguments.case, name, folder, steps=arguments.steps, lr=LR, kind=arguments.kind))
    job["spec"]["observability"] = observability
    file = folder / f"{name}.json"
    file.write_text(json.dumps(job))
    ravel.ctl("submit", "-f", file)
    end = time.monotonic() + SECONDS
    while len(rows := [row for row in ravel.ctl("metrics", name, "-o", "jsonl").stdout.splitlines() if row.strip()]) < arguments.steps:
        state = ravel.job(name)
        message = f"{name}: {state['state']}: {state.get('reason', '')}: {state.get('message', '')}"
        if "does not fit" in message:
            raise Unusable(message)
        if state["state"] in ("FAILED", "CANCELLED") or time.monotonic() > end:
            sys.exit(f"expected {arguments.steps} steps within {SECONDS} s, got {len(rows)}; {message}")
        time.sleep(0.2)
    ravel.ctl("cancel", name, check=False)
    ravel.ctl("wait", name, "--for", "done", check=False)
    return [json.loads(row)["step_seconds"] for row in rows[:arguments.steps]]


def measure(ravel, folder, arguments):
    shape = SHAPES[arguments.case]
    write_tokens(folder, shape, arguments.steps)
    traces = pathlib.Path("traces").resolve()
    trace = {"firstStep": WARM_UP + 1, "lastStep": WARM_UP + 3, "directory": str(traces)}
    line = {"case": arguments.case}
    for name, observability in (("traced", {"trace": trace}), ("alone", {})):
        seconds = step_seconds(ravel, folder, arguments, name, **observability)
        rate = shape["sequences"] * shape["tokens"] / statistics.median(seconds[WARM_UP:])
        line[name] = {"step_seconds": [round(s, 4) for s in seconds], "tokens_per_second": round(rate, 1)}
        print(f"{name}: {rate:.0f} tokens/s", flush=True)
    overlap = subprocess.run([ravel.binaries / "ravelctl", "trace", "overlap", traces], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return {**line, "overlap": overlap.stdout.strip()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="8b-8k", choices=list(SHAPES))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kind", default="gpu", choices=("gpu", "cpu"))
    arguments = parser.parse_args()
    if arguments.steps < WARM_UP + 3:
        parser.error(f"--steps: expected {WARM_UP + 3} or more")
    with tempfile.TemporaryDirectory() as name, cluster.Cluster(pathlib.Path(name) / "cluster", 1) as ravel:
        node = json.loads(ravel.ctl("nodes", "list", "-o", "json").stdout)["items"][0]
        try:
            if arguments.kind == "gpu" and node.get("message"):
                raise Unusable(f"no device: {node['message']}")
            print(json.dumps(measure(ravel, pathlib.Path(name), arguments)))
        except Unusable as reason:
            print(reason)
            return NO_DEVICE
    return 0


if __name__ == "__main__":
    sys.exit(main())
