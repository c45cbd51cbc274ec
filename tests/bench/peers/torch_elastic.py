#!/usr/bin/env python3
"""The peer of P2: a tiny training loop as PyTorch's documentation of elastic launches has it.

    torchrun --standalone --nproc-per-node N --max-restarts M torch_elastic.py FOLDER SAVE_EVERY

Restores FOLDER/snapshot.pt, trains with DistributedDataParallel over gloo, saves it every SAVE_EVERY steps from rank 0, and appends
to FOLDER/steps.jsonl one line per finished step: the launcher's restart count, the step, the wall clock, the loss.
"""
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

VOCABULARY, WIDTH, LAYERS, SEQUENCE, SEQUENCES = 97, 36, 3, 16, 4


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(WIDTH, 6, 52, dropout=0.0, batch_first=True) for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def main():
    folder, save_every = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group("gloo")
    model = Model()
    snapshot, step = folder / "snapshot.pt", 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if snapshot.exists():
        saved = torch.load(snapshot)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    log = open(folder / "steps.jsonl", "a", buffering=1)
    while True:
        ids = torch.randint(0, VOCABULARY, (SEQUENCES, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
        loss = torch.nn.functional.cross_entropy(parallel(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if dist.get_rank() == 0:
            log.write(json.dumps({"restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]), "step": step, "time": time.time(),
                                  "loss": loss.item()}) + "\n")
            if step % save_every == 0:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, f"{snapshot}.part")
                os.replace(f"{snapshot}.part", snapshot)


if __name__ == "__main__":
    main()
