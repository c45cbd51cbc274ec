"""P1: the coordinator under a fake fleet; P3: its cold start. fleet_load does both; there is no peer, only bars."""
import json
import subprocess

import cluster
from harness import progress

# name in fleet_load's answer -> bar
P1_AT_MOST = {"steady_ack_p99_ms": 100, "fill_ack_p99_ms": 100, "strand_lag_p99_ms": 50, "list_p99_ms": 100, "get_p99_ms": 100, "closed_declared_s_most": 6,
              "frozen_declared_s_most": 6, "rss_most_mib": 512}
P1_AT_LEAST = {"fill_submits_per_s_least": 200, "steady_submits_per_s": 200}
P3_AT_MOST = {"cold_start_s": 3}


def measure(*arguments):
    binaries = cluster.default_binaries()
    command = [str(word) for word in (binaries / "fleet_load", "--coordinator", binaries / "ravel-coordinator", *arguments)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not run.stdout.strip():
        raise SystemExit(f"{' '.join(command)}: exit {run.returncode}")
    return json.loads(run.stdout)


def judged(case, metric, unit, main, numbers, at_most, at_least):
    """A bar whose number is missing or -1 (not measured) does not hold."""
    missed = [f"{name} {numbers.get(name)} > {bar}" for name, bar in at_most.items() if not 0 <= numbers.get(name, -1) <= bar]
    missed += [f"{name} {numbers.get(name)} < {bar}" for name, bar in at_least.items() if numbers.get(name, -1) < bar]
    for text in missed:
        progress(f"{case}: missed: {text}")
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in numbers.items()}
    return {"case": case, "metric": metric, "unit": unit, "ours": rounded.get(main), "goal": {"at_most": at_most, "at_least": at_least}, "pass": not missed,
            "missed": missed, "numbers": rounded}


def load():
    numbers = measure("--steady", 30, "--kills", 6)
    return judged("1000 nodes x 8, 990 running, 10,000 queued, 220 submits/s", "beat to acknowledgement, p99", "ms", "steady_ack_p99_ms", numbers,
                  P1_AT_MOST, P1_AT_LEAST)


def cold_start():
    numbers = measure("--queued", 9010, "--steady", 0, "--kills", 0, "--metric-lines", 10_000_000)
    return judged("10,000 jobs, 10 M metric lines", "start of the program to the first answer", "s", "cold_start_s", numbers, P3_AT_MOST,
                  {"cold_start_jobs": 10_000, "metric_lines": 9_990_000})


def cases(arguments, name):
    yield load if name == "P1" else cold_start
