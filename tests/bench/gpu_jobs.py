"""The jobs of G1, G3, G4 and G7, as text: what runs on a device and what a test plans without one is the same."""
import json

from gpu_shapes import SHAPES, inline_config

CASES = {"G1": ("8b-8k", "8b-4k"), "G3": ("3b", "1.5b"), "G4": ("124m",), "G7": ("1.5b-64k", "1.5b-256k")}
DEVICE = "H200-139G"  # what the cases are made for, with the memory that its driver reports
# More steps than are timed: a job is cancelled after those, so that no checkpoint of the model is written.
STEPS_LEFT_OVER = 1000


def optimizer_of(shape, lr):
    optimizer = {"lr": lr, "weightDecay": 0.1, "clipNorm": 1.0}
    if shape["states"] == "bf16":
        optimizer |= {"stateDtype": "bf16", "mainWeights": "bf16_remainder"}
    return optimizer


def job_text(case, name, folder, *, steps, lr, kind="gpu", model=None, offload=None):
    """A job file over folder/tokens.bin. `model` is a Hugging Face directory; without one weights start random. `offload` is the
    field of the optimizer."""
    shape = SHAPES[case]
    spec = {"model": {"from": str(model)} if model else {"config": inline_config(shape)},
            "data": {"train": [{"path": f"{folder}/tokens.bin"}], "format": token_format(shape), "sequenceLength": shape["tokens"]},
            "training": {"steps": steps + (STEPS_LEFT_OVER if kind == "gpu" else 0), "globalBatch": shape["sequences"],
                         "microBatch": shape["sequences"] // shape.get("micro_batches", 1),
                         "optimizer": optimizer_of(shape, lr) | ({"offload": offload} if offload else {}), "schedule": {"kind": "constant"}},
            "devices": {"kind": kind, "count": 1},
            "checkpoint": {"store": f"file://{folder}/store", "everySteps": 1000000}}
    return json.dumps({"apiVersion": "ravel/v1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}, indent=1) + "\n"


def token_format(shape):
    return "flat_u32" if shape["vocabulary"] > 65536 else "flat_u16"
