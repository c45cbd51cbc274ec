"""P2: from SIGKILL of a trainer until the survivors know and until the next finished step, against torchrun --max-restarts."""
import json
import os
import pathlib
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time

import cluster
from harness import BENCH, progress

RANKS, SAVE_EVERY, KILLS, PEER_KILLS = 3, 50, 100, 4
DETECTION = "5s"  # the default
LIMIT = 300
GOAL_RATIO, GOAL_IDLE, GOAL_LOAD = 40, 0.3, 1.0


def job_text(folder, name):
    """The shape of peers/torch_elastic.py. Budgets are out of the way: as many kills in a day are no accident."""
    return f"""
apiVersion: ravel/v1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  model:
    config: {{modelType: llama, vocabSize: 97, hiddenSize: 36, intermediateSize: 52, numHiddenLayers: 3, numAttentionHeads: 6, maxPositionEmbeddings: 16}}
  data: {{train: [{{path: "{folder}/tokens.bin"}}], format: flat_u16, sequenceLength: 16}}
  training: {{steps: 10000000, globalBatch: 12, optimizer: {{lr: 1e-3}}}}
  devices: {{kind: cpu, count: {RANKS}}}
  determinism: {{mode: exact, virtualRanks: 4}}
  checkpoint: {{store: "file://{folder}/store", everySteps: {SAVE_EVERY}, keep: {{last: 2}}}}
  restart: {{maxFailures: 1000, maxPerDay: 1000, maxNoProgress: 1000}}
"""


def until(condition, what, pause=0.001):
    end = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"P2: waited {LIMIT} s in vain for {what}")
        time.sleep(pause)


def gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


class Steps:
    """The steps of a job as `ravelctl metrics -f` tells them, each with the time at which it was told here."""

    def __init__(self, ravel, name):
        command = [str(ravel.binaries / "ravelctl"), "--coordinator", ravel.address, "metrics", name, "-f", "-o", "jsonl"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.epoch, self.step, self.first = 0, 0, {}  # first: epoch -> when its first step was told
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            row = json.loads(line)
            epoch = int(row["epoch"])
            self.first.setdefault(epoch, time.time())
            self.epoch, self.step = epoch, int(row["step"])

    def close(self):
        self.process.kill()
        self.process.wait()


def our_kills(ravel, folder, name, kills, seed):
    """[(seconds until the last survivor was gone, seconds until the next finished step)]"""
    picks = random.Random(seed)
    job = folder / f"{name}.yaml"
    job.write_text(job_text(folder, name))
    ravel.ctl("submit", "-f", job)
    steps = Steps(ravel, name)
    measured, committed = [], -1
    try:
        for _ in range(kills):
            until(lambda: int(ravel.job(name).get("committedStep", -1)) > committed and steps.epoch > 0, f"a commit after step {committed}", pause=0.1)
            until(lambda: len(ravel.trainers()) == RANKS, "all trainers", pause=0.05)
            time.sleep(picks.uniform(0, 0.2))  # anywhere between two commits
            epoch, trainers = steps.epoch, ravel.trainers()
            victim = picks.choice(trainers)
            start = time.time()
            os.kill(victim, signal.SIGKILL)
            until(lambda: all(gone(pid) for pid in trainers), "the survivors' end")
            told = time.time() - start
            until(lambda: steps.epoch > epoch, "a step of the next epoch")
            measured.append((told, max(0.0, steps.first[min(e for e in steps.first if e > epoch)] - start)))
            committed = int(ravel.job(name).get("committedStep", -1))
    finally:
        steps.close()
    ravel.ctl("cancel", name)
    return measured


def peer_kills(folder, kills, seed):
    """([seconds until the next finished step], version) of the same with torchrun.

    torch 2.15 keeps one store for all restarts, and restarted ranks connect to addresses of dead ones for ever (gloo, "Connection
    refused"); TORCH_DISABLE_SHARE_RDZV_TCP_STORE gives every restart a store of its own.
    """
    folder.mkdir()
    picks = random.Random(seed)
    log = folder / "steps.jsonl"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", RANKS, "--max-restarts", kills + 10]
    with open(folder / "log", "w") as output:
        process = subprocess.Popen([str(word) for word in [*torchrun, BENCH / "peers" / "torch_elastic.py", folder, SAVE_EVERY]],
                                   stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    try:
        measured = []
        for _ in range(kills):
            until(lambda: log.exists() and steps_of_newest(log) > 3 * SAVE_EVERY, f"torchrun's training: {(folder / 'log').read_text()[-1000:]}", pause=0.1)
            restart = newest(log)
            victim = picks.choice(children_of(process.pid))
            start = time.time()
            os.kill(victim, signal.SIGKILL)
            # On a busy machine torchrun may fail to connect its ranks and restart once more: that is part of its time.
            until(lambda: newest(log) > restart, "torchrun's next step", pause=0.02)
            measured.append(first_of(log, newest(log)) - start)
    finally:
        for pid in [*children_of(process.pid), process.pid]:  # each rank has a session of its own
            os.kill(pid, signal.SIGKILL)
        process.wait()
    version = subprocess.run([sys.executable, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True).stdout.strip()
    return measured, f"torch {version}"


def children_of(parent):
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == parent:
                found.append(int(stat.parent.name))
        except (OSError, IndexError):
            continue
    return found


def rows_of(log):
    text = log.read_text()
    return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]


def newest(log):
    return max((row["restart"] for row in rows_of(log)), default=-1)


def steps_of_newest(log):
    rows = rows_of(log)
    return sum(row["restart"] == newest(log) for row in rows) if rows else 0


def first_of(log, restart):
    return next(row["time"] for row in rows_of(log) if row["restart"] == restart)


def percentile(values, percent):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-percent * len(ordered) // 100) - 1))]


def line_of(case, ours, goal, more):
    told, next_step = [t for t, _ in ours], [s for _, s in ours]
    return {"case": case, "metric": "SIGKILL of a trainer of 3 to the next finished step", "unit": "s", "kills": len(ours),
            "ours": round(statistics.median(next_step), 4), "p50": round(percentile(next_step, 50), 4), "p99": round(percentile(next_step, 99), 4),
            "survivors_gone_p50": round(percentile(told, 50), 4), "survivors_gone_p99": round(percentile(told, 99), 4),
            "goal": goal, "samples": {"ours": [round(s, 4) for s in next_step], "survivors_gone": [round(t, 4) for t in told]}, **more}


def prepare(folder):
    ids = random.Random(1)
    (folder / "tokens.bin").write_bytes(struct.pack("<20000H", *(ids.randrange(97) for _ in range(20000))))


def idle(pairs, kills):
    ours, peers, ratios, version = [], [], [], ""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        prepare(folder)
        for pair in range(pairs):
            with cluster.Cluster(folder / f"ours-{pair}", RANKS, detection=DETECTION) as ravel:
                mine = our_kills(ravel, folder, f"pair-{pair}", -(-kills // pairs), pair)
            theirs, version = peer_kills(folder / f"peer-{pair}", PEER_KILLS, pair)
            ours += mine
            peers += theirs
            ratios.append(statistics.median(theirs) / statistics.median(s for _, s in mine))
            progress(f"P2 idle: pair {pair + 1} of {pairs}: {statistics.median(s for _, s in mine):.3f} s, torchrun {statistics.median(theirs):.2f} s")
    ratio, line = statistics.median(ratios), line_of("idle", ours, f"p99 <= {GOAL_IDLE} s; >= {GOAL_RATIO} times as fast", {})
    return {**line, "peer": round(statistics.median(peers), 3), "peer_name": f"torchrun --max-restarts, DDP over gloo, {version}",
            "peer_p99": round(percentile(peers, 99), 3), "ratio": round(ratio, 1), "ratios": [round(r, 1) for r in ratios],
            "min": round(min(ratios), 1), "max": round(max(ratios), 1), "pass": line["p99"] <= GOAL_IDLE and ratio >= GOAL_RATIO,
            "samples": {**line["samples"], "torchrun": [round(s, 3) for s in peers]}}


class Loaded(cluster.Cluster):
    """Workers beside the fake fleet of P1, on its coordinator."""

    def __init__(self, folder, arguments):
        super().__init__(folder, RANKS, detection=DETECTION)
        self.load_arguments = arguments

    def _start(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [self.binaries / "fleet_load", "--coordinator", self.binaries / "ravel-coordinator", "--hold", *self.load_arguments]
        self.load = subprocess.Popen([str(word) for word in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self.load.stdout.readline().strip()
        if not self.address:
            raise SystemExit("P2: the load could not be made")
        for i in range(RANKS):
            self._spawn(f"worker-{i}", [self.binaries / "ravel-worker", "--dev-loopback", "--coordinator", self.address, "--node-id", f"worker-{i}",
                                        "--work-dir", self.folder / f"worker-{i}", *self.worker_options])

    def __exit__(self, *_):
        super().__exit__()
        self.load.stdin.close()
        self.load.wait()


def load(kills):
    """Nodes of the fake fleet are all taken, so that the measured job has the real ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        prepare(folder)
        with Loaded(folder / "ours", ["--nodes", 990, "--running", 990, "--queued", 10000, "--submit-rate", 50]) as ravel:
            ours = our_kills(ravel, folder, "measured", kills, 0)
    line = line_of("load", ours, f"p99 <= {GOAL_LOAD} s", {})
    return {**line, "pass": line["p99"] <= GOAL_LOAD, "load": "990 nodes x 8, 990 running jobs with a step report a second, 10,000 queued, 50 submits/s"}


def cases(arguments):
    kills = arguments.steps or KILLS
    if "idle" in (arguments.case or ["idle"]):
        yield lambda: idle(arguments.pairs, kills)
    if "load" in (arguments.case or ["load"]):
        yield lambda: load(kills)
