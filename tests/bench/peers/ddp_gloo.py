#!/usr/bin/env python3
"""Peer of C1: PyTorch DistributedDataParallel over gloo, 2 processes with one thread each, fused AdamW.

    ddp_gloo.py SHAPE WEIGHTS BATCHES.json STEPS LR

BATCHES.json: per step, per rank, per sequence the token ids. Prints {"losses": [...], "step_seconds": [...]}.
"""
import json
import os
import sys
import tempfile
import time

RANKS = 2


def run(rank, rendezvous, arguments):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from llama import SHAPES, Llama
    os.sched_setaffinity(0, {rank % os.cpu_count()})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    shape, weights, batches, steps, lr = arguments
    model = Llama(SHAPES[shape])
    model.load(weights)
    with open(batches) as file:
        data = [torch.tensor(step[rank]) for step in json.load(file)]
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                                  lr=float(lr), betas=(0.9, 0.95), eps=1e-8, fused=True)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    losses, seconds = [], []
    for step in range(int(steps)):
        ids = data[step]
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
    if rank == 0:
        print(json.dumps({"losses": losses, "step_seconds": seconds, "torch": torch.__version__}), flush=True)
    dist.destroy_process_group()


def main():
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    import torch.multiprocessing as multiprocessing
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, args=(os.path.join(folder, "rendezvous"), sys.argv[1:]), nprocs=RANKS)


if __name__ == "__main__":
    main()
