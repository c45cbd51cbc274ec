"""torch.distributed's side of the collectives' benchmark (tests/bench/collective_rank.h): gloo, one rank, lines on stdin.

torch_collectives.py RANK RANKS FOLDER
"""
import sys
import time

import torch
import torch.distributed as dist

ROTATED, MOST = 96 << 20, 64 << 20


def turn(name, size, slot, ranks, pool_in, pool_out):
    shard, everything = size // 4 // ranks, size // 4
    if name == "barrier":
        dist.barrier()
    elif name == "all_gather":
        dist.all_gather_into_tensor(pool_out[slot * everything:(slot + 1) * everything], pool_in[slot * shard:(slot + 1) * shard])
    else:
        dist.reduce_scatter_tensor(pool_out[slot * shard:(slot + 1) * shard], pool_in[slot * everything:(slot + 1) * everything])


def verify(name, size, rank, ranks, pool_in, pool_out):
    if name == "barrier":
        dist.barrier()
        return "ok"
    shard, everything = size // 4 // ranks, size // 4
    values = [torch.arange(everything if name == "reduce_scatter" else shard, dtype=torch.float32) % 4093 + r for r in range(ranks)]
    pool_in[:values[rank].numel()] = values[rank]
    turn(name, size, 0, ranks, pool_in, pool_out)
    if name == "reduce_scatter":
        return "ok" if torch.equal(pool_out[:shard], sum(values)[rank * shard:(rank + 1) * shard]) else "wrong: sums differ"
    return "ok" if torch.equal(pool_out[:everything], torch.cat(values)) else "wrong: gathered values differ"


def main():
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/torch", rank=rank, world_size=ranks)
    torch.manual_seed(rank)
    pool_in, pool_out = torch.rand((ROTATED + MOST) // 4) - 0.5, torch.zeros((ROTATED + MOST) // 4)
    for line in sys.stdin:
        what, name, size, *turns = line.split()
        size = int(size)
        if what == "verify":
            print(verify(name, size, rank, ranks, pool_in, pool_out), flush=True)
            continue
        slots = max(2, ROTATED // max(size, 1))
        for slot in range(3):
            turn(name, size, slot % slots, ranks, pool_in, pool_out)
        dist.barrier()
        start = time.perf_counter()
        for slot in range(int(turns[0])):
            turn(name, size, slot % slots, ranks, pool_in, pool_out)
        print(f"{time.perf_counter() - start:.9f}", flush=True)


main()
