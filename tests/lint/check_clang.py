#!/usr/bin/env python3
"""Every source of ours as clang 14 reads it: it must parse, without warnings, and keep to the lock annotations of common/mutex.h.

    check_clang.py BUILD [--seconds N] [--jobs N] [FILE...]

BUILD has compile_commands.json and the generated headers. All sources, or those named. With --seconds it stops in time; called
again it goes on where it stopped. A source that was found clean is read again when it, a file of ours or of BUILD that it includes,
or its flags have changed. Standard library only. Exit code 0 or 1.
"""
import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
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


@functools.cache
def digest_of(path):
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest() if pathlib.Path(path).exists() else "gone"


def state_of(flags, files):
    """What a source was read with: a verdict holds for as long as this is the same."""
    return hashlib.sha256("\n".join([*FLAGS, *flags, *(f"{path} {digest_of(path)}" for path in files)]).encode()).hexdigest()


def files_in(dependencies, build):
    """Those of ours and of the build in a list as the compiler writes it for make."""
    words = dependencies.split(":", 1)[1].replace("\\\n", " ").split()
    paths = {pathlib.Path(os.path.normpath(ROOT / word)) for word in words}
    return sorted(str(path) for path in paths if path.is_relative_to(ROOT) or path.is_relative_to(build))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_intermixed_args()
    build = arguments.build.resolve()
    clang = shutil.which("clang++-14") or sys.exit("check_clang.py: no clang++-14 (deploy/install_packages.sh tidy)")
    commands = our_commands(build)
    marks = build / "clang_clean.json"
    known = json.loads(marks.read_text()) if marks.exists() else {}
    clean = {path: mark for path, mark in known.items()
             if pathlib.Path(path) in commands and mark["state"] == state_of(commands[pathlib.Path(path)], mark["files"])}
    wanted = [path.resolve() for path in arguments.files] or [path for path in commands if str(path) not in clean]
    unknown = [str(path) for path in wanted if path not in commands]
    if unknown:
        sys.exit(f"check_clang.py: not in {build}/compile_commands.json: {', '.join(unknown)}")
    end = time.monotonic() + arguments.seconds

    def check(path):
        if time.monotonic() > end:
            return None
        with tempfile.NamedTemporaryFile("r", suffix=".d") as dependencies:
            command = [clang, *commands[path], *FLAGS, "-MD", "-MF", dependencies.name, str(path)]
            run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            files = files_in(dependencies.read(), build) if run.returncode == 0 else []
        return run, {"files": files, "state": state_of(commands[path], files)}

    bad, checked = 0, 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for path, result in zip(wanted, pool.map(check, wanted)):
            if result is None:
                continue
            run, mark = result
            checked += 1
            if run.returncode == 0:
                clean[str(path)] = mark
                marks.write_text(json.dumps(clean))
            else:
                bad += 1
                clean.pop(str(path), None)
                marks.write_text(json.dumps(clean))
                print(f"=== {path.relative_to(ROOT)}\n{run.stderr}", flush=True)
    print(f"{checked} of {len(commands)} sources read: {bad} are not clean, {len(wanted) - checked} not reached; {len(clean)} clean in all")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
