"""G1, G3 and G4: tokens per second of whole training steps on one GPU, against the better of PyTorch without a wrapper and FSDP2.

The cases tiny and tiny-gpt2 run both sides on CPUs in fp32: they show that this harness works, and report no speed.
"""
import json
import pathlib
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import cluster
from gpu_kernel_speed import peer_environment
from harness import BENCH, NoDevice, output_of, progress

WARM_UP, VERIFIED_STEPS, LR = 5, 5, 1e-4
PEERS = {"single": "torch.compile", "fsdp2": "torch.compile and FSDP2 over one rank"}
CASES = {"G1": ("8b-8k", "8b-4k"), "G3": ("3b", "1.5b"), "G4": ("124m",)}
GOALS = {"8b-8k": {"ratio": 1.25, "tokens": 12000}, "8b-4k": {"ratio": 1.25, "tokens": 0}, "3b": {"ratio": 1.25, "mfu": 62}, "1.5b": {"ratio": 1.25, "mfu": 59},
         "124m": {"ratio": 1.3, "tokens": 540000}}
PEAK_FLOPS = 989.4e12  # dense bf16 of Hopper
TOLERANCE = {"gpu": 1e-2, "cpu": 1e-4}


class Workload:
    """A model directory, random tokens, and the batches that Ravel draws, for both sides."""

    def __init__(self, case, steps, folder, kind, lr=LR):
        import gpu_models
        self.case, self.steps, self.folder, self.kind, self.lr = case, steps, pathlib.Path(folder), kind, lr
        self.shape = gpu_models.SHAPES[case]
        self.flops = gpu_models.flops_per_token(self.shape)
        self.tokens_per_step = self.shape["sequences"] * self.shape["tokens"]
        subprocess.run([sys.executable, "-B", BENCH / "peers/gpu_models.py", "make", case, self.folder / "model"], check=True, env=peer_environment())
        ids, count = random.Random(1), self.tokens_per_step * (steps + 1) + 1
        wide = self.shape["vocabulary"] > 65536
        (self.folder / "tokens.bin").write_bytes(struct.pack(f"<{count}{'I' if wide else 'H'}", *(ids.randrange(self.shape["vocabulary"]) for _ in range(count))))
        self.format = "flat_u32" if wide else "flat_u16"
        (self.folder / "batch.yaml").write_text(self.job_text("batch"))
        (self.folder / "batches.json").write_text(json.dumps([cluster.batch(self.folder / "batch.yaml", step) for step in range(steps)]))

    def job_text(self, name):
        # More steps than are timed: the job is cancelled after those, so that no checkpoint of the model is written.
        extra = 0 if self.kind == "cpu" else 1000
        return f"""
apiVersion: ravel/v1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  model: {{from: "{self.folder}/model"}}
  data: {{train: [{{path: "{self.folder}/tokens.bin"}}], format: {self.format}, sequenceLength: {self.shape["tokens"]}}}
  training:
    steps: {self.steps + extra}
    globalBatch: {self.shape["sequences"]}
    optimizer: {{lr: {self.lr}, weightDecay: 0.1, clipNorm: 1.0}}
    schedule: {{kind: constant}}
  devices: {{kind: {self.kind}, count: 1}}
  checkpoint: {{store: "file://{self.folder}/store", everySteps: 1000000}}
"""

    def ours(self, ravel, name):
        """(losses, seconds per step) of the first steps of a job."""
        job = self.folder / f"{name}.yaml"
        job.write_text(self.job_text(name))
        if self.kind == "cpu":
            history = ravel.train(job, name)
        else:
            ravel.ctl("submit", "-f", job)
            history = self.wait_for_steps(ravel, name)
            ravel.ctl("cancel", name)
            ravel.ctl("wait", name, "--for", "CANCELLED")
        shutil.rmtree(self.folder / "store", ignore_errors=True)
        return [row["loss"] for row in history[:self.steps]], [row["step_seconds"] for row in history[:self.steps]]

    def wait_for_steps(self, ravel, name, minutes=15):
        end = time.monotonic() + 60 * minutes
        while time.monotonic() < end:
            history = [json.loads(line) for line in ravel.ctl("metrics", name, "-o", "jsonl").stdout.splitlines() if line.strip()]
            if len(history) >= self.steps:
                return history
            job = ravel.job(name)
            if job["state"] in ("FAILED", "CANCELLED", "SUCCEEDED"):
                sys.exit(f"{self.case}: the job ended as {job['state']}: {job.get('reason')}: {job.get('message')}")
            time.sleep(0.5)
        sys.exit(f"{self.case}: {self.steps} steps took more than {minutes} minutes")

    def peer(self, kind):
        """(losses, seconds per step, version) of peers/torch_gpu.py."""
        options = ["--device", "cpu", "--dtype", "fp32", "--no-compile"] if self.kind == "cpu" else []
        result = json.loads(output_of(sys.executable, "-B", BENCH / "peers/torch_gpu.py", kind, self.case, self.folder / "model",
                                      self.folder / "batches.json", self.steps, self.lr, *options, env=peer_environment()).splitlines()[-1])
        return result["losses"], result["step_seconds"], "torch " + result["torch"]

    def verify(self, our_losses, peer_losses, kind):
        """The largest relative difference of the first losses; ends the program where it is no rounding."""
        pairs = list(zip(our_losses, peer_losses))[:VERIFIED_STEPS]
        worst = max(abs(a - b) / b for a, b in pairs)
        if len(pairs) < VERIFIED_STEPS or not worst <= TOLERANCE[self.kind]:
            sys.exit(f"{self.case}: losses of Ravel and {kind} differ by {worst:.1e}: {pairs}")
        return worst


def require_gpu(ravel):
    node = json.loads(ravel.ctl("nodes", "list", "-o", "json").stdout)["items"][0]
    if node.get("message"):
        raise NoDevice(node["message"])


def measure(work, pairs):
    samples, worst, version = {"ours": [], **{kind: [] for kind in PEERS}}, 0.0, ""
    rate = lambda seconds: work.tokens_per_step / statistics.median(seconds[WARM_UP:])  # noqa: E731
    with cluster.Cluster(work.folder / "cluster", 1) as ravel:
        for pair in range(pairs):
            our_losses, our_seconds = work.ours(ravel, f"pair-{pair}")
            runs = {kind: work.peer(kind) for kind in PEERS}
            worst = max([worst] + [work.verify(our_losses, runs[kind][0], kind) for kind in PEERS])
            version = runs["single"][2]
            samples["ours"].append(rate(our_seconds))
            for kind in PEERS:
                samples[kind].append(rate(runs[kind][1]))
            progress(f"{work.case}: pair {pair + 1} of {pairs}: " + ", ".join(f"{k} {v[-1]:.0f}" for k, v in samples.items()))
    return samples, worst, version


def run(case, arguments):
    steps = max(arguments.steps, WARM_UP + 10)
    with tempfile.TemporaryDirectory() as folder:
        work = Workload(case, steps, folder, "cpu" if case.startswith("tiny") else "gpu")
        samples, worst, version = measure(work, arguments.pairs)
    verified = f"first {VERIFIED_STEPS} losses differ by at most {worst:.1e}"
    if work.kind == "cpu":
        return {"case": case, "metric": "the harness itself, on CPUs; no speed", "unit": "", "ours": "", "peer": "", "ratio": "",
                "peer_name": version, "goal": "losses agree", "pass": True, "verified": verified}
    median = {side: statistics.median(values) for side, values in samples.items()}
    better = max(PEERS, key=lambda kind: median[kind])
    ratios = {kind: [a / b for a, b in zip(samples["ours"], samples[kind])] for kind in PEERS}
    ratio, goal = statistics.median(ratios[better]), GOALS[case]
    mfu = {side: 100 * value * work.flops / PEAK_FLOPS for side, value in median.items()}
    return {"case": case, "metric": "training step on one device, causal-half counting", "unit": "tokens/s", "ours": round(median["ours"], 1),
            "peer": round(median[better], 1), "peer_name": f"{PEERS[better]}, {version}", "ratio": round(ratio, 3),
            "min": round(min(ratios[better]), 3), "max": round(max(ratios[better]), 3), "goal": ", ".join(f"{k} >= {v}" for k, v in goal.items() if v),
            "pass": ratio >= goal["ratio"] and median["ours"] >= goal.get("tokens", 0) and mfu["ours"] >= goal.get("mfu", 0),
            "mfu": {side: round(value, 2) for side, value in mfu.items()}, "mflop_per_token": round(work.flops / 1e6, 1),
            "peers": {kind: {"name": PEERS[kind], "tokens_per_second": round(median[kind], 1), "ratio": round(statistics.median(ratios[kind]), 3)} for kind in PEERS},
            "samples": {side: [round(x, 1) for x in values] for side, values in samples.items()}, "ratios": [round(r, 3) for r in ratios[better]],
            "verified": verified}


def cases(arguments, name):
    wanted = arguments.case or CASES[name]
    own = {"G1": ("tiny",), "G4": ("tiny-gpt2",)}
    chosen = [case for case in (*CASES[name], *own.get(name, ())) if case in wanted]
    if any(not case.startswith("tiny") for case in chosen):
        with tempfile.TemporaryDirectory() as folder, cluster.Cluster(pathlib.Path(folder) / "cluster", 1) as ravel:
            require_gpu(ravel)
    for case in chosen:
        yield lambda case=case: run(case, arguments)
