#!/usr/bin/env python3
"""deploy/images/ravel-pool.sh as the pods of a pool run it: real programs on loopback, a folder per pod and one for all.

    RAVEL_BIN_DIR=build/cuda/bin python3 tests/deploy/pool_test.py
"""
import fcntl
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "testing"))
import cluster  # noqa: E402

JOB = """apiVersion: ravel/v1
kind: TrainingJob
metadata: {name: pool}
spec:
  model: {config: {modelType: llama, vocabSize: 300, hiddenSize: 32, intermediateSize: 64, numHiddenLayers: 1, numAttentionHeads: 2,
                   numKeyValueHeads: 2, maxPositionEmbeddings: 32}}
  data: {train: [{path: FOLDER/tokens}], sequenceLength: 32}
  training: {steps: STEPS, globalBatch: 4, optimizer: {lr: 1e-2}}
  devices: {kind: cpu, count: 2}
  elastic: {min: 1, max: 2, growDelay: 0s, growEvery: 0s}
  checkpoint: {store: file://FOLDER/checkpoints, everySteps: EVERY}
"""


class Pool(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="ravel-pool-")
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        self.shared = self.folder / "shared"
        self.shared.mkdir()
        self.binaries = cluster.default_binaries()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.environment = {**os.environ, "PATH": f"{self.binaries}:{os.environ['PATH']}", "RAVEL_POOL": str(uuid.uuid4()),
                            "RAVEL_COORDINATOR": f"localhost:{port}", "RAVEL_POOL_LISTEN": "127.0.0.1",
                            "RAVEL_POOL_SHARED": str(self.shared)}
        text = self.folder / "text"
        text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
        subprocess.run([self.binaries / "ravelctl", "data", "prepare", "--input", text, "--tokenizer", "bytes", "--output",
                        self.shared / "tokens"], check=True, capture_output=True)

    def job(self, steps, every):
        path = self.folder / "job.yaml"
        path.write_text(JOB.replace("FOLDER", str(self.shared)).replace("STEPS", str(steps)).replace("EVERY", str(every)))
        return path

    def pod(self, name, *arguments, **environment):
        """Starts a pod with its own state and log; a test that ends ends it."""
        log = open(self.folder / f"{name}.log", "a")
        self.addCleanup(log.close)
        process = subprocess.Popen([ROOT / "deploy" / "images" / "ravel-pool.sh", *arguments], stdout=log, stderr=subprocess.STDOUT,
                                   env={**self.environment, "RAVEL_POOL_STATE": str(self.folder / name), "RAVEL_NODE": name,
                                        **environment}, start_new_session=True)

        def end():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

        self.addCleanup(end)
        return process

    def kill(self, pod):
        """Ends all of a pod at once. A coordinator that dies holds its folder until the kernel has closed its files."""
        os.killpg(pod.pid, signal.SIGKILL)
        pod.wait()
        for path in self.folder.rglob("coordinator.lock"):
            with open(path) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)

    def logs(self):
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def ended(self, process, seconds=180):
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.fail(f"no end after {seconds} s\n{self.logs()}")

    def wait_for(self, what, seconds=180):
        end = time.monotonic() + seconds
        while not what():
            self.assertLess(time.monotonic(), end, self.logs())
            time.sleep(0.05)

    def told(self):
        return (self.folder / "coordinator.log").read_text()

    def committed(self, step):
        return (self.shared / "checkpoints" / "pool" / f"step-{step:010d}" / "COMMIT").exists()

    def test_a_job_ends_its_pool_and_is_submitted_once(self):
        job = self.job(steps=40, every=20)
        workers = [self.pod(name, "worker") for name in ("one", "two")]  # before there is a coordinator
        coordinator = self.pod("coordinator", "coordinator", str(job))
        self.assertEqual(self.ended(coordinator), 0, self.logs())
        self.assertTrue(self.committed(40))
        self.assertEqual(list((self.shared / ".ravel-pools").iterdir()), [], "the token is left behind")
        # The pod starts again on its volume: the job has ended, and is not begun again.
        self.assertEqual(self.ended(self.pod("coordinator", "coordinator", str(job))), 0, self.logs())
        self.assertEqual(self.told().count("Submitted (epoch 0)"), 2, "the same job, told twice")
        for worker in workers:
            worker.send_signal(signal.SIGTERM)
            self.assertEqual(self.ended(worker), 143, self.logs())

    def test_an_evicted_worker_saves_and_is_replaced(self):
        job = self.job(steps=10000000, every=5000)
        one = self.pod("one", "worker")
        self.pod("two", "worker")
        coordinator = self.pod("coordinator", "coordinator", str(job))
        self.wait_for(lambda: re.search("2 ranks over.*CheckpointCommitted", self.told(), re.S))
        one.send_signal(signal.SIGTERM)
        self.assertEqual(self.ended(one), 143, self.logs())
        self.wait_for(lambda: re.search("NodeDrain one.*CheckpointCommitted.*Placed NodeDrain.* 1 ranks over", self.told(), re.S))
        self.pod("three", "worker")
        self.wait_for(lambda: re.search("1 ranks over.* 2 ranks over [^\n]*three", self.told(), re.S))
        self.assertIsNone(coordinator.poll(), self.logs())

    def test_a_coordinator_that_is_killed_goes_on_with_its_job(self):
        job = self.job(steps=400, every=50)
        self.pod("one", "worker")
        self.pod("two", "worker")
        coordinator = self.pod("coordinator", "coordinator", str(job))
        self.wait_for(lambda: self.committed(50))
        self.kill(coordinator)
        self.assertEqual(self.ended(self.pod("coordinator", "coordinator", str(job))), 0, self.logs())
        self.assertTrue(self.committed(400))

    def test_a_bad_job_file_is_the_users_fault(self):
        job = self.folder / "job.yaml"
        job.write_text("kind: TrainingJob\n")
        self.assertEqual(self.ended(self.pod("coordinator", "coordinator", str(job))), 2, self.logs())

    def test_pods_of_one_kind_are_a_pool_that_outlives_its_first(self):
        job = self.job(steps=2000, every=50)
        kept = {"RAVEL_POOL_COORDINATOR": str(self.shared / ".ravel-pools" / "coordinator")}
        other = self.pod("two", "node", str(job), JOB_COMPLETION_INDEX="1", **kept)
        leader = self.pod("one", "node", str(job), JOB_COMPLETION_INDEX="0", **kept)
        self.wait_for(lambda: self.committed(50))
        self.kill(leader)
        self.assertFalse(self.committed(2000), "ended too early to be killed")
        again = self.pod("three", "node", str(job), JOB_COMPLETION_INDEX="0", **kept)
        self.assertEqual(self.ended(again), 0, self.logs())
        self.assertTrue(self.committed(2000))
        self.assertIsNone(other.poll(), "a worker stays until it is ended from outside")


if __name__ == "__main__":
    unittest.main()
