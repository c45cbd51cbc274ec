#!/usr/bin/env python3
"""GPU jobs whose ranks share each layer, as a cluster on loopback: one rank, two that share layers, and two such pairs whose ranks
have their own tokens between products. On emulated devices all have the losses of one rank, elsewhere close ones. Standard library
only. Exit code 0, 1, or 3 where there is no GPU; the last line is a report in JSON.
"""
import json
import os
import pathlib
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "testing"))
import cluster  # noqa: E402
import tiny_job  # noqa: E402

STEPS, TRAINERS, CLOSE, NO_DEVICE = 20, 4, 1e-2, 3
MESHES = {"whole": (1, {}), "shared": (2, {"tensor": 2}), "own-tokens": (4, {"tensor": 2, "sequenceParallel": True})}


def losses_of(ravel, folder, name, ranks, parallelism):
    job = tiny_job.write_job(folder, name, "gpu", STEPS, devices=ranks, parallelism=parallelism,
                             determinism={"tensorParts": 2, "virtualRanks": TRAINERS})
    losses = [row["loss"] for row in ravel.train(job, name)]
    launched = [event["message"] for event in ravel.events(name) if event["type"] == "Launched"]
    if len(losses) != STEPS or losses[-1] >= losses[0] or not any(f"{ranks} ranks over" in text for text in launched):
        sys.exit(f"shared_layers.py: {name}: expected {STEPS} falling losses of {ranks} ranks, got {losses}, {launched}")
    print(f"{name}: {launched[0]}: loss {losses[0]:.6f} to {losses[-1]:.6f}", flush=True)
    return losses


def main():
    emulated = "emulated" in os.environ.get("RAVEL_CUDA_LIBRARY", "")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tiny_job.write_tokens(folder)
        with cluster.Cluster(folder / "cluster", TRAINERS) as ravel:
            node = json.loads(ravel.ctl("nodes", "list", "-o", "json").stdout)["items"][0]
            if node.get("message"):
                print(f"no GPU: {node['message']}")
                return NO_DEVICE
            losses = {name: losses_of(ravel, folder, name, *mesh) for name, mesh in MESHES.items()}
    worst = max(abs(other / one - 1) for name in MESHES for one, other in zip(losses["whole"], losses[name]))
    print(json.dumps({"largest_relative_difference": worst, "equal": worst == 0}))
    return 0 if worst <= (0 if emulated else CLOSE) else 1


if __name__ == "__main__":
    sys.exit(main())
