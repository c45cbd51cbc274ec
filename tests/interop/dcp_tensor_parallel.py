#!/usr/bin/env python3
"""What torch's distributed checkpoints write of a model under FSDP2 x tensor parallelism, as files that Ravel's import reads
(tests/worker/checkpoint/dcp_import_test.cc).

    build/interop-venv/bin/python tests/interop/dcp_tensor_parallel.py tests/worker/checkpoint/golden/dcp_fsdp2_tp

Four processes on a CPU, mesh (dp 2, tp 2). Parameters that tensor parallelism cuts along rows are _StridedShard on dp; 27
inner rows over 2 x 2 ranks are uneven. Element i of tensor t of role 0 is the formula of tests/testing/saved_state.h, so no
values travel beside the files.
"""
import json
import os
import pathlib
import shutil
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

HIDDEN, INNER, VOCABULARY, HEADS, KEY_HEADS, HEAD = 24, 27, 67, 4, 2, 6
# Name, shape, dimension that tensor parallelism cuts; in the order of Ravel's inventory.
TENSORS = [
    ("model.embed_tokens.weight", (VOCABULARY, HIDDEN), 0),
    ("model.layers.0.input_layernorm.weight", (HIDDEN,), None),
    ("model.layers.0.self_attn.q_proj.weight", (HEADS * HEAD, HIDDEN), 0),
    ("model.layers.0.self_attn.k_proj.weight", (KEY_HEADS * HEAD, HIDDEN), 0),
    ("model.layers.0.self_attn.v_proj.weight", (KEY_HEADS * HEAD, HIDDEN), 0),
    ("model.layers.0.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD), 1),
    ("model.layers.0.post_attention_layernorm.weight", (HIDDEN,), None),
    ("model.layers.0.mlp.gate_proj.weight", (INNER, HIDDEN), 0),
    ("model.layers.0.mlp.up_proj.weight", (INNER, HIDDEN), 0),
    ("model.layers.0.mlp.down_proj.weight", (HIDDEN, INNER), 1),
    ("model.norm.weight", (HIDDEN,), None),
    ("lm_head.weight", (VOCABULARY, HIDDEN), 0),
]


def value(shape, tensor):
    count = int(torch.tensor(shape).prod())
    i = torch.arange(count, dtype=torch.int64)
    return ((((7919 * i + 104729 * tensor) % 1009).float() - 504.0) / 10080.0).reshape(shape)


class Holder(nn.Module):
    """A module whose parameters have the names of a model."""

    def add(self, name, parameter):
        first, _, rest = name.partition(".")
        if not rest:
            self.register_parameter(first, parameter)
            return
        if first not in self._modules:
            self.add_module(first, Holder())
        self._modules[first].add(rest, parameter)


def write(rank, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK=str(rank), WORLD_SIZE="4")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Holder()
    for index, (name, shape, dim) in enumerate(TENSORS):
        placement = Replicate() if dim is None else Shard(dim)
        model.add(name, nn.Parameter(distribute_tensor(value(shape, index), mesh["tp"], [placement])))
    fully_shard(model, mesh=mesh["dp"])
    state = model.state_dict()
    if rank == 0:
        for name, tensor in state.items():
            print(name, tuple(tensor.shape), tensor.placements)
    assert all(isinstance(tensor, DTensor) for tensor in state.values())
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder, save_distributed=True))
    dist.barrier()
    dist.destroy_process_group()


def main():
    folder = pathlib.Path(sys.argv[1])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    mp.spawn(write, args=(str(folder),), nprocs=4)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
              "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS,
              "num_key_value_heads": KEY_HEADS, "head_dim": HEAD, "max_position_embeddings": 64, "tie_word_embeddings": False,
              "rms_norm_eps": 1e-05}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
