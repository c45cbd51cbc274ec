#!/usr/bin/env python3
"""Other programs read what we save: torch's Hugging Face reader opens model/ and optim/ of a step, safetensors opens every
file, transformers loads exports of a tied and an untied model, in fp32 and (in several files) bf16.

    RAVEL_CHECKPOINTS_TEST=build/dev/tests/coordinator/ctl/ctl_checkpoints_test \\
        build/interop-venv/bin/python tests/interop/checkpoint_readers.py

The test binary writes the steps and exports; their values are a formula that both sides know.
"""
import glob
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import safetensors
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)


def value(shape, tensor, role):
    """Element i of tensor t of role r, as tests/testing/saved_state.h defines it."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    i = torch.arange(count, dtype=torch.int64)
    flat = (((7919 * i + 104729 * tensor + 31 * role) % 1009).float() - 504.0) / 10080.0
    return (flat if role == 0 else flat.abs()).reshape(shape)


def narrowed(tensor):
    """The upper half of every value, as bf16 has it."""
    return (tensor.contiguous().view(torch.int32) & -0x10000).view(torch.float32).to(torch.bfloat16)


def headers(folder, dtypes=None):
    """Global shape of every key, from the offsets of its chunks; its type goes into `dtypes`."""
    shapes = {}
    for path in sorted(glob.glob(f"{folder}/*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            info = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for key in file.keys():
                offsets = info[key]["saved_offsets"]
                end = [o + n for o, n in zip(offsets, file.get_slice(key).get_shape())]
                shapes[key] = [max(a, b) for a, b in zip(shapes.get(key, end), end)]
                if dtypes is not None:
                    assert dtypes.setdefault(key, file.get_slice(key).get_dtype()) == file.get_slice(key).get_dtype(), key
    return shapes


def inventory_order(names):
    """Tensors in the order of the inventory: embedding, layers (each as the model applies it), norm, head."""
    parts = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
             "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]

    def key(name):
        layer = re.match(r"model\.layers\.(\d+)\.(.*)\.weight", name)
        if layer:
            return (1, int(layer[1]), parts.index(layer[2]))
        return ({"model.embed_tokens.weight": 0, "model.norm.weight": 2, "lm_head.weight": 3}[name], 0, 0)

    return sorted(names, key=key)


def check_step(step, moments):
    shapes = headers(f"{step}/model")
    order = inventory_order(shapes)
    wanted = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(f"{step}/model"))
    for name, tensor in wanted.items():
        assert torch.equal(tensor, value(shapes[name], order.index(name), 0)), name
    dtypes = {}
    states = headers(f"{step}/optim", dtypes)
    of_name = {"F32": torch.float32, "BF16": torch.bfloat16}
    for name, dtype in dtypes.items():
        assert of_name[dtype] == (torch.float32 if name.endswith(".step") else moments), (name, dtype)
    wanted = {name: torch.full(shape, float("nan"), dtype=of_name[dtypes[name]]) for name, shape in states.items()}
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(f"{step}/optim"),
             planner=DefaultLoadPlanner(allow_partial_load=True))
    for name, tensor in wanted.items():
        parameter, slot = re.match(r"state\.(.*)\.(exp_avg_sq|exp_avg|step)$", name).groups()
        if slot == "step":
            assert tensor.shape == () and float(tensor) == 20.0, name
            continue
        expected = value(shapes[parameter], order.index(parameter), 1 if slot == "exp_avg" else 2)
        assert torch.equal(tensor, narrowed(expected) if moments == torch.bfloat16 else expected), name
    assert len(states) == 3 * len(shapes)
    return shapes, order


def check_export(path, shapes, order, dtype):
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    assert model.dtype == dtype, model.dtype
    state = model.state_dict()
    for name in shapes:
        expected = value(shapes[name], order.index(name), 0).to(dtype)
        assert torch.equal(state[name], expected), name
    tied = model.config.tie_word_embeddings
    assert tied == ("lm_head.weight" not in shapes)
    if tied:
        assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    logits = model(torch.tensor([[1, 2, 3, 4]])).logits
    assert logits.shape == (1, 4, model.config.vocab_size) and torch.isfinite(logits).all()


def main():
    binary = os.environ.get("RAVEL_CHECKPOINTS_TEST", "build/dev/tests/coordinator/ctl/ctl_checkpoints_test")
    with tempfile.TemporaryDirectory() as root:
        subprocess.run([binary, "--gtest_filter=InteropTest.*"], check=True, stdout=subprocess.DEVNULL,
                       env={**os.environ, "RAVEL_INTEROP_STORE": root})
        for kind, moments in (("untied", torch.float32), ("tied", torch.float32), ("bf16_moments", torch.bfloat16),
                              ("mesh_2x2", torch.float32)):
            folder = pathlib.Path(root) / kind
            shapes, order = check_step(str(folder / "step-0000000020"), moments)
            print(f"{kind}: torch {torch.__version__} reads {len(shapes)} tensors of model/, {3 * len(shapes)} of optim/")
            for name, dtype in (("export-f32", torch.float32), ("export-bf16", torch.bfloat16)):
                check_export(str(folder / name), shapes, order, dtype)
                print(f"{kind}: transformers loads {name} ({len(glob.glob(str(folder / name / '*.safetensors')))} files)")
    print("ok")


if __name__ == "__main__":
    sys.exit(main())
