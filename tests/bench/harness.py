#!/usr/bin/env python3
"""Runs benchmark ids and prints one JSON line per case; called by run.sh. Exit 1: a check or a goal failed; 3: no failure, but
what was asked needs a GPU and there is none.

An id is a module beside this one with `cases(arguments)` (`cases(arguments, id)` where it serves several), which yields a
function per case that returns the case's line as a dict with "pass"; facts of the machine and the commit are added here.
"""
import argparse
import datetime
import importlib
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys

BENCH = pathlib.Path(__file__).resolve().parent
ROOT = BENCH.parents[1]
sys.path += [str(BENCH.parent / "testing"), str(BENCH / "peers")]
import cluster  # noqa: E402

IDS = {"C1": "training_speed", "C2": "collective_speed", "C3": "training_memory", "C4": "tensor_training", "C5": "narrow_training", "P2": "recovery_speed", "G8": "cpu_update_speed"}
LOAD_IDS = {"P1": "control_plane", "P3": "control_plane"}
GPU_IDS = {"G1": "gpu_training_speed", "G3": "gpu_training_speed", "G4": "gpu_training_speed", "G5": "gpu_kernel_speed", "G6": "gpu_kernel_speed", "G7": "gpu_offload_speed"}
NO_DEVICE = 3
# Both sides may use 256-bit registers and no wider ones, so that they are compared with the same roof.
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
CAPS = {"RAVEL_CPU_ISA": "avx2", "OPENBLAS_CORETYPE": "Haswell", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2", **THREADS}


class NoDevice(Exception):
    """There is no usable GPU; the text says why."""


def output_of(*command, **options):
    run = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    if run.returncode != 0:
        sys.exit(f"{' '.join(str(word) for word in command)}: exit {run.returncode}\n{run.stderr[-4000:]}")
    return run.stdout.strip()


def progress(text):
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


def commit_of():
    """Of the repository, or of the bundle that this file lies in."""
    manifest = ROOT / "MANIFEST.json"
    if manifest.exists():
        built = json.loads(manifest.read_text())
        return {"commit": built["commit"][:7], "dirty": built["dirty"], "build_flags": built["build"]}
    return {"commit": output_of("git", "-C", ROOT, "rev-parse", "--short", "HEAD"),
            "dirty": bool(output_of("git", "-C", ROOT, "status", "--porcelain"))}


def gpu_facts():
    """What the driver says of the devices now, clocks and temperatures too; empty where there is none."""
    query = "name,driver_version,memory.total,clocks.sm,temperature.gpu,power.draw"
    try:
        run = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return {}
    return {"gpus": [dict(zip(query.split(","), (part.strip() for part in line.split(",")))) for line in run.stdout.splitlines()]} if run.returncode == 0 else {}


def facts():
    cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next(int(line.split()[1]) for line in open("/proc/meminfo") if line.startswith("MemTotal"))
    return {"machine": {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory / 2**20, 1), "kernel": platform.release()},
            **commit_of(), **gpu_facts(),
            "build": os.path.relpath(cluster.default_binaries(), ROOT), "command": "tests/bench/run.sh " + " ".join(sys.argv[1:]),
            "caps": CAPS, "load_average": round(os.getloadavg()[0], 2),
            "utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")}


def lines_of(name, arguments):
    """The lines of an id, each complete."""
    if name in IDS:
        cases = importlib.import_module(IDS[name]).cases(arguments)
    else:
        cases = importlib.import_module({**GPU_IDS, **LOAD_IDS}[name]).cases(arguments, name)
    for case in cases:
        line = case()
        yield {"id": name, **line, **facts(), "caps": line.get("caps", CAPS)}


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with this program
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="+", choices=[*IDS, *LOAD_IDS, *GPU_IDS], metavar="ID", help=", ".join([*IDS, *LOAD_IDS, *GPU_IDS]))
    parser.add_argument("--pairs", type=int, default=5, help="alternations of ours and the peers")
    parser.add_argument("--attempts", type=int, default=0, help="C1: at most so many pairs until --pairs were undisturbed; default four times as many")
    parser.add_argument("--steps", type=int, default=0, help="P2: kills; C1: steps per turn; G1, G3, G4, G7: steps per run, at least 15, the first 5 untimed")
    parser.add_argument("--case", action="append", help="only these cases of the ids, e.g. 34m")
    parser.add_argument("--work", type=pathlib.Path, metavar="FOLDER", help="G1, G3, G4: models, caches and finished runs stay here, and what is here is not run again")
    parser.add_argument("--results", type=pathlib.Path, metavar="FILE", help="also append the lines to this file")
    arguments = parser.parse_args()
    if arguments.pairs < 1 or arguments.attempts < 0 or arguments.steps < 0:
        parser.error("--pairs must be above 0, --attempts and --steps not negative")
    passed = ran = 0
    no_device = ""
    for name in dict.fromkeys(arguments.ids):
        try:
            for line in lines_of(name, arguments):
                ran += 1
                passed += line["pass"]
                print(json.dumps(line), flush=True)
                if arguments.results:
                    arguments.results.parent.mkdir(parents=True, exist_ok=True)
                    with open(arguments.results, "a") as file:
                        file.write(json.dumps(line) + "\n")
        except NoDevice as reason:
            no_device = f"{name}: no device: {reason}"
            print(no_device, file=sys.stderr)
    if ran == 0 and not no_device:
        parser.error(f"no such case: {arguments.case}")
    sys.exit(1 if passed != ran else NO_DEVICE if no_device else 0)


if __name__ == "__main__":
    import harness  # the modules of the ids see the same one, with its exception
    harness.main()
