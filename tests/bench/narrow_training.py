"""C5: a training step with bf16 weights, remainders and bf16 moments, 2 ranks with one thread each, against PyTorch's DDP with
weights, gradients and moments in bf16, which keeps no more than these: tokens per second in turns, and the peak of memory per rank
(training_memory.py says how that is measured)."""
import contextlib
import statistics
import tempfile

import cluster
from harness import CAPS, THREADS
from memory_probe import PeakPss
from quiet_turns import Measurement, step_flops
from training_memory import peak_of_ranks
from training_speed import ANY_ISA
from workload import RANKS, VERIFIED_STEPS, Turns, Workload

OPTIMIZER, PRECISION = ", mainWeights: bf16_remainder, stateDtype: bf16", "compute: bf16"
TOLERANCE = 2e-2  # of losses: the peer rounds its weights, too
TURN_STEPS = {"34m": 1, "9m": 4, "tiny": 20}
GOAL = {"ratio": 1.3, "memory": 0.4}
# What both sides may use, by the end of a case's name. PyTorch has no fast gemm of bf16 for AVX2 alone, so that a case held to it says
# little of ours; AVX512_CORE is the most that the processor has for fp32, and the peer's gemms widen bf16 for it as ours do.
AVX512 = "-avx512"
INSTRUCTIONS = {"": CAPS, AVX512: {**THREADS, "RAVEL_CPU_ISA": "avx512", "ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
                                   "MKL_ENABLE_INSTRUCTIONS": "AVX512"}, ANY_ISA: THREADS}
NAMES = {"": "", AVX512: ", AVX-512 without bf16", ANY_ISA: ", any instruction set"}
DEFAULT_CASES = ["34m" + AVX512, "9m", "9m" + AVX512, "34m" + ANY_ISA]


def measure(work, pairs, attempts, turn_steps, environment):
    """(turns, MiB per rank and side). Turns until `pairs` of them were quiet, or `attempts` were made. All processes stay, as in C1."""
    result = Measurement(("ours", "bf16"))
    with contextlib.ExitStack() as stack:
        probes = {"ours": stack.enter_context(PeakPss("ravel-trainer --socket")), "bf16": stack.enter_context(PeakPss("spawn_main"))}
        peer = stack.enter_context(work.peer("bf16", environment))
        peer_losses = peer.train(VERIFIED_STEPS)[0]  # first, as its start takes long, and our trainers wait for no turn so long
        ravel = stack.enter_context(cluster.Cluster(work.folder / "cluster", RANKS, environment={**environment, **Turns.ENVIRONMENT},
                                                    pin_cores=True, detection=Turns.DETECTION))
        sides = {"ours": stack.enter_context(work.ours_in_turns(ravel, "ours")), "bf16": peer}
        result.worst = work.verify(sides["ours"].train(VERIFIED_STEPS)[0], peer_losses, "bf16")
        result.version = peer.version
        result.take_pairs(f"C5 {work.case}", sides, work.tokens_per_step, turn_steps, ("bf16",), pairs, attempts)
        return result, {side: peak_of_ranks(probe) / 2**20 for side, probe in probes.items()}


def run(case, pairs, attempts, turn_steps, suffix):
    """One case. Both sides are held to the instructions that its suffix names, and there is no goal where these are the processor's own
    for bf16 (AVX512_BF16, AMX): they round sums in another order than exact mode asks for, and ours uses none."""
    environment, goal = INSTRUCTIONS[suffix], suffix != ANY_ISA
    with tempfile.TemporaryDirectory() as folder:
        work = Workload(case, VERIFIED_STEPS + attempts * turn_steps + 1, folder, OPTIMIZER, PRECISION, TOLERANCE)
        result, peaks = measure(work, pairs, attempts, turn_steps, environment)
    judged, ratios = result.judged("ours", "bf16"), result.ratios("bf16")
    ratio, memory = statistics.median(ratios), peaks["ours"] / peaks["bf16"]
    middle = {side: round(statistics.median(result.rates(side, judged)), 1) for side in result.turns}
    flops = step_flops(work.shape) / work.tokens_per_step
    # The roof is that of 256-bit registers.
    roofs = {"percent_of_roof": {side: round(result.percent(side, flops), 1) for side in result.turns}} if suffix == "" else {}
    return {"case": case + suffix, "metric": "training step in bf16 with remainders and bf16 moments, 2 ranks x 1 thread" + NAMES[suffix],
            "unit": "tokens/s", "ours": middle["ours"], "peer": middle["bf16"], "peer_name": f"DDP over gloo, all in bf16, {result.version}",
            "ratio": round(ratio, 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3), "ratios": [round(r, 3) for r in ratios],
            "memory_mib": {side: round(value, 1) for side, value in peaks.items()}, "memory_ratio": round(memory, 3),
            "goal": f">= {GOAL['ratio']}, memory <= {GOAL['memory']}" if goal else "none",
            "pass": not goal or (ratio >= GOAL["ratio"] and memory <= GOAL["memory"]),
            "pairs": len(result.turns["ours"]), "judged": judged, "judged_are": result.judged_are("bf16"), **roofs, **result.kept(),
            "mflop_per_token": round(flops / 1e6, 1), "steps_of_a_turn": turn_steps, "caps": environment,
            "verified": f"first {VERIFIED_STEPS} losses differ by at most {result.worst:.1e}"}


def cases(arguments):
    for case in ("34m", "9m", "tiny"):
        for suffix in INSTRUCTIONS:
            if case + suffix in (arguments.case or DEFAULT_CASES):
                yield lambda case=case, suffix=suffix: run(case, arguments.pairs, max(arguments.pairs, arguments.attempts or 4 * arguments.pairs),
                                                           arguments.steps or TURN_STEPS[case], suffix)
