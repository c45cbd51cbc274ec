#!/usr/bin/env python3
"""Prints the lines of result files as one table, the last line of each case:  summary.py [FILE...]   (default: results/*.jsonl)"""
import json
import pathlib
import sys


def main():
    files = [pathlib.Path(name) for name in sys.argv[1:]] or sorted((pathlib.Path(__file__).parent / "results").glob("*.jsonl"))
    last = {}
    for line in (json.loads(text) for file in files for text in file.read_text().splitlines() if text.strip()):
        last[line["id"], line["case"]] = line
    print("| id | case | ours | peer | unit | ratio (min-max) | % of roof | goal | pass | commit |\n|---|---|---|---|---|---|---|---|---|---|")
    for (name, case), line in sorted(last.items()):
        spread = f" ({line['min']}-{line['max']})" if "min" in line else ""
        print(f"| {name} | {case} | {line['ours']} | {line['peer']} ({line.get('peer_name', '')}) | {line['unit']} | {line['ratio']}{spread} | "
              f"{line.get('percent_of_roof', '')} | {line.get('goal', '')} | {'yes' if line['pass'] else 'no'} | {line['commit']} |")


if __name__ == "__main__":
    main()
