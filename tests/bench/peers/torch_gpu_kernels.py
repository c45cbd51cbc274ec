#!/usr/bin/env python3
"""PyTorch peers of G5 and G6: the same operations, shapes and types as gpu_speed, by torch.compile and torch.matmul.

    torch_gpu_kernels.py CASE...            one JSON line each
    torch_gpu_kernels.py --serve            reads a case a line, answers with a line
    torch_gpu_kernels.py --list             the cases
    [--device cpu] [--small]                small sizes: shows that a case works, not how fast

A line has the median time of repeats from a cold cache, by events of the device, and the largest difference from the same formula
in fp64 or fp32 on a part of the result. Random inputs. Weight gradients of bf16 operands are fp32 on both sides: torch.mm and
torch.addmm with out_dtype, which adds in place. On a CPU, which has no such form, they are a gemm of fp32 operands.
"""
import argparse
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

TOKENS, HIDDEN, INTERMEDIATE, LOGIT_TOKENS, VOCABULARY, PARAMETERS = 16384, 4096, 14336, 4096, 128256, 256 << 20
LAYERS = {"qkv": (4096, 6144, 8192), "out": (4096, 4096, 8192), "gate_up": (4096, 28672, 8192), "down": (14336, 4096, 8192), "head": (4096, 128256, 2048)}
PASSES = ("forward", "dgrad", "wgrad", "wgrad_added")
EPS, CHECKED, TOLERANCE = 1e-6, 64, 2e-2
WARM_UPS, FEWEST, MOST, SHORTEST = 3, 10, 2000, 0.5


class Maker:
    """Sizes and random tensors of one device."""

    def __init__(self, device, small):
        self.device, self.small = device, small
        self.compile = (lambda f: f) if device == "cpu" else (lambda f: torch.compile(f, mode="max-autotune-no-cudagraphs"))

    def size(self, full):
        return full // 64 if self.small else full

    def random(self, *shape, dtype=torch.bfloat16, scale=1.0):
        return (torch.randn(*shape, device=self.device) * scale).to(dtype)


def error_of(actual, expected):
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def rms_norm(x, w, eps=EPS):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def rms_norm_forward(make):
    tokens, hidden = make.size(TOKENS), make.size(HIDDEN)
    x, residual, w = make.random(tokens, hidden), make.random(tokens, hidden), make.random(hidden)

    def forward(x, residual, w):
        total = x + residual
        return total, F.rms_norm(total, (w.shape[0],), w, EPS)

    run = make.compile(forward)
    total, y = run(x, residual, w)
    expected = rms_norm(total[:CHECKED].double(), w.double())
    return (lambda: run(x, residual, w)), None, {"bytes": 8 * tokens * hidden}, error_of(y[:CHECKED], expected)


def backward_of(function, inputs, gradients):
    """The compiled backward alone: the graph is kept, its result replaced at each call."""
    leaves = [t.requires_grad_() for t in inputs]
    out = function(*leaves)
    return lambda: torch.autograd.grad(out, leaves, gradients, retain_graph=True)


def rms_norm_backward(make):
    tokens, hidden = make.size(TOKENS), make.size(HIDDEN)
    x, w, dy, dresidual = make.random(tokens, hidden), make.random(hidden), make.random(tokens, hidden), make.random(tokens, hidden)
    forward = make.compile(lambda x, w: (F.rms_norm(x, (w.shape[0],), w, EPS), x.clone()))  # x goes on as the residual
    run = backward_of(forward, (x, w), (dy, dresidual))
    dx = run()[0]
    row = x[:CHECKED].detach().double().requires_grad_()
    expected, = torch.autograd.grad(rms_norm(row, w.detach().double()), row, dy[:CHECKED].double())
    return run, None, {"bytes": 8 * tokens * hidden}, error_of(dx[:CHECKED], expected + dresidual[:CHECKED].double())


def swiglu_forward(make):
    tokens, width = make.size(TOKENS // 2), make.size(INTERMEDIATE)
    gate, up = make.random(tokens, width), make.random(tokens, width)
    run = make.compile(lambda gate, up: F.silu(gate) * up)
    expected = F.silu(gate[:CHECKED].double()) * up[:CHECKED].double()
    return (lambda: run(gate, up)), None, {"bytes": 6 * tokens * width}, error_of(run(gate, up)[:CHECKED], expected)


def swiglu_backward(make):
    tokens, width = make.size(TOKENS // 2), make.size(INTERMEDIATE)
    gate, up, dy = (make.random(tokens, width) for _ in range(3))
    run = backward_of(make.compile(lambda gate, up: F.silu(gate) * up), (gate, up), dy)
    dgate = run()[0]
    row = gate[:CHECKED].detach().double().requires_grad_()
    expected, = torch.autograd.grad(F.silu(row) * up[:CHECKED].detach().double(), row, dy[:CHECKED].double())
    return run, None, {"bytes": 10 * tokens * width}, error_of(dgate[:CHECKED], expected)


def cross_entropy(make):
    tokens, vocabulary = make.size(LOGIT_TOKENS), make.size(VOCABULARY)
    logits, targets = make.random(tokens, vocabulary, scale=2.0), torch.randint(vocabulary, (tokens,), device=make.device)

    def both(logits, targets):
        """Losses, and the gradient of their sum written over the logits, as the fused head does."""
        probabilities = torch.softmax(logits.float(), -1)
        rows = torch.arange(logits.shape[0], device=logits.device)
        loss = -torch.log(probabilities[rows, targets])
        columns = torch.arange(logits.shape[1], device=logits.device)
        logits.copy_(probabilities - (columns[None, :] == targets[:, None]).float())
        return loss

    run, work = make.compile(both), logits.clone()
    loss = run(work, targets)
    expected = F.cross_entropy(logits[:CHECKED].double(), targets[:CHECKED], reduction="none")
    return (lambda: run(work, targets)), (lambda: work.copy_(logits)), {"bytes": 4 * tokens * vocabulary}, error_of(loss[:CHECKED], expected)


def adamw(make, dtype):
    n = make.size(PARAMETERS)
    weight = torch.nn.Parameter(make.random(n, dtype=dtype, scale=0.02))
    weight.grad = make.random(n, dtype=dtype)
    before, gradient = weight[:CHECKED].detach().double(), weight.grad[:CHECKED].double()
    optimizer = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    optimizer.step()
    expected = before * (1 - 1e-3) - 1e-2 * gradient / (gradient.abs() + 1e-8)
    # PyTorch has no fp32 master inside a bf16 update: it moves 14 bytes of an element where ours moves 18.
    return optimizer.step, None, {"bytes": n * (28 if dtype == torch.float32 else 14)}, error_of(weight[:CHECKED].detach(), expected)


def adamw_fp8_block(make):
    """The update, and E4M3 codes of blocks of 128 x 128 by power-of-two scales: two passes."""
    columns = 512 if make.small else 4096
    weight = torch.nn.Parameter(make.random(make.size(PARAMETERS) // columns, columns, dtype=torch.float32, scale=0.02))
    weight.grad = make.random(*weight.shape, dtype=torch.float32)
    before, gradient = weight[:CHECKED].detach().double(), weight.grad[:CHECKED].double()
    optimizer = torch.optim.AdamW([weight], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)

    def encode(weight):
        blocks = weight.view(-1, 128, columns // 128, 128)
        scale = torch.exp2(torch.floor(torch.log2(448 / blocks.abs().amax((1, 3), keepdim=True))))
        return (blocks * scale).to(torch.float8_e4m3fn)

    encode = make.compile(encode)

    def run():
        optimizer.step()
        return encode(weight.detach())

    run()
    expected = before * (1 - 1e-3) - 1e-2 * gradient / (gradient.abs() + 1e-8)
    return run, None, {"bytes": weight.numel() * 29}, error_of(weight[:CHECKED].detach(), expected)


def fp32_gemm(a, b):
    return torch.mm(a.float(), b.float()) if a.device.type == "cpu" else torch.mm(a, b, out_dtype=torch.float32)


def fp32_gemm_added(sums, a, b):
    if a.device.type == "cpu":
        return torch.addmm(sums, a.float(), b.float(), out=sums)
    return torch.addmm(sums, a, b, out_dtype=torch.float32, out=sums)


def gemm(make, layer, which):
    into, out, tokens = (make.size(full) for full in LAYERS[layer])
    x, w, dy = make.random(tokens, into), make.random(out, into), make.random(tokens, out)
    sums = make.random(out, into, dtype=torch.float32)
    calls = {"forward": (lambda: x @ w.T, lambda c: (c[:CHECKED], x[:CHECKED].double() @ w.T.double())),
             "dgrad": (lambda: dy @ w, lambda c: (c[:CHECKED], dy[:CHECKED].double() @ w.double())),
             "wgrad": (lambda: fp32_gemm(dy.T, x), lambda c: (c[:CHECKED], dy[:, :CHECKED].T.double() @ x.double()))}
    if which == "wgrad_added":
        before = sums[:CHECKED].double()
        run = lambda: fp32_gemm_added(sums, dy.T, x)  # noqa: E731
        error = error_of(run()[:CHECKED], before + dy[:, :CHECKED].T.double() @ x.double())
    else:
        run, check = calls[which]
        error = error_of(*check(run()))
    return run, None, {"flops": 2 * tokens * into * out}, error


CASES = {"rms_norm_forward": rms_norm_forward, "rms_norm_backward": rms_norm_backward, "swiglu_forward": swiglu_forward,
         "swiglu_backward": swiglu_backward, "cross_entropy": cross_entropy, "adamw_fp32": lambda make: adamw(make, torch.float32),
         "adamw_bf16": lambda make: adamw(make, torch.bfloat16), "adamw_fp8_block": adamw_fp8_block,
         **{f"{layer}_{which}": (lambda make, layer=layer, which=which: gemm(make, layer, which)) for layer in LAYERS for which in PASSES}}


def timed(make, run, prepare):
    """Microseconds of each repeat."""
    flush = torch.empty(make.size(256 << 20), dtype=torch.uint8, device=make.device)
    clean = torch.zeros(make.size(64 << 20), device=make.device)
    samples = []
    for repeat in range(WARM_UPS + (FEWEST if make.small else MOST)):
        if prepare:
            prepare()
        flush.zero_()
        clean.sum()  # 256 MB of reads: the cache holds nothing that is still to be written
        if make.device == "cpu":
            start = time.perf_counter()
            run()
            samples.append(1e6 * (time.perf_counter() - start))
        else:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            samples.append(1e3 * begin.elapsed_time(end))
        if len(samples) >= WARM_UPS + FEWEST and sum(samples[WARM_UPS:]) >= 1e6 * SHORTEST:
            break
    return samples[WARM_UPS:]


class Session:
    def __init__(self, make):
        self.make, self.name, self.work = make, None, None

    def measure(self, name):
        if name != self.name:
            self.work = None
            self.work = CASES[name](self.make)
            self.name = name
        run, prepare, size, error = self.work
        if not error <= TOLERANCE:
            sys.exit(f"torch_gpu_kernels.py: {name}: differs by {error:.1e} of the largest value")
        samples = timed(self.make, run, prepare)
        seconds = statistics.median(samples) * 1e-6
        rate = {"gb_per_second": round(size["bytes"] / seconds * 1e-9, 1)} if "bytes" in size else {"tflops": round(size["flops"] / seconds * 1e-12, 1)}
        print(json.dumps({"case": name, "microseconds": round(seconds * 1e6, 2), "repeats": len(samples), "verified": f"{error:.1e}", **rate,
                          "small": self.make.small, "torch": torch.__version__}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(CASES))
        return
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no device: torch.cuda.is_available() is false", file=sys.stderr)
        sys.exit(3)
    session = Session(Maker(arguments.device, arguments.small))
    for name in (line.strip() for line in sys.stdin) if arguments.serve else arguments.cases:
        if name not in CASES:
            parser.error(f"no case '{name}'; there are {', '.join(CASES)}")
        session.measure(name)


if __name__ == "__main__":
    main()
