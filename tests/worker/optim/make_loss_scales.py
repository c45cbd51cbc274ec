#!/usr/bin/env python3
"""Prints the loss scales of torch's GradScaler after each step of a pattern, for loss_scale_test.cc: `x` is a step whose
gradients are not finite. Needs torch:

    python tests/worker/optim/make_loss_scales.py
"""
import torch

STEPS = "...x....xx.............xxx...x......."


def main():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=32768.0, growth_interval=3)
    scales = []
    for step in STEPS:
        optimizer.zero_grad()
        scaler.scale((parameter * (float("inf") if step == "x" else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(f"{scaler.get_scale():.0f}")
    print(f"torch {torch.__version__}")
    print(STEPS)
    print(", ".join(scales))


if __name__ == "__main__":
    main()
