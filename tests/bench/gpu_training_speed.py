"""G1, G3 and G4: tokens per second of whole training steps on one GPU, against the better of PyTorch without a wrapper and FSDP2.

With --work FOLDER models, batches, compiled code, chosen gemms and every finished run stay there: a benchmark that was killed
goes on with the run that it was killed in, and more --pairs add to those that are there. A peer that fails is recorded as failed,
and the other one is the peer. The cases tiny and tiny-gpt2 run both sides on CPUs in fp32: they show that this harness works, and
report no speed.
"""
import json
import os
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
import gpu_jobs
from gpu_jobs import CASES
from gpu_kernel_speed import peer_environment
from gpu_shapes import SHAPES, flops_per_token
from harness import BENCH, NoDevice, gpu_facts, progress
from kept_runs import KeptRuns, digest_of_programs

WARM_UP, VERIFIED_STEPS, LR = 5, 5, 1e-4
BLOCK = 5  # steps that are timed together; WARM_UP is a multiple
PEERS = {"single": "torch.compile", "fsdp2": "torch.compile and FSDP2 over one rank"}
# 3B and 1.5B have eight micro-batches per update. 8B has one, and so no goal: with an update per 8k tokens nobody has 12 % of room.
GOALS = {"8b-8k": {}, "8b-4k": {}, "3b": {"ratio": 1.12, "mfu": 61}, "1.5b": {"ratio": 1.12, "mfu": 58},
         "124m": {"ratio": 1.3, "tokens": 540000}}
PEAK_FLOPS = 989.4e12  # dense bf16 of Hopper
TOLERANCE = {"gpu": 1e-2, "cpu": 1e-4}
# Of one run of either side: less than what a command on a lent device may take, so that a run that hangs is seen as that.
RUN_SECONDS = 480
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUDA_CACHE_PATH": "cuda"}


class PeerFailed(Exception):
    """A peer ended without a result; the text says how."""


class Workload:
    """A model directory, random tokens, and the batches that Ravel draws, for both sides. What is in `folder` already stays."""

    def __init__(self, case, steps, folder, kind, lr=LR):
        self.case, self.steps, self.kind, self.lr = case, steps, kind, lr
        self.shape = SHAPES[case]
        self.flops = flops_per_token(self.shape)
        self.tokens_per_step = self.shape["sequences"] * self.shape["tokens"]
        self.folder = pathlib.Path(folder, f"{case}-{steps}")
        self.model = pathlib.Path(folder, "models", self.shape.get("weights", case))
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.model / "config.json").exists():  # it is written last
            subprocess.run([sys.executable, "-B", BENCH / "peers/gpu_models.py", "make", case, self.model], check=True, env=peer_environment())
        self.batches = self.folder / "batches.json"
        if not self.batches.exists():
            self.draw_batches()

    def draw_batches(self):
        ids, count = random.Random(1), self.tokens_per_step * (self.steps + 1) + 1
        size = "I" if gpu_jobs.token_format(self.shape) == "flat_u32" else "H"
        (self.folder / "tokens.bin").write_bytes(struct.pack(f"<{count}{size}", *(ids.randrange(self.shape["vocabulary"]) for _ in range(count))))
        (self.folder / "batch.yaml").write_text(self.job_text("batch"))
        drawn = self.folder / "batches.tmp"
        drawn.write_text(json.dumps([cluster.batch(self.folder / "batch.yaml", step) for step in range(self.steps)]))
        drawn.rename(self.batches)

    def job_text(self, name):
        return gpu_jobs.job_text(self.case, name, self.folder, steps=self.steps, lr=self.lr, kind=self.kind, model=self.model)

    def ours(self, ravel, name):
        """(losses, seconds per step) of the first steps of a job."""
        shutil.rmtree(self.folder / "store", ignore_errors=True)  # of a run that was killed
        job = self.folder / f"{name}.yaml"
        job.write_text(self.job_text(name))
        if self.kind == "cpu":
            history = ravel.train(job, name)
        else:
            ravel.ctl("submit", "-f", job)
            history = self.wait_for_steps(ravel, name)
            ravel.ctl("cancel", name)
            ravel.ctl("wait", name, "--for", "done", check=False)  # a cancelled job is no success
        shutil.rmtree(self.folder / "store", ignore_errors=True)
        return [row["loss"] for row in history[:self.steps]], [row["step_seconds"] for row in history[:self.steps]]

    def wait_for_steps(self, ravel, name):
        end = time.monotonic() + RUN_SECONDS
        while time.monotonic() < end:
            history = [json.loads(line) for line in ravel.ctl("metrics", name, "-o", "jsonl").stdout.splitlines() if line.strip()]
            if len(history) >= self.steps:
                return history
            job = ravel.job(name)
            if job["state"] in ("FAILED", "CANCELLED", "SUCCEEDED"):
                sys.exit(f"{self.case}: the job ended as {job['state']}: {job.get('reason')}: {job.get('message')}")
            time.sleep(0.5)
        sys.exit(f"{self.case}: {self.steps} steps took more than {RUN_SECONDS} s")

    def peer(self, kind):
        """(losses, seconds per step, version) of peers/torch_gpu.py."""
        options = ["--device", "cpu", "--dtype", "fp32", "--no-compile"] if self.kind == "cpu" else []
        command = [sys.executable, "-B", BENCH / "peers/torch_gpu.py", kind, self.case, self.model, self.batches, self.steps, self.lr, "--block", BLOCK,
                   "--micro-batches", self.shape.get("micro_batches", 1), *options]
        try:
            run = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 env=peer_environment(), timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            raise PeerFailed(f"took more than {RUN_SECONDS} s") from None
        if run.returncode != 0:
            raise PeerFailed(f"exit {run.returncode}: {run.stderr.strip()[-2000:]}")
        result = json.loads(run.stdout.strip().splitlines()[-1])
        return result["losses"], result["step_seconds"], "torch " + result["torch"]

    def rate(self, seconds):
        """Tokens per second of the median block of timed steps: within a block neither side waits for its device after a step."""
        timed = seconds[WARM_UP:]
        blocks = [timed[i:i + BLOCK] for i in range(0, len(timed) - BLOCK + 1, BLOCK)]
        return self.tokens_per_step / statistics.median(statistics.fmean(block) for block in blocks)


def worst_difference(case, kind, our_losses, peer_losses, tolerance):
    """The largest relative difference of the first losses; ends the program where it is no rounding."""
    pairs = list(zip(our_losses, peer_losses))[:VERIFIED_STEPS]
    worst = max((abs(a - b) / b for a, b in pairs), default=0.0)
    if len(pairs) < VERIFIED_STEPS or not worst <= tolerance:
        sys.exit(f"{case}: losses of Ravel and {kind} differ by {worst:.1e}: {pairs}")
    return worst


def require_gpu(ravel):
    node = json.loads(ravel.ctl("nodes", "list", "-o", "json").stdout)["items"][0]
    if node.get("message"):
        raise NoDevice(node["message"])


class OurSide:
    """A cluster that starts with the first run that is not there yet."""

    def __init__(self, work, gemms):
        self.work, self.gemms, self.folder, self.ravel = work, gemms, None, None

    def run(self, pair):
        if self.ravel is None:
            self.folder = tempfile.TemporaryDirectory()
            self.ravel = cluster.Cluster(pathlib.Path(self.folder.name) / "cluster", 1,
                                         worker_options=("--cpu-devices", "1", "--gemm-cache", self.gemms)).__enter__()
        return self.work.ours(self.ravel, f"pair-{pair}")

    def close(self):
        if self.ravel is not None:
            self.ravel.__exit__(None, None, None)
            self.folder.cleanup()


def run_pair(work, pair, kept, ours):
    """Runs what is missing of a pair, each side in a process of its own, and keeps it."""
    if kept.get("ours", pair) is None:
        losses, seconds = ours.run(pair)
        kept.add("ours", pair, rate=work.rate(seconds), losses=losses[:VERIFIED_STEPS])
    for kind in PEERS:
        if kept.get(kind, pair) is not None or kept.failure(kind):
            continue
        try:
            losses, seconds, version = work.peer(kind)
        except PeerFailed as failure:
            progress(f"{work.case}: {kind} failed and is left out: {failure}")
            kept.add(kind, pair, failed=str(failure))
            continue
        kept.add(kind, pair, rate=work.rate(seconds), losses=losses[:VERIFIED_STEPS], version=version)


def measure(work, pairs, kept, ours):
    """(samples of ours and of each peer that did not fail, largest difference of losses, version of the peers)."""
    worst = 0.0
    for pair in range(pairs):
        run_pair(work, pair, kept, ours)
        alive = [kind for kind in PEERS if not kept.failure(kind)]
        if not alive:
            sys.exit(f"{work.case}: no peer is left: " + "; ".join(f"{kind}: {kept.failure(kind)}" for kind in PEERS))
        runs = {side: kept.get(side, pair) for side in ("ours", *alive)}
        for kind in alive:
            worst = max(worst, worst_difference(work.case, kind, runs["ours"]["losses"], runs[kind]["losses"], TOLERANCE[work.kind]))
        progress(f"{work.case}: pair {pair + 1} of {pairs}: " + ", ".join(f"{side} {run['rate']:.0f}" for side, run in runs.items()))
    samples = {side: [kept.get(side, pair)["rate"] for pair in range(pairs)] for side in ("ours", *alive)}
    return samples, worst, kept.get(alive[0], 0)["version"]


def run(case, arguments, folder):
    steps = max(arguments.steps, WARM_UP + 2 * BLOCK)
    work = Workload(case, steps, folder, "cpu" if case.startswith("tiny") else "gpu")
    device = [gpu["name"] for gpu in gpu_facts().get("gpus", [])]
    kept = KeptRuns(folder / "runs.jsonl", {"case": case, "steps": steps, "programs": digest_of_programs(), "device": device})
    ours = OurSide(work, folder / "gemms")
    try:
        samples, worst, version = measure(work, arguments.pairs, kept, ours)
    finally:
        ours.close()
    failures = {kind: kept.failure(kind) for kind in PEERS if kept.failure(kind)}
    return line_of(work, samples, worst, version, failures)


def line_of(work, samples, worst, version, failures):
    case = work.case
    verified = f"first {VERIFIED_STEPS} losses differ by at most {worst:.1e}"
    if work.kind == "cpu":
        return {"case": case, "metric": "the harness itself, on CPUs; no speed", "unit": "", "ours": "", "peer": "", "ratio": "",
                "peer_name": version, "goal": "losses agree", "pass": True, "verified": verified}
    median = {side: statistics.median(values) for side, values in samples.items()}
    alive = [kind for kind in PEERS if kind in samples]
    better = max(alive, key=lambda kind: median[kind])
    ratios = {kind: [a / b for a, b in zip(samples["ours"], samples[kind])] for kind in alive}
    ratio, goal = statistics.median(ratios[better]), GOALS[case]
    mfu = {side: 100 * value * work.flops / PEAK_FLOPS for side, value in median.items()}
    return {"case": case, "metric": "training step on one device, causal-half counting", "unit": "tokens/s", "ours": round(median["ours"], 1),
            "peer": round(median[better], 1), "peer_name": f"{PEERS[better]}, {version}", "ratio": round(ratio, 3),
            "min": round(min(ratios[better]), 3), "max": round(max(ratios[better]), 3), "goal": ", ".join(f"{k} >= {v}" for k, v in goal.items() if v),
            "pass": ratio >= goal.get("ratio", 0) and median["ours"] >= goal.get("tokens", 0) and mfu["ours"] >= goal.get("mfu", 0),
            "mfu": {side: round(value, 2) for side, value in mfu.items()}, "mflop_per_token": round(work.flops / 1e6, 1),
            "peers": {kind: {"name": PEERS[kind], "tokens_per_second": round(median[kind], 1), "ratio": round(statistics.median(ratios[kind]), 3)}
                      for kind in alive} | {kind: {"name": PEERS[kind], "failed": text} for kind, text in failures.items()},
            "samples": {side: [round(x, 1) for x in values] for side, values in samples.items()}, "ratios": [round(r, 3) for r in ratios[better]],
            "verified": verified}


def cases(arguments, name):
    wanted = arguments.case or CASES[name]
    own = {"G1": ("tiny",), "G4": ("tiny-gpt2",)}
    chosen = [case for case in (*CASES[name], *own.get(name, ())) if case in wanted]
    if any(not case.startswith("tiny") for case in chosen):
        with tempfile.TemporaryDirectory() as folder, cluster.Cluster(pathlib.Path(folder) / "cluster", 1) as ravel:
            require_gpu(ravel)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.work or pathlib.Path(temporary)).resolve()
        for variable, name in CACHES.items():
            os.environ.setdefault(variable, str(folder / "caches" / name))
        for case in chosen:
            yield lambda case=case: run(case, arguments, folder)
