"""C5: a training step with bf16 weights, remainders and bf16 moments, 2 ranks with one thread each, against PyTorch's DDP with
weights, gradients and moments in bf16, which keeps no more than these: tokens per second in turns, and the peak of memory per rank
(training_memory.py says how that is measured)."""
import contextlib
import statistics
import tempfile

import cluster
from harness import THREADS, progress
from memory_probe import PeakPss
from training_memory import peak_of_ranks
from workload import RANKS, VERIFIED_STEPS, Turns, Workload

OPTIMIZER, PRECISION = ", mainWeights: bf16_remainder, stateDtype: bf16", "compute: bf16"
TOLERANCE = 2e-2  # of losses: the peer rounds its weights, too
TURN_STEPS = {"34m": 2, "9m": 5, "tiny": 20}
GOAL = {"ratio": 1.3, "memory": 0.4}


def run(case, pairs, turn_steps):
    rates, peaks = {"ours": [], "bf16": []}, {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        work = Workload(case, VERIFIED_STEPS + pairs * turn_steps + 1, folder, OPTIMIZER, PRECISION, TOLERANCE)
        probes = {"ours": stack.enter_context(PeakPss("ravel-trainer --socket")), "bf16": stack.enter_context(PeakPss("spawn_main"))}
        peer = stack.enter_context(work.peer("bf16", THREADS))
        losses = {"bf16": peer.train(VERIFIED_STEPS)[0]}  # first, as its start takes long, and our trainers wait for no turn so long
        ravel = stack.enter_context(cluster.Cluster(work.folder / "cluster", RANKS, environment={**THREADS, **Turns.ENVIRONMENT},
                                                    pin_cores=True, detection=Turns.DETECTION))
        sides = {"ours": stack.enter_context(work.ours_in_turns(ravel, "ours")), "bf16": peer}
        losses["ours"] = sides["ours"].train(VERIFIED_STEPS)[0]
        worst = work.verify(losses["ours"], losses["bf16"], "bf16")
        for pair in range(pairs):
            for side, trained in sides.items():
                rates[side].append(work.tokens_per_step / statistics.median(trained.train(turn_steps)[1]))
            progress(f"C5 {case}: pair {pair + 1} of {pairs}: " + ", ".join(f"{side} {values[-1]:.1f}" for side, values in rates.items()))
        peaks = {side: peak_of_ranks(probe) / 2**20 for side, probe in probes.items()}
        version = peer.version
    ratios = [ours / peer for ours, peer in zip(rates["ours"], rates["bf16"])]
    ratio, memory = statistics.median(ratios), peaks["ours"] / peaks["bf16"]
    middle = {side: round(statistics.median(values), 1) for side, values in rates.items()}
    return {"case": case, "metric": "training step in bf16 with remainders and bf16 moments, 2 ranks x 1 thread", "unit": "tokens/s",
            "ours": middle["ours"], "peer": middle["bf16"], "peer_name": f"DDP over gloo, all in bf16, {version}",
            "ratio": round(ratio, 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3), "ratios": [round(r, 3) for r in ratios],
            "memory_mib": {side: round(value, 1) for side, value in peaks.items()}, "memory_ratio": round(memory, 3),
            "goal": f">= {GOAL['ratio']}, memory <= {GOAL['memory']}", "pass": ratio >= GOAL["ratio"] and memory <= GOAL["memory"],
            "samples": {side: [round(rate, 1) for rate in values] for side, values in rates.items()}, "steps_of_a_turn": turn_steps,
            "caps": THREADS, "verified": f"first {VERIFIED_STEPS} losses differ by at most {worst:.1e}"}


def cases(arguments):
    for case in ("34m", "9m", "tiny"):
        if case in (arguments.case or ["34m", "9m"]):
            yield lambda case=case: run(case, arguments.pairs, arguments.steps or TURN_STEPS[case])
