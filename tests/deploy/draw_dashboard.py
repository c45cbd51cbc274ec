#!/usr/bin/env python3
"""Draws the Grafana dashboard of deploy/monitoring as SVG, from a recording that a Prometheus on loopback serves.

    RAVEL_PROMTOOL=$(tests/deploy/promtool.sh | tail -1) tests/deploy/draw_dashboard.py >deploy/monitoring/dashboard.svg

It is not Grafana's picture: places, titles, units, legends and numbers are the dashboard's, the drawing is this script's. The
range ends with the last moment at which the job runs, so that panels which show the newest value have one.
"""
import argparse
import math
import pathlib
import sys
import time
from xml.sax.saxutils import escape

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import dashboard  # noqa: E402
import recording  # noqa: E402

RECORDING = pathlib.Path(__file__).parent / "recording.txt.gz"
WIDTH, CELL, GAP, HEAD = 1440, 34, 8, 34
COLUMN = (WIDTH - GAP) / 24
INK, FAINT, GRID, PAGE, RED = "#24292f", "#6e7781", "#e6e8eb", "#f4f5f7", "#c4162a"
# Grafana's classic palette.
COLOURS = ["#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0", "#508642", "#cca300",
           "#447ebc", "#c15c17"]


def number(value, unit):
    """A value with its unit, short."""
    if unit == "percentunit":
        return f"{100 * value:.3g}%"
    if unit == "bytes":
        for word in ("B", "KiB", "MiB", "GiB"):
            if abs(value) < 1024 or word == "GiB":
                return f"{value:.3g} {word}"
            value /= 1024
    if unit == "s":
        for limit, factor, word in ((1e-3, 1e6, "µs"), (1, 1e3, "ms"), (60, 1, "s"), (3600, 1 / 60, "min")):
            if abs(value) < limit:
                return f"{value * factor:.3g} {word}" if value else "0 s"
        return f"{value / 3600:.3g} h"
    text = f"{value / 1000:.3g}k" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{text} req/s" if unit == "reqps" else text


def ticks(low, high, unit, wanted=4):
    """Round values from low to high."""
    rough = (high - low) / wanted
    if unit == "bytes" and rough > 1:
        step = 2.0 ** math.ceil(math.log2(rough))
        return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def text(x, y, words, size=11, fill=INK, anchor="start", weight=""):
    anchor = f' text-anchor="{anchor}"' if anchor != "start" else ""
    weight = f' font-weight="{weight}"' if weight else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}"{anchor}{weight}>{escape(words)}</text>'


def box(x, y, width, height, fill, stroke=""):
    stroke = f' stroke="{stroke}"' if stroke else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{stroke}/>'


def rule(x1, y1, x2, y2, stroke, dash=""):
    dash = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{dash}/>'


def path_of(points):
    """Points as SVG path data, without those in the middle of a level stretch."""
    kept = [point for i, point in enumerate(points)
            if i in (0, len(points) - 1) or not points[i - 1][1] == point[1] == points[i + 1][1]]
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in kept)


def runs(points, step):
    """Points between gaps: a series that was away is not drawn through."""
    found = []
    for point in points:
        if math.isfinite(point[1]):
            if not found or point[0] - found[-1][-1][0] > 1.5 * step:
                found.append([])
            found[-1].append(point)
    return found


class Picture:
    def __init__(self, board, kept, begin, end, step):
        self.board, self.kept, self.begin, self.end, self.step = board, kept, begin, end, step
        self.parts = []
        # Scrapes at which something was done to the cluster.
        self.marks = [(kept.time_of(scrape), what) for scrape, what in kept.events if what.startswith(("kill", "worker"))]

    def place(self, panel):
        grid = panel["gridPos"]
        return (GAP + grid["x"] * COLUMN, HEAD + GAP + grid["y"] * CELL,
                grid["w"] * COLUMN - GAP, grid["h"] * CELL - GAP)

    def draw(self, answers, variables):
        rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in self.board["panels"])
        height = HEAD + GAP + rows * CELL
        self.parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
                      'font-family="system-ui, sans-serif">', box(0, 0, WIDTH, height, PAGE)]
        shown = [time.strftime("%H:%M:%S", time.gmtime(at)) for at in (self.begin, self.end)]
        events = "; ".join(f"{time.strftime('%H:%M:%S', time.gmtime(at))} {what}" for at, what in self.marks)
        self.parts += [text(GAP + 4, 24, self.board["title"], 17, weight="600"),
                       text(90, 24, f"{shown[0]} to {shown[1]} UTC. {events}.", 12, FAINT),
                       text(WIDTH - GAP, 24, "drawn from recorded data by tests/deploy/draw_dashboard.py, not by Grafana",
                            12, FAINT, "end")]
        for panel in self.board["panels"]:
            title = dashboard.expand(panel["title"], variables)
            if panel["type"] == "row":
                x, y, _, h = self.place(panel)
                self.parts.append(text(x + 2, y + h - 5, "▾ " + title, 14, weight="600"))
                continue
            self.frame(panel, title)
            getattr(self, panel["type"])(panel, answers[panel["id"]])
        return "\n".join(self.parts + ["</svg>"]) + "\n"

    def frame(self, panel, title):
        x, y, width, height = self.place(panel)
        self.parts += [box(x, y, width, height, "#ffffff", "#dcdee1"), text(x + 8, y + 17, title, 12, weight="600")]

    def nothing(self, panel):
        x, y, width, height = self.place(panel)
        self.parts.append(text(x + width / 2, y + height / 2 + 6, "No data", 12, FAINT, "middle"))

    def stat(self, panel, lines):
        x, y, width, height = self.place(panel)
        if not lines:
            self.nothing(panel)
            return
        unit = panel["fieldConfig"]["defaults"]["unit"]
        named = panel["options"].get("textMode") == "name"
        shown = [line.legend if named else number(line.points[-1][1], unit) for line in lines]
        for i, words in enumerate(shown):
            middle = y + 16 + (height - 16) * (i + 1) / (len(shown) + 1)
            self.parts.append(text(x + width / 2, middle + 12, words, 30 if len(words) < 9 else 24, "#37872d", "middle", "600"))

    def table(self, panel, lines):
        x, y, width, _ = self.place(panel)
        hidden = set()
        for transformation in panel.get("transformations", []):
            hidden |= set(transformation["options"].get("excludeByName", {}))
        columns = sorted({label for line in lines for label in line.labels} - hidden)
        for c, column in enumerate(columns):
            at = x + 10 + c * (width - 20) / len(columns)
            self.parts.append(text(at, y + 40, column, 12, "#1f60c4", weight="600"))
            for r, line in enumerate(lines):
                self.parts.append(text(at, y + 62 + 20 * r, line.labels.get(column, ""), 12))
        for r in range(len(lines)):
            self.parts.append(rule(x + 8, y + 47 + 20 * r, x + width - 8, y + 47 + 20 * r, GRID))

    def timeseries(self, panel, lines):
        lines = [line for line in lines if any(math.isfinite(value) for _, value in line.points)]
        if not lines:
            self.nothing(panel)
            return
        custom = panel["fieldConfig"]["defaults"].get("custom", {})
        stacked = custom.get("stacking", {}).get("mode") == "normal"
        if stacked:
            lines = [line for line in lines if any(value for _, value in line.points)] or lines[:1]
        layers = self.stack(lines) if stacked else [[(t, 0, value) for t, value in line.points] for line in lines]
        tops = [edge for layer in layers for _, low, high in layer for edge in ((low, high) if stacked else (high,))
                if math.isfinite(edge)]
        self.axes(panel, min(tops), max(tops), stacked)
        for i, layer in enumerate(layers):
            colour = COLOURS[i % len(COLOURS)]
            if stacked:
                self.area(layer, colour)
            else:
                for run in runs([(t, high) for t, _, high in layer], self.step):
                    data = path_of([(self.x_of(t), self.y_of(v)) for t, v in run])
                    self.parts.append(f'<path d="{data}" fill="none" stroke="{colour}" stroke-width="1.4"/>')
        self.legend(panel, [line.legend for line in lines])

    @staticmethod
    def stack(lines):
        """(time, low, high) of each line on top of those before it; values below zero pile up downwards."""
        above, below, layers = {}, {}, []
        for line in lines:
            layer = []
            for t, value in line.points:
                sums = above if value >= 0 else below
                low = sums.get(t, 0.0)
                sums[t] = low + value
                layer.append((t, low, low + value))
            layers.append(layer)
        return layers

    def area(self, layer, colour):
        for run in runs([(t, high, low) for t, low, high in layer], self.step):
            upper = [(self.x_of(t), self.y_of(high)) for t, high, _ in run]
            lower = [(self.x_of(t), self.y_of(low)) for t, _, low in reversed(run)]
            data = path_of(upper) + path_of(lower).replace("M", "L", 1) + "Z"
            self.parts.append(f'<path d="{data}" fill="{colour}" fill-opacity=".6"/>')

    def axes(self, panel, low, high, from_zero):
        x, y, width, height = self.place(panel)
        low, high = (min(low, 0), max(high, 0)) if from_zero or 0 <= low <= 0.5 * high or low == high else (low, high)
        if high - low < 1e-12:
            high = low + (abs(low) or 1)
        high += 0.05 * (high - low)
        left, right, top, bottom = x + 58, x + width - 12, y + 28, y + height - 40
        self.x_of = lambda t: left + (right - left) * (t - self.begin) / (self.end - self.begin)
        self.y_of = lambda v: bottom - (bottom - top) * (v - low) / (high - low)
        unit = panel["fieldConfig"]["defaults"]["unit"]
        for value in ticks(low, high, unit):
            at = self.y_of(value)
            self.parts += [rule(left, at, right, at, GRID), text(left - 5, at + 4, number(value, unit), 10, FAINT, "end")]
        step = 60 if width > 220 else 120
        first = math.ceil(self.begin / step) * step
        for at in range(first, int(self.end) + 1, step):
            self.parts += [rule(self.x_of(at), top, self.x_of(at), bottom, GRID),
                           text(self.x_of(at), bottom + 13, time.strftime("%H:%M", time.gmtime(at)), 10, FAINT, "middle")]
        for at, _ in self.marks:
            self.parts.append(rule(self.x_of(at), top, self.x_of(at), bottom, RED, "3 3"))

    def legend(self, panel, names):
        x, y, width, height = self.place(panel)
        at, names = x + 10, list(enumerate(names))
        for i, name in names:
            needed = 20 + 6 * len(name)
            if at + needed > x + width - (24 if i + 1 < len(names) else 0):
                self.parts.append(text(at, y + height - 9, f"+{len(names) - i}", 10, FAINT))
                return
            self.parts += [box(at, y + height - 14, 9, 3, COLOURS[i % len(COLOURS)]),
                           text(at + 13, y + height - 9, name, 10)]
            at += needed


def picture(board, kept, server):
    running = kept.values("ravel_job_state", 'state="RUNNING"')
    begin, end = kept.begin, running[-1][0]
    step = max(1, (end - begin) // 150)
    variables = dashboard.variables_of(board, server, begin, end)
    answers = {panel["id"]: [line for target in panel["targets"]
                             for line in dashboard.answer(server, target, variables, begin, end, step)]
               for panel in dashboard.panels(board)}
    return Picture(board, kept, begin, end, step).draw(answers, variables)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--recording", type=pathlib.Path, default=RECORDING)
    arguments = parser.parse_args()
    if recording.programs() is None:
        sys.exit("draw_dashboard.py: promtool and prometheus are not here; RAVEL_PROMTOOL names them")
    kept = recording.read(arguments.recording)
    with recording.Server(kept) as server:
        sys.stdout.write(picture(dashboard.load(), kept, server))


if __name__ == "__main__":
    main()
