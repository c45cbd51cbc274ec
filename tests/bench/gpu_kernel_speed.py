"""G5, kernels bound by memory, and G6, gemms of an 8B model: gpu_speed against torch.compile and torch.matmul, alternating.

Both sides are processes that live through all pairs of a case and answer one line per measurement, so that neither compiles nor
searches again. Each verifies its results before it times them.
"""
import json
import os
import statistics
import subprocess
import sys

import cluster
from harness import BENCH, NoDevice, progress

NO_DEVICE = 3
GOALS = {"G5": {"percent_of_copy": 88, "adamw": 90}, "G6": {"ratio": 1.02}}


def peer_environment():
    """Peers bring their own libraries: the bundle's runner keeps the machine's LD_LIBRARY_PATH for them."""
    own = os.environ.get("RAVEL_PEER_LD_LIBRARY_PATH")
    return os.environ if own is None else {**os.environ, "LD_LIBRARY_PATH": own}


class Server:
    """A program that answers a line for a line."""

    def __init__(self, name, command, environment=None):
        self.name = name
        self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True, bufsize=1, env=environment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def ask(self, case):
        try:
            self.process.stdin.write(case + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        error = self.process.stderr.read().strip()[-2000:]
        if self.process.wait() == NO_DEVICE:
            raise NoDevice(error.removeprefix("no device: "))
        sys.exit(f"{case}: {self.name} gave no result: {error}")


def our_program():
    path = cluster.default_binaries() / "gpu_speed"
    if not path.exists():
        sys.exit(f"{path} is missing: build the target gpu_speed")
    return path


def run(name, case, ours, peer, pairs):
    left, right = [], []
    for pair in range(pairs):
        left.append(ours.ask(case))
        right.append(peer.ask(case))
        progress(f"{name} {case}: pair {pair + 1} of {pairs}: {left[-1]['microseconds']} us, peer {right[-1]['microseconds']} us")
    if left[0]["small"] or right[0]["small"]:
        sys.exit(f"{case}: sizes are small: no speed is reported")
    median = lambda lines, key: statistics.median(line[key] for line in lines)  # noqa: E731
    ratios = [b["microseconds"] / a["microseconds"] for a, b in zip(left, right)]
    ratio, unit = statistics.median(ratios), "GB/s" if name == "G5" else "TFLOP/s"
    key = "gb_per_second" if name == "G5" else "tflops"
    if name == "G5":
        percent = median(left, "percent_of_copy")
        limit = GOALS["G5"]["adamw" if case.startswith("adamw") else "percent_of_copy"]
        goal, passed, roof = f">= {limit} % of the copy rate", percent >= limit, {"roof_gb_per_second": median(left, "copy_gb_per_second"),
                                                                               "percent_of_roof": round(percent, 1)}
    else:
        limit = GOALS["G6"]["ratio"]
        goal, passed, roof = f">= {limit}", ratio >= limit, {}
    return {"case": case, "metric": "time of one call, cold cache, random data", "unit": unit, "ours": median(left, key), "peer": median(right, key),
            "peer_name": "torch " + right[0]["torch"], "ratio": round(ratio, 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3),
            "goal": goal, "pass": passed, **roof, "ratios": [round(r, 3) for r in ratios], "device": left[0]["device"],
            "samples": {"ours_us": [a["microseconds"] for a in left], "peer_us": [b["microseconds"] for b in right]},
            "verified": f"ours: {left[0]['verified']}; peer: {right[0]['verified']}"}


def cases(arguments, name):
    program = our_program()
    listed = subprocess.run([program, "--list"], check=True, stdout=subprocess.PIPE, text=True).stdout.split("\n")
    chosen = [line.split()[1] for line in listed if line.startswith(name + " ")]
    chosen = [case for case in chosen if not arguments.case or case in arguments.case]
    if not chosen:
        return
    with Server("gpu_speed", [program, "--serve"]) as ours:
        ours.ask(chosen[0])  # without a device it ends here, before the peer is started
        with Server("the peer", [sys.executable, "-B", BENCH / "peers/torch_gpu_kernels.py", "--serve"], peer_environment()) as peer:
            for case in chosen:
                yield lambda case=case: run(name, case, ours, peer, arguments.pairs)
