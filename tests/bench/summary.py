#!/usr/bin/env python3
"""Prints the lines of result files as one table, the last line of each case:  summary.py [FILE...]   (default: results/*.jsonl)"""
import json
import pathlib
import sys


def bars(goal):
    """A goal as text: one bar, or the named bars of one run."""
    if isinstance(goal, dict):
        return ", ".join([f"{name} <= {bar}" for name, bar in goal["at_most"].items()] + [f"{name} >= {bar}" for name, bar in goal["at_least"].items()])
    return goal


def row(name, case, line):
    peer = f"{line['peer']} ({line.get('peer_name', '')})" if "peer" in line else ""
    ratio = f"{line['ratio']} ({line['min']}-{line['max']})" if "min" in line else line.get("ratio", "")
    passed = "yes" if line["pass"] else "no" + "".join(f"; {text}" for text in line.get("missed", []))
    return [name, case, line["ours"], peer, line["unit"], ratio, line.get("percent_of_roof", ""), bars(line.get("goal", "")), passed, line["commit"]]


def main():
    files = [pathlib.Path(name) for name in sys.argv[1:]] or sorted((pathlib.Path(__file__).parent / "results").glob("*.jsonl"))
    last = {}
    for line in (json.loads(text) for file in files for text in file.read_text().splitlines() if text.strip()):
        last[line["id"], line["case"]] = line
    print("| id | case | ours | peer | unit | ratio (min-max) | % of roof | goal | pass | commit |\n|---|---|---|---|---|---|---|---|---|---|")
    for (name, case), line in sorted(last.items()):
        print("| " + " | ".join(str(cell) for cell in row(name, case, line)) + " |")


if __name__ == "__main__":
    main()
