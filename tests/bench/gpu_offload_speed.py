"""G7: training steps of one GPU with all state of the optimizer on its host, against the same steps with the state on the device, and
against an offload without overlap. Clipping is on, and all losses must be the same. The case tiny runs on a CPU, whose state goes to a
file: it shows that this harness works, and reports no speed.
"""
import pathlib
import random
import statistics
import struct
import tempfile

import cluster
import gpu_jobs
from gpu_shapes import SHAPES
from gpu_training_speed import BLOCK, LR, WARM_UP, Workload, require_gpu
from harness import progress

SIDES = {"memory": None, "offload": {"fraction": 1}, "no overlap": {"fraction": 1, "overlap": False}}
GOALS = {"1.5b-64k": 1.10, "1.5b-256k": 1.02}


class OffloadWork(Workload):
    """A job over random tokens from random weights; the runs differ in where the state lies alone."""

    def __init__(self, case, steps, folder, kind):
        self.case, self.steps, self.kind, self.folder = case, steps, kind, pathlib.Path(folder)
        shape = SHAPES[case]
        self.tokens_per_step, self.offload = shape["sequences"] * shape["tokens"], None
        ids = random.Random(1)
        count, size = self.tokens_per_step * (steps + 1) + 1, "I" if gpu_jobs.token_format(shape) == "flat_u32" else "H"
        (self.folder / "tokens.bin").write_bytes(struct.pack(f"<{count}{size}", *(ids.randrange(shape["vocabulary"]) for _ in range(count))))

    def job_text(self, name):
        return gpu_jobs.job_text(self.case, name, self.folder, steps=self.steps, lr=LR, kind=self.kind, offload=self.offload)

    def side(self, ravel, side, pair):
        path = {"path": str(self.folder)} if self.kind == "cpu" else {}
        self.offload = SIDES[side] and {**SIDES[side], **path}
        return self.ours(ravel, f"{side.replace(' ', '-')}-{pair}")


def measure(work, ravel, pairs):
    """Tokens per second by side and pair."""
    samples = {side: [] for side in SIDES}
    for pair in range(pairs):
        losses = {}
        for side in SIDES:
            losses[side], seconds = work.side(ravel, side, pair)
            samples[side].append(work.rate(seconds))
        if len(losses["memory"]) != work.steps or any(of_side != losses["memory"] for of_side in losses.values()):
            raise SystemExit(f"{work.case}: losses differ: {losses}")
        progress(f"{work.case}: pair {pair + 1} of {pairs}: " + ", ".join(f"{side} {rates[-1]:.0f}" for side, rates in samples.items()))
    return samples


def line_of(work, samples):
    verified = f"{work.steps} losses are equal bits on all sides"
    if work.kind == "cpu":
        return {"case": work.case, "metric": "the harness itself, on a CPU; no speed", "unit": "", "ours": "", "peer": "", "ratio": "",
                "peer_name": "Ravel without offload", "goal": "losses agree", "pass": True, "verified": verified}
    ratios = {side: [a / b for a, b in zip(samples["memory"], samples[side])] for side in ("offload", "no overlap")}
    slowdown = {side: statistics.median(values) for side, values in ratios.items()}
    return {"case": work.case, "metric": "slowdown of training steps, all state of the optimizer on the host, clipping on", "unit": "tokens/s",
            "ours": round(statistics.median(samples["offload"]), 1), "peer": round(statistics.median(samples["memory"]), 1),
            "peer_name": "Ravel without offload", "ratio": round(slowdown["offload"], 3), "min": round(min(ratios["offload"]), 3),
            "max": round(max(ratios["offload"]), 3), "slowdown_without_overlap": round(slowdown["no overlap"], 3),
            "goal": f"slowdown <= {GOALS[work.case]:.2f}, less than without overlap",
            "pass": slowdown["offload"] <= GOALS[work.case] and slowdown["offload"] < slowdown["no overlap"],
            "samples": {side: [round(rate, 1) for rate in rates] for side, rates in samples.items()}, "verified": verified}


def run(case, arguments):
    kind = "cpu" if case == "tiny" else "gpu"
    with tempfile.TemporaryDirectory() as folder:
        work = OffloadWork(case, max(arguments.steps, WARM_UP + 2 * BLOCK), folder, kind)
        with cluster.Cluster(work.folder / "cluster", 1, worker_options=("--cpu-devices", "1")) as ravel:
            if kind == "gpu":
                require_gpu(ravel)
            return line_of(work, measure(work, ravel, arguments.pairs))


def cases(arguments, name):
    for case in (*gpu_jobs.CASES[name], "tiny"):
        if case in (arguments.case or gpu_jobs.CASES[name]):
            yield lambda case=case: run(case, arguments)
