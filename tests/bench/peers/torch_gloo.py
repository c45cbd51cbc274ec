#!/usr/bin/env python3
"""PyTorch peers of C1, C3 and C5 over gloo, 2 processes with one thread each, eager, flash SDPA, fused AdamW.

    torch_gloo.py KIND SHAPE WEIGHTS BATCHES.json LR

Reads numbers of steps from standard input, one per line, trains as many further steps for each and answers with a line
{"losses": [...], "step_seconds": [...], "torch": ...}; between them it waits, so that another program may have the machine.
Ends with its input.

KIND: ddp     DistributedDataParallel, gradients as views of the buckets, static graph
      fsdp2   fully_shard per layer and root; weights stay gathered from forward to backward (the faster choice)
      zero1   ddp with ZeroRedundancyOptimizer
      bf16    ddp with weights, gradients and moments in bf16
BATCHES.json: per step, per rank, per sequence the token ids; after the last step the first one's come again.
"""
import json
import os
import sys
import tempfile
import time

RANKS = 2
KINDS = ("ddp", "fsdp2", "zero1", "bf16")


def parallel_of(kind, model, mesh):
    import torch
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
        data = [torch.tensor(step[rank]) for step in json.load(file)]
    mesh = dist.device_mesh.init_device_mesh("cpu", (RANKS,)) if kind == "fsdp2" else None
    parallel = parallel_of(kind, model, mesh)
    optimizer = optimizer_of(kind, model, float(lr))
    done = 0
    while (steps := orders[rank].get()) > 0:
        losses, seconds = [], []
        for step in range(done, done + steps):
            ids = data[step % len(data)]
            start = time.perf_counter()
            loss = parallel(ids[:, :-1], ids[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            mean = loss.detach().double() / RANKS
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
