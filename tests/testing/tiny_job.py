"""A job that trains in seconds, for scripts that run whole programs. Standard library only."""
import json
import struct

VOCABULARY = 97
SEQUENCE_TOKENS = 32


def write_tokens(folder):
    """tokens.bin: one id always follows another, so that there is something to learn in a few steps."""
    (folder / "tokens.bin").write_bytes(struct.pack("<4000H", *(7 * i % VOCABULARY for i in range(4000))))


def write_job(folder, name, kind, steps, devices=1, global_batch=4, save_every=4, optimizer=None, **more):
    """The file of a job that trains on tokens.bin of the folder; `more` are other fields of its spec."""
    model = {"modelType": "llama", "vocabSize": VOCABULARY, "hiddenSize": 64, "intermediateSize": 96, "numHiddenLayers": 2,
             "numAttentionHeads": 4, "numKeyValueHeads": 2, "maxPositionEmbeddings": SEQUENCE_TOKENS}
    spec = {"model": {"config": model},
            "data": {"train": [{"path": f"{folder}/tokens.bin"}], "format": "flat_u16", "sequenceLength": SEQUENCE_TOKENS},
            "training": {"steps": steps, "globalBatch": global_batch, "optimizer": optimizer or {"lr": 1e-2}},
            "devices": {"kind": kind, "count": devices},
            "checkpoint": {"store": f"file://{folder}/store-{name}", "everySteps": save_every, "whenBusy": "wait"},
            **more}
    file = folder / f"{name}.json"
    file.write_text(json.dumps({"apiVersion": "ravel/v1", "kind": "TrainingJob", "metadata": {"name": name}, "spec": spec}, indent=2))
    return file
