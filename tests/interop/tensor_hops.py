#!/usr/bin/env python3
"""transformers opens the export of every step of a job that went on from mesh to mesh, (2,2) -> 4x1 -> 1x4 -> 3x1 -> 2x2, and
finds the weights of a run on one rank; torch's Hugging Face reader finds them in the steps themselves, in one process and, of
the steps of (2,2), in processes on four other meshes.

    RAVEL_BIN_DIR=build/cuda/bin RAVEL_TENSOR_PARTS_TEST=build/cuda/tests/worker/trainer/worker_tensor_parts_test \\
        build/interop-venv/bin/python tests/interop/tensor_hops.py

The test binary trains and leaves the steps.
"""
import os
import pathlib
import subprocess
import tempfile

import torch
import torch.distributed.checkpoint as dcp
import torch_meshes
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)
MODELS = ["bundled_rope_scaling", "cut_gpt2_tied", "cut_llama_untied", "cut_qwen2_tied", "cut_qwen3_untied"]
MESHES = ["2x2", "4x1", "1x4", "3x1", "2x2 own tokens"]
HOP_STEPS = 2


def step_of(folder, epoch, step):
    found = [path.parent for path in (folder / f"store-{epoch}").rglob("COMMIT") if path.parent.name.endswith(f"{step:010d}")]
    assert len(found) == 1, (folder, epoch, step, found)
    return found[0]


def exported(step, output):
    subprocess.run([pathlib.Path(os.environ["RAVEL_BIN_DIR"]) / "ravelctl", "checkpoints", "export", step, "--output", output],
                   check=True, capture_output=True)
    return AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)


def check_reader(step, model):
    """The chunks of the step, put together by torch."""
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    metadata = HuggingFaceStorageReader(str(step / "model")).read_metadata()
    names = set(metadata.state_dict_metadata)
    state = {name: value for name, value in state.items() if name in names}
    assert state, "no tensor of the step has a name of the model"
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(step / "model")), no_dist=True)
    for name, value in state.items():
        assert torch.equal(value, model.state_dict()[name]), name
    return state


def check(model, scratch):
    subprocess.run([os.environ["RAVEL_TENSOR_PARTS_TEST"], f"--gtest_filter=*TensorHops*/{model}"],
                   check=True, capture_output=True, env={**os.environ, "RAVEL_INTEROP_STORE": str(scratch)})
    folder = scratch / f"ravel_tensor_hops_{model}"
    for hop, mesh in enumerate(MESHES):
        step = HOP_STEPS * (hop + 1)
        alone = exported(step_of(folder, 1, step), scratch / f"{model}-alone-{hop}")
        here = step_of(folder, hop + 2, step)
        got = exported(here, scratch / f"{model}-{hop}")
        expected = alone.state_dict()
        assert expected.keys() == got.state_dict().keys()
        for name, value in got.state_dict().items():
            assert torch.equal(value, expected[name]), (model, mesh, name)
        ids = torch.arange(16).reshape(1, 16) % got.config.vocab_size
        assert torch.isfinite(got(ids).logits).all()
        read = check_reader(here, got)
        print(f"{model} {mesh} step {step}: {len(expected)} tensors equal in transformers, {len(read)} in torch's reader", flush=True)
        if mesh == "2x2":
            torch_meshes.check(here / "model", read, scratch)
            print(f"{model} {mesh} step {step}: equal in torch on the meshes {torch_meshes.MESHES}", flush=True)


def main():
    with tempfile.TemporaryDirectory() as scratch:
        for model in MODELS:
            check(model, pathlib.Path(scratch))
    print("ok: every mesh")


if __name__ == "__main__":
    main()
