#!/usr/bin/env python3
"""Draws a job's loss curve as SVG from its metrics: the loss of each step, and where the number of workers changed.

    ravelctl metrics JOB -o jsonl | tests/bench/loss_curve.py --title TEXT [--entropy NATS] > curve.svg
"""
import argparse
import json
import sys
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 56, 20, 44, 44
INK, FAINT, LINE, EVENT = "#24292f", "#d0d7de", "#0969da", "#cf222e"


def ticks(low, high, wanted=6):
    """Round values from low to high."""
    step = 1
    for step in (f * 10.0 ** e for e in range(-3, 7) for f in (1, 2, 5)):
        if (high - low) / step <= wanted:
            break
    first = int(low / step + (0 if low % step == 0 else 1))
    return [round(i * step, 6) for i in range(first, int(high / step) + 1)]


def text(x, y, words, anchor="middle", size=12, fill=INK):
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}" '
            f'font-family="system-ui, sans-serif">{escape(str(words))}</text>')


def line(x1, y1, x2, y2, stroke, dash=""):
    dash = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{dash}/>'


def draw(rows, title, entropy):
    steps = [row["step"] for row in rows]
    losses = [row["loss"] for row in rows]
    values = losses + ([entropy] if entropy else [])
    low, high = min(values), max(values)
    low, high = low - 0.05 * (high - low), high + 0.05 * (high - low)

    def x_of(step):
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - steps[0]) / max(1, steps[-1] - steps[0])

    def y_of(loss):
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>', text(LEFT, 24, title, "start", 15)]
    for value in ticks(low, high):
        parts += [line(LEFT, y_of(value), WIDTH - RIGHT, y_of(value), FAINT), text(LEFT - 8, y_of(value) + 4, f"{value:g}", "end")]
    for value in ticks(steps[0], steps[-1], 8):
        parts.append(text(x_of(value), HEIGHT - BOTTOM + 18, f"{value:g}"))
    parts += [text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "step"), text(LEFT - 8, TOP - 8, "loss", "end")]
    if entropy:
        parts += [line(LEFT, y_of(entropy), WIDTH - RIGHT, y_of(entropy), INK, "6 4"),
                  text(WIDTH - RIGHT, y_of(entropy) - 6, f"unigram entropy {entropy:.2f}", "end")]
    for before, after in zip(rows, rows[1:]):
        if before["world_size"] != after["world_size"]:
            x = x_of(after["step"])
            parts += [line(x, TOP, x, HEIGHT - BOTTOM, EVENT, "3 3"),
                      text(x + 6, TOP + 14, f'{before["world_size"]} → {after["world_size"]} workers', "start", 12, EVENT)]
    points = " ".join(f"{x_of(step):.1f},{y_of(loss):.1f}" for step, loss in zip(steps, losses))
    parts += [f'<polyline points="{points}" fill="none" stroke="{LINE}" stroke-width="1.8"/>', "</svg>"]
    return "\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--title", required=True)
    parser.add_argument("--entropy", type=float, default=0)
    arguments = parser.parse_args()
    rows = [json.loads(row) for row in sys.stdin if row.strip()]
    if len(rows) < 2:
        sys.exit("loss_curve.py: fewer than two steps on standard input")
    sys.stdout.write(draw(rows, arguments.title, arguments.entropy))


if __name__ == "__main__":
    main()
