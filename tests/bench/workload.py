"""One training task for Ravel and for PyTorch: a model directory, random tokens, the batches that Ravel will draw."""
import json
import math
import os
import pathlib
import random
import signal
import struct
import subprocess
import sys
import time

import cluster
from harness import BENCH, CAPS
from llama import SHAPES

RANKS, LR, VERIFIED_STEPS, TOLERANCE = 2, 1e-3, 5, 1e-4
MOST_BATCHES = 32  # that peers get; in later steps these come again


class Workload:
    """`optimizer` and `precision`: more fields of these of the job. `tensor`: RANKS share each layer, and a lane has all sequences."""

    def __init__(self, case, steps, folder, optimizer="", precision="", tolerance=TOLERANCE, tensor=False):
        self.case, self.steps, self.folder = case, steps, pathlib.Path(folder)
        self.optimizer, self.precision, self.tolerance, self.tensor = optimizer, precision, tolerance, tensor
        self.shape = SHAPES[case]
        self.tokens_per_step = RANKS * self.shape["sequences"] * self.shape["tokens"]
        subprocess.run([sys.executable, BENCH / "peers" / "llama.py", "make", case, self.folder / "model"], check=True)
        ids = random.Random(1)
        count = self.tokens_per_step * (steps + 1) + 1
        (self.folder / "tokens.bin").write_bytes(struct.pack(f"<{count}H", *(ids.randrange(self.shape["vocabulary"]) for _ in range(count))))
        (self.folder / "batch.yaml").write_text(self.job_text("batch"))
        each = self.shape["sequences"]
        batches = [cluster.batch(self.folder / "batch.yaml", step) for step in range(min(steps, MOST_BATCHES))]
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
    optimizer: {{lr: {LR}, weightDecay: 0.1, clipNorm: 1.0{self.optimizer}}}
    schedule: {{kind: constant}}
  precision: {{{self.precision}}}
  parallelism: {{tensor: {RANKS if self.tensor else 1}}}
  devices: {{kind: cpu, count: {RANKS}}}
  determinism: {{mode: exact, virtualRanks: {1 if self.tensor else RANKS}}}
  checkpoint: {{store: "file://{self.folder}/store", everySteps: 1000000}}
"""

    def ours(self, ravel, name):
        """(losses, seconds per step) of a run on a cluster."""
        job = self.folder / f"{name}.yaml"
        job.write_text(self.job_text(name))
        history = ravel.train(job, name)
        return [row["loss"] for row in history], [row["step_seconds"] for row in history]

    def ours_in_turns(self, ravel, name):
        """A job of this workload's steps on a cluster with Turns.ENVIRONMENT, waiting for its turns."""
        job = self.folder / f"{name}.yaml"
        job.write_text(self.job_text(name) + f"  detection: {{time: {Turns.DETECTION}}}\n")
        return Turns(ravel, job, name)

    def peer(self, kind, environment=CAPS):
        """peers/torch_gloo.py, waiting for its turns."""
        return Peer(kind, [sys.executable, BENCH / "peers" / "torch_gloo.py", kind, self.case, self.folder / "model",
                           self.folder / "batches.json", LR], self.folder / f"{kind}.log", environment)

    def verify(self, our_losses, peer_losses, kind):
        """The largest relative difference of the first losses; ends the program where it is no rounding."""
        pairs = list(zip(our_losses, peer_losses))[:VERIFIED_STEPS]
        worst = max(abs(a - b) / b for a, b in pairs)
        if worst > self.tolerance:
            sys.exit(f"{self.case}: losses of Ravel and {kind} differ by {worst:.1e}: {pairs}")
        return worst


class Turns:
    """with work.ours_in_turns(ravel, name) as ours: ours.train(steps). Its trainers stop before each step, with SIGSTOP, and go on
    for as many steps as they are told; the time that they stand still belongs to no step. They end with the block."""

    ENVIRONMENT = {"RAVEL_FAULTS": "trainer.step@*:stop"}
    DETECTION = "60s"  # a trainer that waits for its turn is silent

    def __init__(self, ravel, job, name):
        self.ravel, self.job, self.name, self.done, self.trainers, self.uid = ravel, job, name, 0, [], ""
        self.shortest = 0.0  # seconds from a start to the stop after it

    def __enter__(self):
        self.ravel.ctl("submit", "-f", self.job)
        self._until(lambda: len(self.ravel.trainers()) == RANKS, "the start of the trainers")
        self.trainers, self.uid = self.ravel.trainers(), self.ravel.job(self.name)["uid"]
        self._until(self._stopped, "the start of the job")
        return self

    def __exit__(self, *_):
        for trainer in self.ravel.trainers():
            os.kill(trainer, signal.SIGKILL)

    def train(self, steps):
        """(losses, seconds) of as many further steps; not the last of the job, after which nothing stops."""
        for _ in range(steps):
            began = time.monotonic()
            for trainer in self.trainers:
                os.kill(trainer, signal.SIGCONT)
            time.sleep(0.9 * self.shortest)  # looking takes time from who has the turn, and peers are not looked at
            self._until(self._stopped, f"the end of step {self.done}")
            self.shortest = min(self.shortest or math.inf, time.monotonic() - began)
            self.done += 1
        self._until(lambda: len(self.ravel.step_records(self.uid)) >= self.done, f"the records of {self.done} steps", seconds=10)
        rows = self.ravel.step_records(self.uid)[self.done - steps:self.done]
        return [row["loss"] for row in rows], [row["step_seconds"] for row in rows]

    def _stopped(self):
        states = []
        for trainer in self.trainers:
            stat = pathlib.Path(f"/proc/{trainer}/stat")
            states.append(stat.read_text().rsplit(")", 1)[1].split()[0] if stat.exists() else "gone")
        if not set(states) <= set("RSDT"):
            raise RuntimeError(f"trainers ended ({states}): {self.ravel.events(self.name)[-3:]}")
        return all(state == "T" for state in states)

    def _until(self, condition, what, seconds=120):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise RuntimeError(f"waited in vain for {what}")
            time.sleep(0.02)  # seldom: it takes time from who has the turn


class Peer:
    """with work.peer(kind) as peer: peer.train(steps); its processes stay and wait between calls, and end with the block."""

    def __init__(self, kind, command, log, environment):
        self.kind, self.command, self.log, self.version = kind, [str(word) for word in command], log, ""
        self.environment = {**os.environ, **environment}

    def __enter__(self):
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                                            env=self.environment)
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
