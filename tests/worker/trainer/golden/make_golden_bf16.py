#!/usr/bin/env python3
"""Writes loss_curves_bf16.txt: the runs of make_golden.py with weights and activations in bf16 (CPU, one thread).

The same rounding points as far as PyTorch lets one: model weights are fp32 main weights rounded half away from zero, each
sequence (lane) has a forward and backward of its own for the sum of its token losses, lanes are added in fp32, clipping and AdamW
are fp32. What differs: gradients of weights leave a lane as bf16 here, as fp32 there; norms round before they multiply by their
weight; softmax, rotation and the products of attention round to bf16 in between; sums have other orders.

    python tests/worker/trainer/golden/make_golden_bf16.py > tests/worker/trainer/golden/loss_curves_bf16.txt
"""
import sys

import numpy as np
import torch
import transformers

import make_golden as golden


def round_half_away(main):
    """fp32 to bf16, ties away from zero: what the update writes beside the main weight."""
    bits = main.detach().view(torch.int32)
    return (((bits + 0x8000) >> 16) << 16).view(torch.float32).to(torch.bfloat16)


def lane_gradients(model, row, vocabulary):
    """Loss sum of one sequence; gradients are in the parameters."""
    model.zero_grad()
    logits = model(row[None, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.float().reshape(-1, vocabulary), row[1:], reduction="sum")
    loss.backward()
    return loss.item()


def train(name, length, config):
    model, named = golden.make_model(config)
    mains = {n: p.detach().clone() for n, p in named.items()}
    model = model.to(torch.bfloat16)
    # Frequencies of rotation stay what fp32 gives.
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [dict(params=[p for p in mains.values() if p.dim() > 1], weight_decay=golden.DECAY),
         dict(params=[p for p in mains.values() if p.dim() == 1], weight_decay=0.0)],
        lr=golden.LR, betas=golden.BETAS, eps=golden.EPS)
    tokens = golden.token_file(config["vocab_size"])
    size = (len(tokens) - 1) // length
    for step in range(golden.STEPS):
        with torch.no_grad():
            for n, p in named.items():
                p.copy_(round_half_away(mains[n]))
        sums = {n: torch.zeros_like(m) for n, m in mains.items()}
        loss = 0.0
        for i in golden.samples_of_step(size, step):
            row = torch.from_numpy(np.array(tokens[i * length:i * length + length + 1]))
            loss += lane_gradients(model, row, config["vocab_size"])
            for n, p in named.items():
                sums[n] += p.grad.float()
        count = golden.GLOBAL_BATCH * length
        for n, m in mains.items():
            m.grad = sums[n] / count
        norm = torch.nn.utils.clip_grad_norm_(list(mains.values()), golden.CLIP)
        for group in optimizer.param_groups:
            group["lr"] = golden.learning_rate(step)
        optimizer.step()
        print(name, step, f"{loss / count:.9g}", f"{norm.item():.9g}", f"{golden.learning_rate(step):.9g}", flush=True)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    print(f"# case step loss grad_norm lr; torch {torch.__version__}, transformers {transformers.__version__}")
    for name, (length, config) in golden.CASES.items():
        train(name, length, config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
