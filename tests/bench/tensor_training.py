"""C4: a training step of a Llama whose layers two ranks share, one thread each, against PyTorch's parallelize_module over gloo, and
against two ranks of ours that each have the whole model: tokens per second in turns."""
import contextlib
import statistics
import tempfile

import cluster
from harness import CAPS, THREADS
from quiet_turns import Measurement, step_flops
from training_speed import ANY_ISA
from workload import RANKS, VERIFIED_STEPS, Turns, Workload

TURN_STEPS = {"34m": 1, "9m": 4, "tiny": 20}
GOAL = {"ratio": 1.5, "cost": 1.15}  # cost: of sharing layers, in time, beside sharing none


def measure(folder, case, pairs, attempts, turn_steps, environment):
    """Turns until `pairs` of them were quiet for ours and the peer, or `attempts` were made. All processes stay, as in C1."""
    result = Measurement(("ours", "whole", "tensor"))
    steps = VERIFIED_STEPS + attempts * turn_steps + 1
    work = Workload(case, steps, f"{folder}/tensor", tensor=True)
    whole = Workload(case, steps, f"{folder}/whole")
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(work.peer("tensor", environment))
        peer_losses = peer.train(VERIFIED_STEPS)[0]  # first, as its start takes long, and our trainers wait for no turn so long
        trained = {}
        for side, task in (("ours", work), ("whole", whole)):
            ravel = stack.enter_context(cluster.Cluster(task.folder / "cluster", RANKS, environment={**environment, **Turns.ENVIRONMENT},
                                                        pin_cores=True, detection=Turns.DETECTION))
            trained[side] = stack.enter_context(task.ours_in_turns(ravel, side))
        trained["tensor"] = peer
        losses = {side: trained[side].train(VERIFIED_STEPS)[0] for side in ("ours", "whole")}
        result.worst = max(work.verify(losses["ours"], peer_losses, "tensor"), work.verify(losses["ours"], losses["whole"], "whole"))
        result.version = peer.version
        result.take_pairs(f"C4 {case}", trained, work.tokens_per_step, turn_steps, ("tensor",), pairs, attempts)
    return result, step_flops(work.shape) / work.tokens_per_step


def run(case, pairs, attempts, turn_steps, capped=True):
    """One case. `capped`: all sides are held to AVX2 and have the roof of it; else each uses what the processor has. The goal is the same."""
    environment = CAPS if capped else THREADS
    with tempfile.TemporaryDirectory() as folder:
        result, flops = measure(folder, case, pairs, attempts, turn_steps, environment)
    judged, ratios = result.judged("ours", "tensor"), result.ratios("tensor")
    costs = [1 / ratio for ratio in result.ratios("whole")]
    ratio, cost = statistics.median(ratios), statistics.median(costs)
    everything = range(len(result.turns["ours"]))
    middle = {side: round(statistics.median(result.rates(side, judged)), 1) for side in result.turns}
    roofs = {"percent_of_roof": {side: round(result.percent(side, flops), 1) for side in result.turns}} if capped else {}
    return {"case": case if capped else case + ANY_ISA,
            "metric": "training step, layers shared by 2 ranks x 1 thread" + ("" if capped else ", any instruction set"), "unit": "tokens/s",
            "ours": middle["ours"], "peer": middle["tensor"], "peer_name": f"parallelize_module and loss_parallel over gloo, {result.version}",
            "ratio": round(ratio, 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3), "ratios": [round(r, 3) for r in ratios],
            "whole": middle["whole"], "cost": round(cost, 3), "costs": [round(c, 3) for c in costs],
            "goal": f">= {GOAL['ratio']}, cost beside whole models <= {GOAL['cost']}",
            "pass": ratio >= GOAL["ratio"] and cost <= GOAL["cost"],
            "pairs": len(everything), "judged": judged, "judged_are": result.judged_are("tensor"),
            "ratio_of_all_pairs": round(statistics.median(result.ratios("tensor", everything)), 3),
            **roofs, **result.kept(), "mflop_per_token": round(flops / 1e6, 1), "steps_of_a_turn": turn_steps,
            "caps": environment, "verified": f"first {VERIFIED_STEPS} losses differ by at most {result.worst:.1e}"}


def cases(arguments):
    for case in ("34m", "9m", "tiny"):
        for suffix in ("", ANY_ISA):
            if case + suffix in (arguments.case or ["34m", "9m", "34m" + ANY_ISA]):
                yield lambda case=case, capped=not suffix: run(case, arguments.pairs, max(arguments.pairs, arguments.attempts or 4 * arguments.pairs),
                                                               arguments.steps or TURN_STEPS[case], capped)
