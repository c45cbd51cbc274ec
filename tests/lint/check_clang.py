#!/usr/bin/env python3
"""Every source of ours as clang 14 reads it: it must parse, without warnings, and keep to the lock annotations of common/mutex.h.

    check_clang.py BUILD [--seconds N] [FILE...]

BUILD has compile_commands.json and the generated headers. All sources, or those named. With --seconds it stops in time and goes on
where it stopped when it is called again; a source that was found clean is read again when anything of ours has changed since.
Standard library only. Exit code 0 or 1.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
FLAGS = ["-fsyntax-only", "-Wall", "-Wextra", "-Wthread-safety", "-Wno-unknown-warning-option", "-Werror"]


def our_commands(build):
    """{path: its compiler's arguments}, without generated sources and without those of device code."""
    commands = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["directory"], entry["file"]).resolve()
        if path.suffix != ".cc" or path.is_relative_to(build) or not path.is_relative_to(ROOT):
            continue
        words = shlex.split(entry["command"])
        flags = [word for word in words if word.startswith(("-I", "-D", "-std", "-m", "-W", "-f")) and word != "-Werror"]
        systems = [words[i + 1] for i, word in enumerate(words) if word == "-isystem"]
        commands.setdefault(path, flags + [word for system in systems for word in ("-isystem", system)])
    return commands


def newest_change():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "--", "*.cc", "*.h", "*.proto"], cwd=ROOT, capture_output=True, text=True, check=True)
    return max((ROOT / name).stat().st_mtime for name in listed.stdout.split() if (ROOT / name).exists())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    clang = shutil.which("clang++-14") or sys.exit("check_clang.py: no clang++-14 (deploy/install_packages.sh tidy)")
    commands = our_commands(build)
    marks = build / "clang_clean.json"
    changed = newest_change()
    clean = json.loads(marks.read_text()) if marks.exists() else {}
    clean = {path: at for path, at in clean.items() if at > changed}
    wanted = [path.resolve() for path in arguments.files] or [path for path in commands if str(path) not in clean]
    unknown = [str(path) for path in wanted if path not in commands]
    if unknown:
        sys.exit(f"check_clang.py: not in {build}/compile_commands.json: {', '.join(unknown)}")
    end = time.monotonic() + arguments.seconds

    def check(path):
        if time.monotonic() > end:
            return None
        began = time.time()
        run = subprocess.run([clang, *commands[path], *FLAGS, str(path)], cwd=ROOT, capture_output=True, text=True)
        return began, run

    bad, checked = 0, 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, result in zip(wanted, pool.map(check, wanted)):
            if result is None:
                continue
            began, run = result
            checked += 1
            if run.returncode == 0:
                clean[str(path)] = began
            else:
                bad += 1
                print(f"=== {path.relative_to(ROOT)}\n{run.stderr}", flush=True)
    marks.write_text(json.dumps(clean))
    print(f"{checked - bad} of {len(commands)} sources are clean, {bad} are not, {len(wanted) - checked} not reached"
          f"{f', {len(commands) - len(wanted)} known clean' if len(commands) > len(wanted) else ''}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
