#!/usr/bin/env python3
"""The programs of a bundle as a cluster on loopback: a CPU job trains; `nodes list` says what devices there are; a GPU job trains
where there is one and else stays queued with the reason. Standard library only. Exit code 0 or 1.
"""
import json
import pathlib
import struct
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "testing"))
import cluster  # noqa: E402

VOCABULARY, STEPS = 97, 20
JOB = """
apiVersion: ravel/v1
kind: TrainingJob
metadata: {{name: {name}}}
spec:
  model:
    config:
      modelType: llama
      vocabSize: {vocabulary}
      hiddenSize: 64
      intermediateSize: 96
      numHiddenLayers: 2
      numAttentionHeads: 4
      numKeyValueHeads: 2
      maxPositionEmbeddings: 32
  data: {{train: [{{path: "{folder}/tokens.bin"}}], format: flat_u16, sequenceLength: 32}}
  training:
    steps: {steps}
    globalBatch: 4
    optimizer: {{lr: 1e-2}}
  devices: {{kind: {kind}, count: 1}}
  checkpoint: {{store: "file://{folder}/store-{name}", everySteps: 4}}
"""


def expect(condition, text):
    if not condition:
        sys.exit(f"services_test.py: {text}")


def job_file(folder, name, kind):
    file = folder / f"{name}.yaml"
    file.write_text(JOB.format(name=name, kind=kind, folder=folder, vocabulary=VOCABULARY, steps=STEPS))
    return file


def expect_trained(ravel, folder, name, kind):
    history = ravel.train(job_file(folder, name, kind), name)
    losses = [row["loss"] for row in history]
    expect(len(losses) == STEPS and losses[-1] < losses[0], f"{kind} job: expected {STEPS} falling losses, got {losses}")
    print(f"{kind} job: loss {losses[0]:.4f} to {losses[-1]:.4f} in {STEPS} steps", flush=True)


def expect_queued(ravel, folder, reason):
    ravel.ctl("submit", "-f", job_file(folder, "waits", "gpu"))
    end = time.monotonic() + 20
    while reason not in (job := ravel.job("waits")).get("message", ""):
        expect(time.monotonic() < end, f"gpu job: expected the reason '{reason}', got {job.get('message')!r}")
        time.sleep(0.1)
    expect(job["state"] == "QUEUED", f"gpu job: expected QUEUED, got {job['state']}")
    print(f"gpu job: queued: {job['message']}", flush=True)


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        # One id always follows another, so that there is something to learn in a few steps.
        (folder / "tokens.bin").write_bytes(struct.pack("<4000H", *(7 * i % VOCABULARY for i in range(4000))))
        with cluster.Cluster(folder / "cluster", 1) as ravel:
            node = json.loads(ravel.ctl("nodes", "list", "-o", "json").stdout)["items"][0]
            print(f"node: {node['devices']} devices, {node.get('deviceKind', '')} {node.get('deviceModel', '')} {node.get('message', '')}".rstrip(), flush=True)
            expect_trained(ravel, folder, "on-cpu", "cpu")
            if node.get("message"):
                expect_queued(ravel, folder, node["message"])
            else:
                expect_trained(ravel, folder, "on-gpu", "gpu")


if __name__ == "__main__":
    main()
