"""C1: tokens per second of a training step, 2 ranks with one thread each, against the better of PyTorch's DDP and FSDP2."""
import contextlib
import statistics
import tempfile

import cluster
from harness import CAPS, ROOT, output_of, progress
from workload import RANKS, VERIFIED_STEPS, Workload

WARM_UP = 3
ROOF_SECONDS = 1  # like a step: a roof of milliseconds would be that of the best moment
DISTURBED, LEAST_PAIRS = 0.05, 5
PEERS = {"ddp": "DDP", "fsdp2": "FSDP2 (fully_shard)"}
GOALS = {"34m": {"ratio": 1.25, "roof": 80, "stretch": 1.4}, "9m": {"ratio": 1.6, "roof": 70, "stretch": 2.0}}


def step_flops(shape):
    """Multiply-adds of one step of all ranks, forward and backward, attention counted to the diagonal, times two."""
    width, tokens = shape["width"], shape["tokens"]
    matrices = shape["layers"] * (4 * width * width + 3 * width * shape["ffn"]) + width * shape["vocabulary"]
    attention = shape["layers"] * tokens * width  # scores and values, half of the square
    return RANKS * shape["sequences"] * tokens * 6 * (matrices + attention)


def roof():
    """(sustained, best): GFLOP/s of multiply-adds on all ranks' cores over ROOF_SECONDS, and in their best milliseconds of those."""
    return tuple(float(word) for word in output_of(ROOT / "build/bench/measured_roof", RANKS, ROOF_SECONDS).split())


class Pairs:
    """Per pair tokens/s of ours and of each peer, the sustained roof around ours in GFLOP/s, and the roofs between all turns."""

    def __init__(self):
        self.samples = {"ours": [], "roof": [], **{kind: [] for kind in PEERS}}
        self.roofs, self.worst, self.version = [], 0.0, ""

    def quiet(self):
        """The pairs that had the machine to themselves. Whoever else uses its cores takes some of the roof: what they sustained
        before, between and after the pair's turns was at most DISTURBED below the most they ever did. No other number decides."""
        sustained = [[mean for mean, _ in roofs] for roofs in self.roofs]
        most = max(max(roofs) for roofs in sustained)
        return [i for i, roofs in enumerate(sustained) if min(roofs) >= (1 - DISTURBED) * most]

    def judged(self):
        """The quiet pairs; all, where those are too few."""
        quiet = self.quiet()
        return quiet if len(quiet) >= LEAST_PAIRS else list(range(len(self.roofs)))

    def of(self, side):
        return [self.samples[side][i] for i in self.judged()]


def measure(work, pairs, attempts):
    """Turns until `pairs` pairs were quiet, or `attempts` were made. The peers' processes wait while it is not their turn:
    whoever else uses the machine changes within seconds, so turns must be short and close together."""
    result, first_losses = Pairs(), {}
    timed = work.steps - WARM_UP
    rate = lambda seconds: work.tokens_per_step / statistics.median(seconds[-timed:])  # noqa: E731
    with contextlib.ExitStack() as stack:
        ravel = stack.enter_context(cluster.Cluster(work.folder / "cluster", RANKS, environment=CAPS, pin_cores=True))
        peers = {kind: stack.enter_context(work.peer(kind)) for kind in PEERS}
        for kind, peer in peers.items():
            first_losses[kind], _ = peer.train(max(WARM_UP, VERIFIED_STEPS))
        before = roof()
        for pair in range(attempts):
            our_losses, our_seconds = work.ours(ravel, f"pair-{pair}")
            roofs = [before, roof()]
            result.samples["roof"].append(statistics.mean(sustained for sustained, _ in roofs))
            result.samples["ours"].append(rate(our_seconds))
            for kind, peer in peers.items():
                result.worst = max(result.worst, work.verify(our_losses, first_losses[kind], kind))
                _, seconds = peer.train(1 + timed)
                result.samples[kind].append(rate(seconds))
                roofs.append(roof())
            before = roofs[-1]
            result.roofs.append(roofs)
            progress(f"C1 {work.case}: pair {pair + 1}: " + ", ".join(f"{k} {v[-1]:.1f}" for k, v in result.samples.items())
                     + f"; {len(result.quiet())} of {pairs} quiet ones")
            if len(result.quiet()) >= pairs:
                break
        result.version = peers["ddp"].version
    return result


def ratios_of(ours, peers):
    return [a / b for a, b in zip(ours, peers)]


def run(case, pairs, attempts, steps):
    with tempfile.TemporaryDirectory() as folder:
        work = Workload(case, steps, folder)
        result = measure(work, pairs, max(pairs, attempts))
    median = {side: statistics.median(result.of(side)) for side in result.samples}
    better = max(PEERS, key=lambda kind: median[kind])
    ratios = {kind: ratios_of(result.of("ours"), result.of(kind)) for kind in PEERS}
    ratio = statistics.median(ratios[better])
    flops = step_flops(work.shape) / work.tokens_per_step
    percent = {side: statistics.median(100 * a * flops / 1e9 / roof for a, roof in zip(result.of(side), result.of("roof")))
               for side in ("ours", *PEERS)}
    everywhere = ratios_of(result.samples["ours"], result.samples[better])
    goal = GOALS.get(case, {"ratio": 1.0, "roof": 0, "stretch": 1.0})
    return {
        "case": case, "metric": "training step, 2 ranks x 1 thread", "unit": "tokens/s",
        "ours": round(median["ours"], 1), "peer": round(median[better], 1), "peer_name": f"{PEERS[better]} over gloo, {result.version}",
        "ratio": round(ratio, 3), "goal": f">= {goal['ratio']} and >= {goal['roof']} % of the roof", "stretch": goal["stretch"],
        "pass": ratio >= goal["ratio"] and percent["ours"] >= goal["roof"],
        "peers": {kind: {"name": PEERS[kind], "tokens_per_second": round(median[kind], 1),
                         "ratio": round(statistics.median(ratios[kind]), 3), "percent_of_roof": round(percent[kind], 1)} for kind in PEERS},
        "percent_of_roof": round(percent["ours"], 1), "roof_gflops": round(median["roof"], 1), "mflop_per_token": round(flops / 1e6, 1),
        "pairs": len(result.roofs), "quiet_pairs": result.quiet(), "judged": "quiet pairs" if result.judged() == result.quiet() else "all pairs",
        "ratio_of_all_pairs": round(statistics.median(everywhere), 3),
        "samples": {side: [round(x, 1) for x in values] for side, values in result.samples.items()},
        "roofs": result.roofs,
        "ratios": [round(r, 3) for r in ratios[better]], "min": round(min(ratios[better]), 3), "max": round(max(ratios[better]), 3),
        "verified": f"first {VERIFIED_STEPS} losses differ by at most {result.worst:.1e}"}


def cases(arguments):
    for case in ("34m", "9m", "tiny"):
        if case in (arguments.case or ["34m", "9m"]):
            yield lambda case=case: run(case, arguments.pairs, arguments.attempts, arguments.steps)
