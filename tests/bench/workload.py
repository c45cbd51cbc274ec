"""One training task for Ravel and for PyTorch: a model directory, random tokens, the batches that Ravel will draw."""
import json
import os
import pathlib
import random
import struct
import subprocess
import sys

import cluster
from harness import BENCH, CAPS
from llama import SHAPES

RANKS, LR, VERIFIED_STEPS, TOLERANCE = 2, 1e-3, 5, 1e-4


class Workload:
    def __init__(self, case, steps, folder):
        self.case, self.steps, self.folder = case, steps, pathlib.Path(folder)
        self.shape = SHAPES[case]
        self.tokens_per_step = RANKS * self.shape["sequences"] * self.shape["tokens"]
        subprocess.run([sys.executable, BENCH / "peers" / "llama.py", "make", case, self.folder / "model"], check=True)
        ids = random.Random(1)
        count = self.tokens_per_step * (steps + 1) + 1
        (self.folder / "tokens.bin").write_bytes(struct.pack(f"<{count}H", *(ids.randrange(self.shape["vocabulary"]) for _ in range(count))))
        (self.folder / "batch.yaml").write_text(self.job_text("batch"))
        each = self.shape["sequences"]
        batches = [cluster.batch(self.folder / "batch.yaml", step) for step in range(steps)]
        batches = [[samples[rank * each:(rank + 1) * each] for rank in range(RANKS)] for samples in batches]
        (self.folder / "batches.json").write_text(json.dumps(batches))

    def job_text(self, name):
        return f"""
apiVersion: ravel/v1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  model: {{from: "{self.folder}/model"}}
  data: {{train: [{{path: "{self.folder}/tokens.bin"}}], format: flat_u16, sequenceLength: {self.shape["tokens"]}}}
  training:
    steps: {self.steps}
    globalBatch: {RANKS * self.shape["sequences"]}
    optimizer: {{lr: {LR}, weightDecay: 0.1, clipNorm: 1.0}}
    schedule: {{kind: constant}}
  devices: {{kind: cpu, count: {RANKS}}}
  determinism: {{mode: exact, virtualRanks: {RANKS}}}
  checkpoint: {{store: "file://{self.folder}/store", everySteps: 1000000}}
"""

    def ours(self, ravel, name):
        """(losses, seconds per step) of a run on a cluster."""
        job = self.folder / f"{name}.yaml"
        job.write_text(self.job_text(name))
        history = ravel.train(job, name)
        return [row["loss"] for row in history], [row["step_seconds"] for row in history]

    def peer(self, kind):
        """peers/torch_gloo.py, waiting for its turns."""
        return Peer(kind, [sys.executable, BENCH / "peers" / "torch_gloo.py", kind, self.case, self.folder / "model",
                           self.folder / "batches.json", LR], self.folder / f"{kind}.log")

    def verify(self, our_losses, peer_losses, kind):
        """The largest relative difference of the first losses; ends the program where it is no rounding."""
        pairs = list(zip(our_losses, peer_losses))[:VERIFIED_STEPS]
        worst = max(abs(a - b) / b for a, b in pairs)
        if worst > TOLERANCE:
            sys.exit(f"{self.case}: losses of Ravel and {kind} differ by {worst:.1e}: {pairs}")
        return worst


class Peer:
    """with work.peer(kind) as peer: peer.train(steps); its processes stay and wait between calls, and end with the block."""

    def __init__(self, kind, command, log):
        self.kind, self.command, self.log, self.version = kind, [str(word) for word in command], log, ""

    def __enter__(self):
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                                            env={**os.environ, **CAPS})
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def train(self, steps):
        """(losses, seconds) of as many further steps."""
        try:
            self.process.stdin.write(f"{steps}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended, and says why below
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(self.command)}: exit {self.process.wait()}\n{self.log.read_text()[-4000:]}")
        result = json.loads(line)
        self.version = "torch " + result["torch"]
        return result["losses"], result["step_seconds"]
