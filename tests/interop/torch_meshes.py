"""Processes of torch that read the files of a step on a mesh of their own, by torch's Hugging Face reader and DTensor."""
import logging
import os
import socket

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from dcp_tensor_parallel import Holder
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

# (dp, tp): FSDP2 over dp, around tensor parallelism over tp; rows of 3 ranks are uneven.
MESHES = [(4, 1), (1, 4), (3, 1), (2, 2)]
# Names that end so are cut along columns; other matrices along rows.
COLUMNS = ("o_proj.weight", "down_proj.weight", "attn.c_proj.weight", "mlp.c_proj.weight")


def placement(name, shape):
    if len(shape) < 2:
        return Replicate()
    return Shard(1 if name.endswith(COLUMNS) else 0)


def read(expected, folder, mesh_shape):
    """This process's part of `expected` on one mesh."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    model = Holder()
    for name, value in expected.items():
        model.add(name, nn.Parameter(distribute_tensor(torch.zeros_like(value), mesh["tp"], [placement(name, value.shape)])))
    fully_shard(model, mesh=mesh["dp"])
    state = model.state_dict()
    dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
    for name, value in expected.items():
        assert torch.equal(state[name].full_tensor(), value), (mesh_shape, name, state[name].placements)


def read_all(rank, world, port, folder, expected_file):
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # joining two axes takes two gathers: as meant
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo")
    for mesh in MESHES:
        if mesh[0] * mesh[1] == world:
            read(torch.load(expected_file), folder, mesh)
    dist.barrier()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def check(folder, expected, scratch):
    """Every mesh finds `expected`, name -> tensor, in the safetensors files of `folder`."""
    file = scratch / "expected.pt"
    torch.save(expected, file)
    for world in {dp * tp for dp, tp in MESHES}:
        mp.spawn(read_all, args=(world, free_port(), str(folder), str(file)), nprocs=world)
