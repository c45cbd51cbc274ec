#!/usr/bin/env python3
"""PyTorch peers of C1, C3, C4 and C5 over gloo, 2 processes with one thread each, eager, flash SDPA, fused AdamW.

    torch_gloo.py KIND SHAPE WEIGHTS BATCHES.json LR

Reads numbers of steps from standard input, one per line, trains as many further steps for each and answers with a line
{"losses": [...], "step_seconds": [...], "torch": ...}; between them it waits, so that another program may have the machine.
Ends with its input.

KIND: ddp     DistributedDataParallel, gradients as views of the buckets, static graph
      fsdp2   fully_shard per layer and root; weights stay gathered from forward to backward (the faster choice)
      zero1   ddp with ZeroRedundancyOptimizer
      bf16    ddp with weights, gradients and moments in bf16
      tensor  parallelize_module: columns of qkv and gate_up, rows of out and down, vocabulary in parts, loss_parallel; each rank has
              the sequences of all
BATCHES.json: per step, per rank, per sequence the token ids; after the last step the first one's come again.
"""
import contextlib
import json
import os
import sys
import tempfile
import time

RANKS = 2
KINDS = ("ddp", "fsdp2", "zero1", "bf16", "tensor")


def in_parts(weight, members):
    """Rows of members that lie one after another, with each rank's part of every member together: what ColwiseParallel cuts."""
    import torch
    return torch.cat([part for parts in zip(*(member.chunk(RANKS) for member in weight.chunk(members))) for part in parts])


def tensor_parallel(model, mesh):
    import torch
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    with torch.no_grad():
        for layer in model.layers:
            layer.qkv.weight.copy_(in_parts(layer.qkv.weight, 3))
            layer.gate_up.weight.copy_(in_parts(layer.gate_up.weight, 2))
            layer.heads //= RANKS
    for layer in model.layers:
        parallelize_module(layer, mesh, {"qkv": ColwiseParallel(), "out": RowwiseParallel(),
                                         "gate_up": ColwiseParallel(), "down": RowwiseParallel()})
    return parallelize_module(model, mesh, {"embedding": RowwiseParallel(input_layouts=Replicate()),
                                            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})


def clip(kind, model, most):
    """Gradients of norms are whole on every rank of `tensor`, the others in parts."""
    import torch
    import torch.distributed as dist
    if kind != "tensor":
        torch.nn.utils.clip_grad_norm_(model.parameters(), most)
        return
    parts = [p.grad.to_local() for p in model.parameters() if hasattr(p.grad, "to_local")]
    whole = [p.grad for p in model.parameters() if not hasattr(p.grad, "to_local")]
    of_parts = torch.stack(torch._foreach_norm(parts)).square().sum()
    dist.all_reduce(of_parts)
    norm = (of_parts + torch.stack(torch._foreach_norm(whole)).square().sum()).sqrt()
    torch._foreach_mul_(parts + whole, torch.clamp(most / (norm + 1e-6), max=1.0))


def parallel_of(kind, model, mesh):
    import torch
    if kind == "tensor":
        return tensor_parallel(model, mesh)
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        return fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


def optimizer_of(kind, model, lr):
    import torch
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    settings = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
    if kind == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **settings)
    return torch.optim.AdamW(groups, **settings)


def run(rank, rendezvous, arguments, orders, answers):
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.parallel import loss_parallel

    from llama import SHAPES, Llama
    os.sched_setaffinity(0, {rank % os.cpu_count()})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    kind, shape, weights, batches, lr = arguments
    model = Llama(SHAPES[shape])
    model.load(weights)
    if kind == "bf16":
        model.to(torch.bfloat16)
    with open(batches) as file:
        data = [torch.tensor(sum(step, []) if kind == "tensor" else step[rank]) for step in json.load(file)]
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,)) if kind in ("fsdp2", "tensor") else None
    parallel = parallel_of(kind, model, mesh)
    optimizer = optimizer_of(kind, model, float(lr))
    done = 0
    while (steps := orders[rank].get()) > 0:
        losses, seconds = [], []
        for step in range(done, done + steps):
            ids = data[step % len(data)]
            start = time.perf_counter()
            with loss_parallel() if kind == "tensor" else contextlib.nullcontext():
                loss = parallel(ids[:, :-1], ids[:, 1:])
                loss.backward()
            clip(kind, model, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss = loss.detach()
            mean = (loss.to_local() if kind == "tensor" else loss).double() / RANKS
            dist.all_reduce(mean)
            seconds.append(time.perf_counter() - start)
            losses.append(mean.item())
        done += steps
        if rank == 0:
            answers.put({"losses": losses, "step_seconds": seconds, "torch": torch.__version__})
    dist.destroy_process_group()


def answer(processes, answers):
    """The next answer, unless a rank ends before it, which ends this program with the rank's error."""
    while answers.empty():
        processes.join(timeout=0.05)
    return answers.get()


def main():
    if len(sys.argv) != 6 or sys.argv[1] not in KINDS:
        sys.exit(__doc__)
    import torch.multiprocessing as multiprocessing
    context = multiprocessing.get_context("spawn")
    orders, answers = [context.SimpleQueue() for _ in range(RANKS)], context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes = multiprocessing.spawn(run, args=(os.path.join(folder, "rendezvous"), sys.argv[1:], orders, answers),
                                          nprocs=RANKS, join=False)
        for line in sys.stdin:
            for order in orders:
                order.put(int(line))
            print(json.dumps(answer(processes, answers)), flush=True)
        for order in orders:
            order.put(0)
        while not processes.join():
            pass


if __name__ == "__main__":
    main()
