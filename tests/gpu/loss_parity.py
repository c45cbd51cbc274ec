#!/usr/bin/env python3
"""Losses of 50 steps of a small Llama and of a small GPT-2, of a Ravel job and of PyTorch, from the same weights and batches.

    loss_parity.py [--device gpu|cpu] [--steps N] [--case CASE]

gpu: bf16 compute over fp32 weights on both sides. cpu: fp32 on both sides, which shows the script itself. Exit code 0: they agree;
1: they do not; 3: no device, with the reason in the last line. Needs PyTorch and safetensors.
"""
import argparse
import pathlib
import sys
import tempfile

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "bench"), str(TESTS / "bench/peers"), str(TESTS / "testing")]
import cluster  # noqa: E402
import harness  # noqa: E402

# Largest relative difference of a loss: rounding of bf16 steps apart, rounding of fp32 steps apart.
TOLERANCE = {"gpu": 2e-2, "cpu": 1e-3}
LR, NO_DEVICE = 1e-3, 3


def compare(case, device, steps, ravel, folder):
    from gpu_training_speed import Workload
    work = Workload(case, steps, folder, device, LR)
    ours, _ = work.ours(ravel, case)
    peer, _, version = work.peer("single")
    if len(ours) != steps or len(peer) != steps:
        sys.exit(f"{case}: expected {steps} losses, got {len(ours)} and {len(peer)}")
    differences = [abs(a - b) / b for a, b in zip(ours, peer)]
    worst = max(range(steps), key=lambda step: differences[step])
    agree = differences[worst] <= TOLERANCE[device]
    print(f"{case} on {device}: {steps} losses from {ours[0]:.4f} to {ours[-1]:.4f} ({version}: {peer[0]:.4f} to {peer[-1]:.4f}); largest relative "
          f"difference {differences[worst]:.1e} in step {worst + 1}, limit {TOLERANCE[device]:.0e}: {'agree' if agree else 'DIFFER'}", flush=True)
    return agree


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="gpu", choices=("gpu", "cpu"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--case", action="append", help="of peers/gpu_shapes.py")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, cluster.Cluster(pathlib.Path(name) / "cluster", 1) as ravel:
        try:
            if arguments.device == "gpu":
                from gpu_training_speed import require_gpu
                require_gpu(ravel)
        except harness.NoDevice as reason:
            print(f"no device: {reason}")
            return NO_DEVICE
        agree = [compare(case, arguments.device, arguments.steps, ravel, pathlib.Path(name)) for case in arguments.case or ["parity", "tiny-gpt2"]]
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
