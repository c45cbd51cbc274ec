#!/usr/bin/env python3
"""Runs benchmark ids in alternating pairs and prints one JSON line per case; called by run.sh. Exit 1: a check or goal failed."""
import argparse
import datetime
import json
import os
import pathlib
import platform
import random
import statistics
import struct
import subprocess
import sys
import tempfile

BENCH = pathlib.Path(__file__).resolve().parent
ROOT = BENCH.parents[1]
sys.path += [str(BENCH.parent / "testing"), str(BENCH / "peers")]
import cluster  # noqa: E402
from llama import SHAPES  # noqa: E402

RANKS, WARM_UP, VERIFIED_STEPS, TOLERANCE, LR = 2, 3, 5, 1e-4, 1e-3
# Both sides may use 256-bit registers and no wider ones, so that they are compared with the same roof.
CAPS = {"RAVEL_CPU_ISA": "avx2", "OPENBLAS_CORETYPE": "Haswell", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def output_of(*command, **options):
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True, **options).stdout.strip()


def step_flops(shape):
    """Multiply-adds of one step of all ranks, forward and backward, attention counted to the diagonal, times two."""
    width, tokens = shape["width"], shape["tokens"]
    matrices = shape["layers"] * (4 * width * width + 3 * width * shape["ffn"]) + width * shape["vocabulary"]
    attention = shape["layers"] * tokens * width  # scores and values, half of the square
    return RANKS * shape["sequences"] * tokens * 6 * (matrices + attention)


def facts():
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemTotal"))
    return {"machine": {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory / 2**20, 1), "kernel": platform.release()},
            "commit": output_of("git", "-C", ROOT, "rev-parse", "--short", "HEAD"),
            "dirty": bool(output_of("git", "-C", ROOT, "status", "--porcelain")),
            "build": os.path.relpath(cluster.default_binaries(), ROOT), "command": "tests/bench/run.sh " + " ".join(sys.argv[1:]), "caps": CAPS,
            "utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}


def job_text(name, shape, folder, steps):
    return f"""
apiVersion: ravel/v1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  model: {{from: "{folder}/model"}}
  data: {{train: [{{path: "{folder}/tokens.bin"}}], format: flat_u16, sequenceLength: {shape["tokens"]}}}
  training:
    steps: {steps}
    globalBatch: {RANKS * shape["sequences"]}
    optimizer: {{lr: {LR}, weightDecay: 0.1, clipNorm: 1.0}}
    schedule: {{kind: constant}}
  devices: {{kind: cpu, count: {RANKS}}}
  determinism: {{mode: exact, virtualRanks: {RANKS}}}
  checkpoint: {{store: "file://{folder}/store", everySteps: 1000000}}
"""


class C1:
    """Tokens per second of a training step, 2 ranks with one thread each."""

    def __init__(self, case, steps, folder):
        self.case, self.steps, self.folder = case, steps, folder
        self.shape = SHAPES[case]
        subprocess.run([sys.executable, BENCH / "peers" / "llama.py", "make", case, folder / "model"], check=True)
        ids = random.Random(1)
        count = RANKS * self.shape["sequences"] * self.shape["tokens"] * (steps + 1) + 1
        (folder / "tokens.bin").write_bytes(struct.pack(f"<{count}H", *(ids.randrange(self.shape["vocabulary"]) for _ in range(count))))
        (folder / "batch.yaml").write_text(job_text("batch", self.shape, folder, steps))
        each = self.shape["sequences"]
        batches = [cluster.batch(folder / "batch.yaml", step) for step in range(steps)]
        batches = [[samples[rank * each:(rank + 1) * each] for rank in range(RANKS)] for samples in batches]
        (folder / "batches.json").write_text(json.dumps(batches))

    def ours(self, ravel, name):
        job = self.folder / f"{name}.yaml"
        job.write_text(job_text(name, self.shape, self.folder, self.steps))
        history = ravel.train(job, name)
        return [row["loss"] for row in history], [row["step_seconds"] for row in history]

    def peer(self):
        result = json.loads(output_of(sys.executable, BENCH / "peers" / "ddp_gloo.py", self.case, self.folder / "model",
                                      self.folder / "batches.json", self.steps, LR, env={**os.environ, **CAPS}))
        self.peer_version = "torch " + result["torch"]
        return result["losses"], result["step_seconds"]

    def run(self, pairs, goal):
        tokens = RANKS * self.shape["sequences"] * self.shape["tokens"]
        roof = float(output_of(ROOT / "build/bench/measured_roof", RANKS))
        samples, verified = {"ours": [], "peer": []}, 0.0
        with cluster.Cluster(self.folder / "cluster", RANKS, environment=CAPS, pin_cores=True) as ravel:
            for pair in range(pairs):
                our_losses, our_seconds = self.ours(ravel, f"pair-{pair}")
                peer_losses, peer_seconds = self.peer()
                verified = max([verified] + [abs(a - b) / b for a, b in zip(our_losses[:VERIFIED_STEPS], peer_losses)])
                if verified > TOLERANCE:
                    sys.exit(f"C1 {self.case}: losses differ by {verified:.1e}: {our_losses[:VERIFIED_STEPS]} {peer_losses[:VERIFIED_STEPS]}")
                samples["ours"].append(tokens / statistics.median(our_seconds[WARM_UP:]))
                samples["peer"].append(tokens / statistics.median(peer_seconds[WARM_UP:]))
        ratios = [a / b for a, b in zip(samples["ours"], samples["peer"])]
        ours, peer, ratio = (statistics.median(x) for x in (samples["ours"], samples["peer"], ratios))
        flops = step_flops(self.shape) / tokens
        rounded = {side: [round(x, 1) for x in values] for side, values in samples.items()}
        print(json.dumps({
            "id": "C1", "case": self.case, "metric": "training step, 2 ranks x 1 thread", "unit": "tokens/s",
            "ours": round(ours, 1), "peer": round(peer, 1), "ratio": round(ratio, 3), "goal": f"> {goal}", "pass": ratio > goal,
            "percent_of_roof": round(100 * ours * flops / 1e9 / roof, 1), "peer_percent_of_roof": round(100 * peer * flops / 1e9 / roof, 1),
            "roof_gflops": roof, "mflop_per_token": round(flops / 1e6, 1), "samples": rounded,
            "ratios": [round(r, 3) for r in ratios], "min": round(min(ratios), 3), "max": round(max(ratios), 3),
            "verified": f"first {VERIFIED_STEPS} losses differ by at most {verified:.1e}",
            "peer_name": f"DDP over gloo, {self.peer_version}", **facts()}), flush=True)
        return ratio > goal


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="+", choices=["C1"])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=WARM_UP + 10, help="per run, the first 3 untimed")
    parser.add_argument("--case", choices=list(SHAPES), action="append", help="default: 34m and 9m")
    arguments = parser.parse_args()
    if arguments.steps <= WARM_UP or arguments.pairs < 1:
        parser.error(f"--steps must be above {WARM_UP} and --pairs above 0")
    passed = True
    for case in arguments.case or ["34m", "9m"]:
        with tempfile.TemporaryDirectory() as folder:
            passed &= C1(case, arguments.steps, pathlib.Path(folder)).run(arguments.pairs, goal=1.0)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
