"""C1: tokens per second of a training step, 2 ranks with one thread each, against the better of PyTorch's DDP and FSDP2."""
import contextlib
import statistics
import tempfile

import cluster
from harness import CAPS, ROOT, output_of, progress
from workload import RANKS, VERIFIED_STEPS, Workload

WARM_UP = 3
PEERS = {"ddp": "DDP", "fsdp2": "FSDP2 (fully_shard)"}
GOALS = {"34m": {"ratio": 1.25, "roof": 80, "stretch": 1.4}, "9m": {"ratio": 1.6, "roof": 70, "stretch": 2.0}}


def step_flops(shape):
    """Multiply-adds of one step of all ranks, forward and backward, attention counted to the diagonal, times two."""
    width, tokens = shape["width"], shape["tokens"]
    matrices = shape["layers"] * (4 * width * width + 3 * width * shape["ffn"]) + width * shape["vocabulary"]
    attention = shape["layers"] * tokens * width  # scores and values, half of the square
    return RANKS * shape["sequences"] * tokens * 6 * (matrices + attention)


def roof():
    """GFLOP/s of multiply-adds on all ranks' cores, now."""
    return float(output_of(ROOT / "build/bench/measured_roof", RANKS))


def measure(work, pairs):
    """Per pair: tokens/s of ours and of each peer, and the roof around ours in GFLOP/s. The peers' processes wait while it is not
    their turn: whoever else uses the machine changes within seconds, so turns must be short and close together."""
    samples, worst, first_losses = {"ours": [], "roof": [], **{kind: [] for kind in PEERS}}, 0.0, {}
    timed = work.steps - WARM_UP
    rate = lambda seconds: work.tokens_per_step / statistics.median(seconds[-timed:])  # noqa: E731
    with contextlib.ExitStack() as stack:
        ravel = stack.enter_context(cluster.Cluster(work.folder / "cluster", RANKS, environment=CAPS, pin_cores=True))
        peers = {kind: stack.enter_context(work.peer(kind)) for kind in PEERS}
        for kind, peer in peers.items():
            first_losses[kind], _ = peer.train(max(WARM_UP, VERIFIED_STEPS))
        for pair in range(pairs):
            before = roof()
            our_losses, our_seconds = work.ours(ravel, f"pair-{pair}")
            samples["roof"].append((before + roof()) / 2)
            samples["ours"].append(rate(our_seconds))
            for kind, peer in peers.items():
                worst = max(worst, work.verify(our_losses, first_losses[kind], kind))
                _, seconds = peer.train(1 + timed)
                samples[kind].append(rate(seconds))
            progress(f"C1 {work.case}: pair {pair + 1} of {pairs}: " + ", ".join(f"{k} {v[-1]:.1f}" for k, v in samples.items()))
    return samples, worst, peers["ddp"].version


def run(case, pairs, steps):
    with tempfile.TemporaryDirectory() as folder:
        work = Workload(case, steps, folder)
        samples, worst, version = measure(work, pairs)
    median = {side: statistics.median(values) for side, values in samples.items()}
    better = max(PEERS, key=lambda kind: median[kind])
    ratios = {kind: [a / b for a, b in zip(samples["ours"], samples[kind])] for kind in PEERS}
    ratio = statistics.median(ratios[better])
    flops = step_flops(work.shape) / work.tokens_per_step
    percent = {side: statistics.median(100 * a * flops / 1e9 / roof for a, roof in zip(samples[side], samples["roof"]))
               for side in ("ours", *PEERS)}
    goal = GOALS.get(case, {"ratio": 1.0, "roof": 0, "stretch": 1.0})
    return {
        "case": case, "metric": "training step, 2 ranks x 1 thread", "unit": "tokens/s",
        "ours": round(median["ours"], 1), "peer": round(median[better], 1), "peer_name": f"{PEERS[better]} over gloo, {version}",
        "ratio": round(ratio, 3), "goal": f">= {goal['ratio']} and >= {goal['roof']} % of the roof", "stretch": goal["stretch"],
        "pass": ratio >= goal["ratio"] and percent["ours"] >= goal["roof"],
        "peers": {kind: {"name": PEERS[kind], "tokens_per_second": round(median[kind], 1),
                         "ratio": round(statistics.median(ratios[kind]), 3), "percent_of_roof": round(percent[kind], 1)} for kind in PEERS},
        "percent_of_roof": round(percent["ours"], 1), "roof_gflops": round(median["roof"], 1), "mflop_per_token": round(flops / 1e6, 1),
        "samples": {side: [round(x, 1) for x in values] for side, values in samples.items()},
        "ratios": [round(r, 3) for r in ratios[better]], "min": round(min(ratios[better]), 3), "max": round(max(ratios[better]), 3),
        "verified": f"first {VERIFIED_STEPS} losses differ by at most {worst:.1e}"}


def cases(arguments):
    for case in ("34m", "9m", "tiny"):
        if case in (arguments.case or ["34m", "9m"]):
            yield lambda case=case: run(case, arguments.pairs, arguments.steps)
