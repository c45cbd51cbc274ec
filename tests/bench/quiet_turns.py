"""Turns of several sides on a machine that others use too: which were quiet, by the roof of multiply-adds around them."""
import statistics

from harness import ROOT, output_of, progress
from workload import RANKS

ROOF_SECONDS, DISTURBED, LEAST_PAIRS = 0.5, 0.05, 5


def step_flops(shape):
    """Multiply-adds of one step of all ranks, forward and backward, attention counted to the diagonal, times two."""
    width, tokens = shape["width"], shape["tokens"]
    matrices = shape["layers"] * (4 * width * width + 3 * width * shape["ffn"]) + width * shape["vocabulary"]
    attention = shape["layers"] * tokens * width  # scores and values, half of the square
    return RANKS * shape["sequences"] * tokens * 6 * (matrices + attention)


def roof():
    """(sustained, best): GFLOP/s of multiply-adds on all ranks' cores over ROOF_SECONDS, and in their best milliseconds of those."""
    return tuple(float(word) for word in output_of(ROOT / "build/bench/measured_roof", RANKS, ROOF_SECONDS).split())


class Measurement:
    """Per side one turn after the other: tokens/s, and the roofs before and after it. `worst` and `version` are whoever measures's to set."""

    def __init__(self, sides):
        self.turns = {side: [] for side in sides}
        self.worst, self.version = 0.0, ""

    def take_pair(self, trained, tokens_per_step, steps):
        """One turn of `steps` of each side; `trained`: an object with train(steps) by side."""
        before = roof()
        for side, each in trained.items():
            _, seconds = each.train(steps)
            after = roof()
            self.add(side, tokens_per_step / statistics.median(seconds), before, after)
            before = after

    def take_pairs(self, name, trained, tokens_per_step, steps, peers, pairs, attempts):
        """Turns until each of `peers` has `pairs` quiet pairs with ours, or `attempts` were made. `name`: of the case, for progress."""
        for pair in range(attempts):
            self.take_pair(trained, tokens_per_step, steps)
            quiet = min(len(self.quiet("ours", peer)) for peer in peers)
            progress(f"{name}: pair {pair + 1}: " + ", ".join(f"{side} {turns[-1]['rate']:.1f}" for side, turns in self.turns.items())
                     + f", roof {self.turns['ours'][-1]['roof']:.1f}; quiet so far: {quiet} of {pairs}")
            if quiet >= pairs:
                break

    def add(self, side, tokens_per_second, before, after):
        self.turns[side].append({"rate": tokens_per_second, "roofs": (before, after), "roof": (before[0] + after[0]) / 2})

    def quiet(self, *sides):
        """The pairs whose turns of these sides had the machine to themselves. Whoever else uses its cores takes some of the roof:
        what they sustained before and after these turns was at most DISTURBED below the most they ever did. No other number decides."""
        most = max(sustained for turns in self.turns.values() for turn in turns for sustained, _ in turn["roofs"])
        whole = min(len(self.turns[side]) for side in sides)
        return [i for i in range(whole)
                if all(sustained >= (1 - DISTURBED) * most for side in sides for sustained, _ in self.turns[side][i]["roofs"])]

    def judged(self, *sides):
        """The quiet pairs, or of one side its quiet turns; all, where those are too few."""
        quiet = self.quiet(*sides)
        return quiet if len(quiet) >= LEAST_PAIRS else list(range(len(self.turns["ours"])))

    def rates(self, side, pairs):
        return [self.turns[side][i]["rate"] for i in pairs]

    def ratios(self, kind, pairs=None):
        """Ours over this side's."""
        pairs = self.judged("ours", kind) if pairs is None else pairs
        return [a / b for a, b in zip(self.rates("ours", pairs), self.rates(kind, pairs))]

    def judged_are(self, kind):
        judged = self.judged("ours", kind)
        return "quiet" if len(judged) < len(self.turns["ours"]) or judged == self.quiet("ours", kind) else "all"

    def percent(self, side, flops):
        """Of the sustained roof around a side's turns: of those that were quiet, whether or not the peer's were. `flops`: of a token."""
        turns = [self.turns[side][i] for i in self.judged(side)]
        return statistics.median(100 * turn["rate"] * flops / 1e9 / turn["roof"] for turn in turns)

    def kept(self):
        """What a line keeps of every turn."""
        return {"samples": {side: [round(turn["rate"], 1) for turn in turns] for side, turns in self.turns.items()},
                "roofs": {side: [turn["roofs"] for turn in turns] for side, turns in self.turns.items()}}
