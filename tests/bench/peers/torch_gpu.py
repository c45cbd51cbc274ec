#!/usr/bin/env python3
"""PyTorch peers of G1, G3 and G4 on one device: torch.compile, cuDNN attention chosen by name, fused AdamW.

    torch_gpu.py KIND SHAPE WEIGHTS BATCHES.json STEPS LR [--micro-batches M] [--block STEPS]
                 [--device cpu] [--dtype fp32] [--no-compile]

KIND: single  one module, no wrapper (the faster one where there is no one to shard with)
      fsdp2   fully_shard per layer and root over one rank, bf16 parameters and fp32 reduction
BATCHES.json: per step, per sequence the token ids. States are those of the shape: bf16 weights and moments for 8B, else fp32 with
bf16 compute (--dtype fp32: all fp32). Steps are timed in blocks, without a
wait for the device inside. Prints {"losses": [...], "step_seconds": [...], "torch": ..., "peak_bytes": ...}.
"""
import argparse
import contextlib
import json
import os
import tempfile
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_models import SHAPES, build, load


def optimizer_of(model, lr):
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8, fused=True)


def sharded(model, states):
    """Over a mesh of one rank, as fully_shard is used on many."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    device = next(model.parameters()).device.type
    folder = tempfile.mkdtemp()
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    mesh = init_device_mesh(device, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if states != "all-fp32" else None, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


@contextlib.contextmanager
def precision(device, states, kind):
    """bf16 compute over fp32 weights by autocast, unless FSDP casts or the weights are bf16 already; cuDNN attention on devices."""
    with contextlib.ExitStack() as stack:
        if states == "fp32" and kind == "single":
            stack.enter_context(torch.autocast(device, torch.bfloat16))
        if device == "cuda" and states != "all-fp32":
            stack.enter_context(sdpa_kernel(SDPBackend.CUDNN_ATTENTION))
        yield


def train(arguments, shape, model, data):
    device = arguments.device
    states = "all-fp32" if arguments.dtype == "fp32" else shape["states"]
    model = sharded(model, states) if arguments.kind == "fsdp2" else model
    run = model if arguments.no_compile else torch.compile(model)
    optimizer = optimizer_of(model, arguments.lr)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    parts = arguments.micro_batches
    losses, seconds = [], []
    for begin in range(0, arguments.steps, arguments.block):
        steps = range(begin, min(begin + arguments.block, arguments.steps))
        wait()
        start = time.perf_counter()
        for step in steps:
            means = []
            for ids in data[step].chunk(parts):
                with precision(device, states, arguments.kind):
                    loss = run(ids[:, :-1], ids[:, 1:]) / parts
                loss.backward()
                means.append(loss.detach().float())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(torch.stack(means).sum())
        wait()
        seconds += [(time.perf_counter() - start) / len(steps)] * len(steps)
    return [loss.item() for loss in losses], seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("single", "fsdp2"))
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("weights")
    parser.add_argument("batches")
    parser.add_argument("steps", type=int)
    parser.add_argument("lr", type=float)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--micro-batches", type=int, default=1, help="parts of a step, whose gradients add up")
    parser.add_argument("--block", type=int, default=5, help="steps between two waits for the device")
    parser.add_argument("--no-compile", action="store_true")
    arguments = parser.parse_args()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch.backends.cuda.matmul.allow_tf32 = False
    shape = SHAPES[arguments.shape]
    weights_type = torch.bfloat16 if shape["states"] == "bf16" and arguments.dtype == "bf16" else torch.float32
    with torch.device("meta"):
        model = build(shape)
    model = model.to_empty(device=arguments.device).to(weights_type)
    load(model, arguments.weights)
    model.prepare(arguments.device, torch.float32)
    with open(arguments.batches) as file:
        data = [torch.tensor(step, device=arguments.device) for step in json.load(file)]
    losses, seconds = train(arguments, shape, model, data)
    peak = torch.cuda.max_memory_allocated() if arguments.device == "cuda" else 0
    print(json.dumps({"losses": losses, "step_seconds": seconds, "torch": torch.__version__, "peak_bytes": peak}), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
