"""G8, the peer: PyTorch's AdamW on the CPU. Reads lines "FORM IMPLEMENTATION THREADS" (fp32 or bf16, fused or foreach), answers each
with one JSON line. In bf16, weights, gradients and both moments are bf16 and there is no main weight: the nearest that it has."""
import json
import statistics
import sys
import time

import torch

REPEATS = 5
TENSORS = 8


def check(implementation):
    """One step against the formula, in fp64."""
    torch.manual_seed(1)
    weight, gradient = torch.randn(1000), torch.randn(1000)
    parameter = torch.nn.Parameter(weight.clone())
    parameter.grad = gradient
    torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, **{implementation: True}).step()
    expected = weight.double() * (1 - 1e-2 * 0.1) - 1e-2 * gradient.double() / (gradient.double().abs() + 1e-8)
    assert torch.allclose(parameter.detach().double(), expected, atol=1e-6)


def measure(form, implementation, threads, elements):
    torch.set_num_threads(threads)
    check(implementation)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[form]
    parameters = [torch.nn.Parameter(torch.zeros(elements // TENSORS, dtype=dtype)) for _ in range(TENSORS)]
    for parameter in parameters:
        parameter.grad = ((torch.arange(parameter.numel()) * 2654435761 % 2001 - 1000).float() * 1e-5).to(dtype)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, **{implementation: True})
    seconds = []
    clock = time.thread_time if threads == 1 else time.perf_counter  # one thread: the time in which it ran, as ours
    for _ in range(REPEATS + 1):
        start = clock()
        optimizer.step()
        seconds.append(clock() - start)
    return {"ns": 1e9 * statistics.median(seconds[1:]) / elements, "version": torch.__version__}


def main():
    elements = int(sys.argv[1]) << 20
    for line in sys.stdin:
        form, implementation, threads = line.split()
        print(json.dumps(measure(form, implementation, int(threads), elements)), flush=True)


if __name__ == "__main__":
    main()
