"""C3: peak memory per rank, fully sharded over 2, against PyTorch's DDP and its ZeroRedundancyOptimizer.

Memory is the proportional set size, sampled from outside on both sides alike: the most that both ranks have together, per rank,
because one rank's share of shared pages is larger until its peer has used them, too. It is the peak of training, from the start
of the processes to the end of the last step but one: the peers save nothing. The peak with the checkpoint that a job ends with,
whose snapshot is a copy of the rank's shards, is reported beside it.
"""
import json
import statistics
import tempfile

import cluster
from harness import CAPS, progress
from memory_probe import PeakPss
from workload import RANKS, Workload

STEPS, TRIES = 4, 3
PEERS = {"ddp": "DDP", "zero1": "DDP with ZeroRedundancyOptimizer"}
GOAL = 0.5


def our_peaks(work, name):
    """(losses, peak until the last step, peak with the final checkpoint). A job whose trainers were restarted is run again: those
    of different attempts never hold memory together."""
    for attempt in range(TRIES):
        losses, peaks, trainers = our_run(work, f"{name}-{attempt}")
        if trainers == RANKS:
            return losses, *peaks
        progress(f"C3 {work.case}: {trainers} trainers for {RANKS} ranks: not measured, once more")
    raise SystemExit(f"C3 {work.case}: trainers were restarted in each of {TRIES} runs")


def our_run(work, name):
    """(losses, (peak until the last step, peak with the final checkpoint), processes that were trainers)."""
    with cluster.Cluster(work.folder / name, RANKS, environment=CAPS, pin_cores=True) as ravel, PeakPss("ravel-trainer --socket") as probe:
        losses, seconds = work.ours(ravel, name)
        events = [json.loads(line) for line in ravel.ctl("events", name, "-o", "jsonl").stdout.splitlines()]
    last_step = next(int(event["timeMs"]) / 1000 for event in events if event["type"] == "LastStep")
    # Its end is known a little late, when the snapshot may exist already. The last step is left out: all steps are alike.
    return losses, (peak_of_ranks(probe, last_step - seconds[-1]), peak_of_ranks(probe)), len(probe.peaks())


def peer_peak(work, kind):
    with PeakPss("spawn_main") as probe, work.peer(kind) as peer:
        losses, _ = peer.train(STEPS)
    return losses, peak_of_ranks(probe), peer.version


def peak_of_ranks(probe, until=float("inf")):
    """The most that all ranks, the largest of the processes, had together, per rank."""
    peaks = probe.peaks(until)
    ranks = sorted(peaks, key=peaks.get)[-RANKS:]
    if len(ranks) < RANKS or len(probe.samples) < 10 * RANKS:
        raise SystemExit(f"C3: {len(ranks)} processes in {len(probe.samples)} samples: too few to speak of a peak")
    return probe.peak_together(ranks, until) / RANKS


def run(case, pairs):
    samples, worst = {"ours": [], "ours_with_checkpoint": [], **{kind: [] for kind in PEERS}}, 0.0
    with tempfile.TemporaryDirectory() as folder:
        work = Workload(case, STEPS, folder)
        for pair in range(pairs):
            our_losses, peak, with_checkpoint = our_peaks(work, f"pair-{pair}")
            samples["ours"].append(peak)
            samples["ours_with_checkpoint"].append(with_checkpoint)
            for kind in PEERS:
                losses, peak, version = peer_peak(work, kind)
                worst = max(worst, work.verify(our_losses, losses, kind))
                samples[kind].append(peak)
            progress(f"C3 {case}: pair {pair + 1} of {pairs}: " + ", ".join(f"{k} {v[-1] / 2**20:.0f} MiB" for k, v in samples.items()))
    ratios = {kind: [a / b for a, b in zip(samples["ours"], samples[kind])] for kind in PEERS}
    mib = {side: round(statistics.median(values) / 2**20, 1) for side, values in samples.items()}
    ratio = statistics.median(ratios["ddp"])
    return {
        "case": case, "metric": "peak proportional set size of a rank while training, 2 ranks", "unit": "MiB",
        "ours": mib["ours"], "peer": mib["ddp"], "peer_name": f"{PEERS['ddp']} over gloo, {version}", "ratio": round(ratio, 3), "ours_with_checkpoint": mib["ours_with_checkpoint"],
        "goal": f"<= {GOAL}", "pass": ratio <= GOAL,
        "peers": {kind: {"name": PEERS[kind], "mib": mib[kind], "ratio": round(statistics.median(ratios[kind]), 3)} for kind in PEERS},
        "samples": {side: [round(x / 2**20, 1) for x in values] for side, values in samples.items()},
        "ratios": [round(r, 3) for r in ratios["ddp"]], "min": round(min(ratios["ddp"]), 3), "max": round(max(ratios["ddp"]), 3),
        "verified": f"losses of {STEPS} steps differ by at most {worst:.1e}"}


def cases(arguments):
    pairs = min(arguments.pairs, 2)  # it hardly varies
    for case in ("34m", "134m", "302m"):
        if case in (arguments.case or ["34m", "134m"]):
            yield lambda case=case: run(case, pairs)
