"""G8, the AdamW update on CPU threads: cpu_update_speed against PyTorch's fused and foreach AdamW, and against the streams that the
update reads and writes, in one run. Sides take turns; ratios are of pairs."""
import os
import statistics
import sys

import cluster
from gpu_kernel_speed import Server
from harness import BENCH, progress

MILLIONS = 32
HUGE_PAGES = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}  # as ours has them
# Our form, and the peer's that is nearest to it. PyTorch has neither remainders nor fp8 states.
FORMS = {"fp32": "fp32", "fp32-weight": "fp32", "remainder": "fp32", "bf16": "bf16", "bf16-gradient": "bf16", "fp8-bf16": "bf16", "fp8": "bf16"}
GOAL = {"ratio": 1.1, "percent_of_stream": 90}


def run(case, form, threads, ours, peer, pairs):
    left, right = [], {"fused": [], "foreach": []}
    for pair in range(pairs):
        left.append(ours.ask(f"{form} {threads}"))
        for implementation, answers in right.items():
            answers.append(peer.ask(f"{FORMS[form]} {implementation} {threads}"))
        progress(f"G8 {case}: pair {pair + 1} of {pairs}: {left[-1]['ns']} ns, stream {left[-1]['stream_ns']}, "
                 f"fused {right['fused'][-1]['ns']:.3f}, foreach {right['foreach'][-1]['ns']:.3f}")
    ratios = {name: [peer_line["ns"] / line["ns"] for line, peer_line in zip(left, answers)] for name, answers in right.items()}
    ratio = statistics.median(ratios["fused"])
    percent = statistics.median(100 * line["stream_ns"] / line["ns"] for line in left)
    missed = [text for bad, text in ((ratio < GOAL["ratio"], "ratio"), (percent < GOAL["percent_of_stream"], "share of the stream")) if bad]
    median = lambda answers: round(statistics.median(line["ns"] for line in answers), 4)  # noqa: E731
    return {"case": case, "metric": f"AdamW update of {MILLIONS} Mi parameters", "unit": "ns/parameter", "ours": median(left),
            "peer": median(right["fused"]), "peer_name": f"torch {right['fused'][0]['version']} fused AdamW, {FORMS[form]}",
            "foreach": median(right["foreach"]), "ratio": round(ratio, 2), "ratio_foreach": round(statistics.median(ratios["foreach"]), 2),
            "min": round(min(ratios["fused"]), 2), "max": round(max(ratios["fused"]), 2), "bytes_per_parameter": left[0]["bytes"],
            "stream_ns": round(statistics.median(line["stream_ns"] for line in left), 4), "percent_of_roof": round(percent, 1),
            "goal": f">= {GOAL['ratio']} of fused, >= {GOAL['percent_of_stream']} % of the stream", "pass": not missed, "missed": missed,
            "samples": {"ours": left, **{name: [round(line["ns"], 4) for line in answers] for name, answers in right.items()}},
            "verified": "bits against the plain loops; PyTorch's against the formula", "caps": {"threads": threads}}


def cases(arguments):
    path = cluster.default_binaries() / "cpu_update_speed"
    if not path.exists():
        sys.exit(f"{path} is missing: build the target cpu_update_speed")
    for form in FORMS:
        for threads in (1, 2):
            case = f"{form}-{threads}"
            if arguments.case and case not in arguments.case:
                continue

            def measured(case=case, form=form, threads=threads):
                peer_command = [sys.executable, BENCH / "peers/torch_cpu_adamw.py", MILLIONS]
                with Server("ours", [path, MILLIONS]) as ours, Server("PyTorch", peer_command, HUGE_PAGES) as peer:
                    return run(case, form, threads, ours, peer, arguments.pairs)
            yield measured
