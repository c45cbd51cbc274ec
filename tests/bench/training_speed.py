"""C1: tokens per second of a training step, 2 ranks with one thread each, against the better of PyTorch's DDP and FSDP2."""
import contextlib
import statistics
import tempfile

import cluster
from harness import CAPS, THREADS
from quiet_turns import Measurement, step_flops
from workload import RANKS, VERIFIED_STEPS, Turns, Workload

TURN_STEPS = {"34m": 1, "9m": 10, "tiny": 20}  # one to two seconds
ANY_ISA = "-any-isa"  # of a case: a second line, with both sides' instruction sets unrestricted
PEERS = {"ddp": "DDP", "fsdp2": "FSDP2 (fully_shard)"}
GOALS = {"34m": {"ratio": 1.25, "roof": 80, "stretch": 1.4}, "9m": {"ratio": 1.6, "roof": 70, "stretch": 2.0}}


def measure(work, pairs, attempts, turn_steps, environment):
    """Turns until each peer has `pairs` quiet pairs with ours, or `attempts` pairs were made. All processes stay, and stand still
    while it is not their turn: whoever else uses the machine changes within seconds, so turns must be short and close together."""
    result = Measurement(("ours", *PEERS))
    with contextlib.ExitStack() as stack:
        ravel = stack.enter_context(cluster.Cluster(work.folder / "cluster", RANKS, environment={**environment, **Turns.ENVIRONMENT},
                                                    pin_cores=True, detection=Turns.DETECTION))
        sides = {"ours": stack.enter_context(work.ours_in_turns(ravel, "ours")),
                 **{kind: stack.enter_context(work.peer(kind, environment)) for kind in PEERS}}
        first_losses = {side: trained.train(VERIFIED_STEPS)[0] for side, trained in sides.items()}
        result.worst = max(work.verify(first_losses["ours"], first_losses[kind], kind) for kind in PEERS)
        result.version = sides["ddp"].version
        result.take_pairs(f"C1 {work.case}", sides, work.tokens_per_step, turn_steps, PEERS, pairs, attempts)
    return result


def run(case, pairs, attempts, turn_steps, capped=True):
    """One case. `capped`: both sides are held to AVX2 and have the roof of it; else each uses what the processor has, and there is no
    goal and no roof."""
    with tempfile.TemporaryDirectory() as folder:
        work = Workload(case, VERIFIED_STEPS + attempts * turn_steps + 1, folder)
        result = measure(work, pairs, attempts, turn_steps, CAPS if capped else THREADS)
    better = min(PEERS, key=lambda kind: statistics.median(result.ratios(kind)))
    judged, ratios = result.judged("ours", better), result.ratios(better)
    ratio = statistics.median(ratios)
    flops = step_flops(work.shape) / work.tokens_per_step
    percent = {side: round(result.percent(side, flops), 1) for side in result.turns}
    middle = {side: round(statistics.median(result.rates(side, judged)), 1) for side in result.turns}
    everything = range(len(result.turns["ours"]))
    goal = GOALS.get(case, {"ratio": 1.0, "roof": 0, "stretch": 1.0})
    line = {
        "case": case, "metric": "training step, 2 ranks x 1 thread", "unit": "tokens/s",
        "ours": middle["ours"], "peer": middle[better], "peer_name": f"{PEERS[better]} over gloo, {result.version}",
        "ratio": round(ratio, 3), "goal": f">= {goal['ratio']} and >= {goal['roof']} % of the roof", "stretch": goal["stretch"],
        "pass": ratio >= goal["ratio"] and percent["ours"] >= goal["roof"],
        "peers": {kind: {"name": PEERS[kind], "tokens_per_second": middle[kind], "ratio": round(statistics.median(result.ratios(kind)), 3),
                         "percent_of_roof": percent[kind]} for kind in PEERS},
        "percent_of_roof": percent["ours"], "roof_judged": result.judged("ours"),
        "roof_gflops": round(statistics.median(result.turns["ours"][i]["roof"] for i in result.judged("ours")), 1),
        "mflop_per_token": round(flops / 1e6, 1), "steps_of_a_turn": turn_steps,
        "pairs": len(everything), "judged": judged, "judged_are": result.judged_are(better),
        "ratio_of_all_pairs": round(statistics.median(result.ratios(better, everything)), 3),
        **result.kept(),
        "ratios": [round(r, 3) for r in ratios], "min": round(min(ratios), 3), "max": round(max(ratios), 3),
        "verified": f"first {VERIFIED_STEPS} losses differ by at most {result.worst:.1e}"}
    return line if capped else uncapped(line)


def uncapped(line):
    """The line without what was measured with 256-bit registers, and without a bar."""
    roofs = ("percent_of_roof", "roof_judged", "roof_gflops", "stretch")
    peers = {kind: {key: value for key, value in peer.items() if key not in roofs} for kind, peer in line["peers"].items()}
    return {**{key: value for key, value in line.items() if key not in roofs}, "peers": peers, "case": line["case"] + ANY_ISA,
            "metric": line["metric"] + ", any instruction set", "goal": "none", "pass": True,
            "caps": THREADS}


def cases(arguments):
    for case in ("34m", "9m", "tiny"):
        for suffix in ("", ANY_ISA):
            if case + suffix in (arguments.case or ["34m", "9m", "34m" + ANY_ISA, "9m" + ANY_ISA]):
                yield lambda case=case, capped=not suffix: run(case, arguments.pairs, max(arguments.pairs, arguments.attempts or 4 * arguments.pairs),
                                                               arguments.steps or TURN_STEPS[case], capped)
