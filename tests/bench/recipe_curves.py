#!/usr/bin/env python3
"""Losses of every recipe beside bf16, or of every type of moments beside fp32: the same model, data and seed on one CPU worker, one
job after the other, on a real text. Prints a JSON line per job and draws all curves as SVG. Needs built programs (RAVEL_BIN_DIR or a
usual build) and a tokenised text.

    deploy/quickstart.sh --steps 20                          # makes build/quickstart/bible/tokens-2048
    python3 tests/bench/recipe_curves.py --tokens build/quickstart/bible/tokens-2048 > curves.jsonl
    python3 tests/bench/recipe_curves.py --draw curves.jsonl --svg curves.svg
    python3 tests/bench/recipe_curves.py --states --steps 1000 --tokens build/quickstart/bible/tokens-2048 > states.jsonl

A bound that is passed makes the exit code 1. `--only` leaves some out; what the others are compared with is always there.
"""
import argparse
import json
import pathlib
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "testing"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import cluster  # noqa: E402
import loss_curve  # noqa: E402
import tiny_job  # noqa: E402

SEQUENCE_TOKENS = 128
# Every recipe takes its matrices: all dimensions are multiples of 128.
MODEL = {"modelType": "llama", "vocabSize": 2048, "hiddenSize": 256, "intermediateSize": 512, "numHiddenLayers": 4,
         "numAttentionHeads": 8, "numKeyValueHeads": 4, "maxPositionEmbeddings": SEQUENCE_TOKENS}
SMALL_MODEL = {**MODEL, "hiddenSize": 128, "intermediateSize": 384, "numHiddenLayers": 2, "numAttentionHeads": 4, "numKeyValueHeads": 2}
# Of each table the first is what the others are compared with.
RECIPES = {"bf16": {},
           "fp8_tensor delayed": {"recipe": "fp8_tensor", "scaling": "delayed"},
           "fp8_tensor current": {"recipe": "fp8_tensor", "scaling": "current"},
           "fp8_block": {"recipe": "fp8_block"},
           "mxfp8": {"recipe": "mxfp8"},
           "nvfp4": {"recipe": "nvfp4"}}
STATES = {"fp32": {}, "bf16": {"stateDtype": "bf16"}, "fp8,bf16": {"stateDtype": "fp8,bf16"}, "fp8": {"stateDtype": "fp8"}}
COLOURS = ["#24292f", "#0969da", "#1a7f37", "#8250df", "#bf8700", "#cf222e"]
# Largest difference of the mean loss of the last LAST steps.
RECIPE_BOUNDS = {"nvfp4": 0.03}
STATE_BOUNDS = {"bf16": 0.005}
LAST = 50


def train(ravel, folder, job_name, arguments, name):
    precision, optimizer = {"compute": "bf16", **RECIPES.get(name, {})}, {}
    if arguments.states:
        precision, optimizer = {"compute": "fp32"}, STATES[name]
    steps = arguments.steps
    job = tiny_job.write_job(
        folder, job_name, "cpu", steps, save_every=steps, model={"config": SMALL_MODEL if arguments.states else MODEL},
        data={"train": [{"path": str(arguments.tokens.resolve())}], "sequenceLength": SEQUENCE_TOKENS},
        training={"steps": steps, "seed": arguments.seed, "globalBatch": 8, "optimizer": {"lr": 3e-3, "weightDecay": 0.1, **optimizer},
                  "schedule": {"kind": "cosine", "warmupSteps": min(30, steps // 2)}},
        precision=precision)
    return ravel.train(job, job_name)


def smooth(losses, width=10):
    """The mean of the last `width` losses at each step."""
    return [statistics.fmean(losses[max(0, i + 1 - width):i + 1]) for i in range(len(losses))]


def draw(curves, title):
    c = loss_curve
    values = [loss for losses in curves.values() for loss in losses]
    low, high = min(values), max(values)
    steps = max(len(losses) for losses in curves.values())

    def x_of(step):
        return c.LEFT + (c.WIDTH - c.LEFT - c.RIGHT) * step / max(1, steps - 1)

    def y_of(loss):
        return c.TOP + (c.HEIGHT - c.TOP - c.BOTTOM) * (high - loss) / (high - low)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{c.WIDTH}" height="{c.HEIGHT}" viewBox="0 0 {c.WIDTH} {c.HEIGHT}">',
             f'<rect width="{c.WIDTH}" height="{c.HEIGHT}" fill="#ffffff"/>', c.text(c.LEFT, 24, title, "start", 15)]
    for value in c.ticks(low, high):
        parts += [c.line(c.LEFT, y_of(value), c.WIDTH - c.RIGHT, y_of(value), c.FAINT),
                  c.text(c.LEFT - 8, y_of(value) + 4, f"{value:g}", "end")]
    for value in c.ticks(0, steps, 8):
        parts.append(c.text(x_of(value), c.HEIGHT - c.BOTTOM + 18, f"{value:g}"))
    parts += [c.text((c.LEFT + c.WIDTH - c.RIGHT) / 2, c.HEIGHT - 8, "step"), c.text(c.LEFT - 8, c.TOP - 8, "loss", "end")]
    for i, (name, losses) in enumerate(curves.items()):
        points = " ".join(f"{x_of(step):.1f},{y_of(loss):.1f}" for step, loss in enumerate(losses))
        parts += [f'<polyline points="{points}" fill="none" stroke="{COLOURS[i]}" stroke-width="1.4"/>',
                  c.text(c.WIDTH - c.RIGHT, c.TOP + 16 + 16 * i, f"{name}: {losses[-1]:.3f}", "end", 12, COLOURS[i])]
    return "\n".join(parts + ["</svg>"]) + "\n"


def compare(arguments, names):
    """Losses by name, and whether one is out of its bound. The first name is what the others are compared with."""
    case, bounds = ("state-loss", STATE_BOUNDS) if arguments.states else ("recipe-loss", RECIPE_BOUNDS)
    key = "states" if arguments.states else "recipe"
    curves, failed, reference = {}, False, None
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        with cluster.Cluster(folder / "cluster", workers=1) as ravel:
            for name in names:
                rows = train(ravel, folder, name.translate(str.maketrans(" _,", "---")), arguments, name)
                curves[name] = losses = [row["loss"] for row in rows]
                end = statistics.fmean(losses[-LAST:])
                reference = reference or end
                relative, bound = end / reference - 1, bounds.get(name, 0.01)
                failed |= abs(relative) > bound
                print(json.dumps({"case": case, key: name, "seed": arguments.seed, "steps": len(losses), "first": losses[0], "last": losses[-1],
                                  "mean_of_last": round(end, 5), f"over_{names[0]}": round(relative, 5), "bound": bound,
                                  "median_step_ms": round(1e3 * statistics.median(row["step_seconds"] for row in rows), 1),
                                  "losses": [round(loss, 4) for loss in losses]}), flush=True)
    return curves, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tokens", type=pathlib.Path, help="PREFIX.bin and .idx with ids below 2048")
    source.add_argument("--draw", type=pathlib.Path, help="lines of an earlier run: nothing is trained")
    parser.add_argument("--states", action="store_true", help="types of moments, of a smaller model in fp32")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1, help="of weights, samples and draws: a difference below that of two seeds says nothing")
    parser.add_argument("--only", help="names, with semicolons: " + "; ".join([*RECIPES, *STATES]))
    parser.add_argument("--svg", type=pathlib.Path)
    arguments = parser.parse_args()
    table = STATES if arguments.states else RECIPES
    wanted = arguments.only.split(";") if arguments.only else list(table)
    if unknown := set(wanted) - set(table):
        parser.error(f"--only: not one of {'; '.join(table)}: {'; '.join(sorted(unknown))}")
    first = next(iter(table))
    if arguments.draw:
        rows = [json.loads(line) for line in arguments.draw.read_text().splitlines()]
        curves, failed = {row.get("recipe") or row["states"]: row["losses"] for row in rows}, False
    else:
        curves, failed = compare(arguments, [first, *(name for name in wanted if name != first)])
    if arguments.svg:
        steps = max(len(losses) for losses in curves.values())
        smoothed = {name: smooth(losses) for name, losses in curves.items()}
        arguments.svg.write_text(draw(smoothed, f"Loss, mean of 10 steps: {next(iter(curves))} and {'states' if arguments.states else 'recipes'}, {steps} steps"))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
