"""C4: a training step of a Llama whose layers two ranks share, one thread each, against PyTorch's parallelize_module over gloo, and
against two ranks of ours that each have the whole model: tokens per second in turns."""
import contextlib
import statistics
import tempfile

import cluster
from harness import CAPS, THREADS, progress
from training_speed import ANY_ISA
from workload import RANKS, VERIFIED_STEPS, Turns, Workload

TURN_STEPS = {"34m": 1, "9m": 4, "tiny": 20}
GOAL = {"ratio": 1.5, "cost": 1.15}  # cost: of sharing layers, in time, beside sharing none


def run(case, pairs, turn_steps, capped=True):
    """One case. `capped`: all sides are held to AVX2; else each uses what the processor has. The goal is the same."""
    environment = CAPS if capped else THREADS
    sides = ("ours", "whole", "tensor")
    rates = {side: [] for side in sides}
    steps = VERIFIED_STEPS + pairs * turn_steps + 1
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        work = Workload(case, steps, f"{folder}/tensor", tensor=True)
        whole = Workload(case, steps, f"{folder}/whole")
        peer = stack.enter_context(work.peer("tensor", environment))
        peer_losses = peer.train(VERIFIED_STEPS)[0]  # first, as its start takes long, and our trainers wait for no turn so long
        trained = {"tensor": peer}
        for side, task in (("ours", work), ("whole", whole)):
            ravel = stack.enter_context(cluster.Cluster(task.folder / "cluster", RANKS, environment={**environment, **Turns.ENVIRONMENT},
                                                        pin_cores=True, detection=Turns.DETECTION))
            trained[side] = stack.enter_context(task.ours_in_turns(ravel, side))
        losses = {side: trained[side].train(VERIFIED_STEPS)[0] for side in ("ours", "whole")}
        worst = max(work.verify(losses["ours"], peer_losses, "tensor"), work.verify(losses["ours"], losses["whole"], "whole"))
        for pair in range(pairs):
            for side in sides:
                rates[side].append(work.tokens_per_step / statistics.median(trained[side].train(turn_steps)[1]))
            progress(f"C4 {case}: pair {pair + 1} of {pairs}: " + ", ".join(f"{side} {values[-1]:.1f}" for side, values in rates.items()))
        version = peer.version
    ratios = [ours / other for ours, other in zip(rates["ours"], rates["tensor"])]
    costs = [other / ours for ours, other in zip(rates["ours"], rates["whole"])]
    ratio, cost = statistics.median(ratios), statistics.median(costs)
    middle = {side: round(statistics.median(values), 1) for side, values in rates.items()}
    return {"case": case if capped else case + ANY_ISA,
            "metric": "training step, layers shared by 2 ranks x 1 thread" + ("" if capped else ", any instruction set"), "unit": "tokens/s",
            "ours": middle["ours"], "peer": middle["tensor"], "peer_name": f"parallelize_module and loss_parallel over gloo, {version}",
            "ratio": round(ratio, 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3), "ratios": [round(r, 3) for r in ratios],
            "whole": middle["whole"], "cost": round(cost, 3), "costs": [round(c, 3) for c in costs],
            "goal": f">= {GOAL['ratio']}, cost beside whole models <= {GOAL['cost']}",
            "pass": ratio >= GOAL["ratio"] and cost <= GOAL["cost"],
            "samples": {side: [round(rate, 1) for rate in values] for side, values in rates.items()}, "steps_of_a_turn": turn_steps,
            "caps": environment, "verified": f"first {VERIFIED_STEPS} losses differ by at most {worst:.1e}"}


def cases(arguments):
    for case in ("34m", "9m", "tiny"):
        for suffix in ("", ANY_ISA):
            if case + suffix in (arguments.case or ["34m", "9m", "34m" + ANY_ISA]):
                yield lambda case=case, capped=not suffix: run(case, arguments.pairs, arguments.steps or TURN_STEPS[case], capped)
