#!/usr/bin/env python3
"""Preflight, suites and benchmarks of a portable bundle; run.sh calls it and says what the exit codes mean.

Under the output folder: results.jsonl, a line as each suite or benchmark ends, so that a run that was cut short keeps what it
had; xml/, what GoogleTest wrote; logs/; tmp/ and lib/ while it runs. Nothing is written anywhere else but in --work.
"""
import argparse
import datetime
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree

import libraries

PASSED, FAILED, BAD_USE, NO_DEVICE, REFUSED = 0, 1, 2, 3, 4
COMPUTE = "9.0"  # the one architecture a bundle has code for
# A program or script with its arguments, and seconds.
COMMAND_SUITES = {"services": (["tests/gpu/services_test.py"], 300), "lost_trainer": (["tests/gpu/lost_trainer.py"], 600),
                  "lost_in_offload": (["tests/gpu/lost_trainer.py", "--offload", "1"], 600),
                  "shared_layers": (["tests/gpu/shared_layers.py"], 300),
                  "loss_parity": (["tests/gpu/loss_parity.py"], 900), "own_speed": (["bin/gpu_speed", "G5", "G6"], 600),
                  "one_job": (["tests/gpu/one_job.py"], 600)}
MEASURING = {"own_speed", "one_job"}  # run when they are named
BENCH_SECONDS = 600
SKIPPED = 3  # exit code of commands that found no device


def stop(code, text):
    print(f"run.sh: {text}", file=sys.stderr)
    sys.exit(code)


def check_manifest(bundle):
    try:
        manifest = json.loads((bundle / "MANIFEST.json").read_text())
    except (OSError, ValueError) as error:
        stop(BAD_USE, f"{bundle} is no bundle: {error}")
    for name, facts in manifest["files"].items():
        file = bundle / name
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != facts["sha256"]:
            stop(BAD_USE, f"{file}: missing, or other than MANIFEST.json says: copy the bundle again")
    for name, target in manifest["links"].items():
        if not (bundle / name).exists():
            stop(BAD_USE, f"{bundle / name}: missing; it is a link to {target}: copy the bundle with its links")
    return manifest


def environment_of(bundle, out, libraries_folder, work):
    """Of everything that is started. Peers get the machine's own LD_LIBRARY_PATH back, because they bring their libraries."""
    temporary = out / "tmp"
    temporary.mkdir()
    own = os.environ.get("LD_LIBRARY_PATH", "")
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "XDG_CACHE_HOME")
    caches = {name: str((work or temporary) / "caches" / name.lower()) for name in names}
    return {**os.environ, **caches, "TMPDIR": str(temporary), "RAVEL_BIN_DIR": str(bundle / "bin"), "PYTHONDONTWRITEBYTECODE": "1",
            "RAVEL_CUDA_LIBRARY": str(bundle / "bin/libravel_cuda.so"), "RAVEL_PEER_LD_LIBRARY_PATH": own,
            "LD_LIBRARY_PATH": ":".join([str(libraries_folder)] + ([own] if own else []))}


def preflight(manifest, environment):
    """Prints what is there; (facts, why there is no usable device)."""
    run = subprocess.run([sys.executable, "-B", libraries.__file__, "--versions"], env=environment, stdout=subprocess.PIPE, text=True, timeout=60)
    if run.returncode != 0:
        stop(BAD_USE, "the CUDA libraries could not be asked for their versions")
    facts = json.loads(run.stdout)
    print(f"bundle    commit {manifest['commit'][:12]}{' (dirty)' if manifest['dirty'] else ''}, CUDA {manifest['build']['toolkit']}, "
          f"sm_{manifest['build']['cuda_architectures'].removesuffix('-real')}")
    for name in ("driver", "cublasLt", "cudnn", "nccl"):
        print(f"{name:9} {facts[name]['version'] or 'not found':9} {facts[name]['path']}")
    for device in facts["devices"]:
        print(f"device    {device['name']}, compute capability {device['compute']}")
    problems = libraries.refusals(facts, manifest["libraries"])
    if problems:
        stop(REFUSED, "; ".join(problems))
    reason = facts["no_device"]
    if not reason and not any(device["compute"] == COMPUTE for device in facts["devices"]):
        reason = f"no device of compute capability {COMPUTE}, the only one this bundle has code for"
    if reason:
        print(f"no device {reason}\n          What needs a device is skipped.")
    return facts, reason


def run_limited(command, seconds, log, environment, cwd):
    """Exit code, or None where the time was up; the whole process group ends."""
    with open(log, "ab") as file:
        process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                   env=environment, cwd=cwd, start_new_session=True)
        try:
            return process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()


def google_test_counts(xml_file):
    """passed, failed, skipped and the reasons of what was skipped; None where the program wrote no report."""
    try:
        cases = list(xml.etree.ElementTree.parse(xml_file).iter("testcase"))
    except (OSError, xml.etree.ElementTree.ParseError):
        return None
    failed = sum(case.find("failure") is not None for case in cases)
    skips = [case.find("skipped") for case in cases if case.find("failure") is None and case.find("skipped") is not None]
    ran = sum(case.get("status") == "run" for case in cases)
    reasons = sorted({" ".join((skip.get("message") or "").splitlines()[-1:]).strip() for skip in skips})
    return {"passed": ran - failed - len(skips), "failed": failed, "skipped": len(skips), "reasons": reasons}


class Runner:
    def __init__(self, bundle, out, environment, facts, filter_text):
        self.bundle, self.out, self.environment, self.facts, self.filter = bundle, out, environment, facts, filter_text
        self.lines = []
        for folder in ("xml", "logs"):
            (out / folder).mkdir()

    def google_test(self, name, seconds):
        report = self.out / "xml" / f"{name}.xml"
        command = [self.bundle / "bin" / name, f"--gtest_output=xml:{report}"] + ([f"--gtest_filter={self.filter}"] if self.filter else [])
        code, line = self.timed(name, command, seconds)
        counts = google_test_counts(report)
        line |= counts or {"passed": 0, "failed": 1, "skipped": 0, "reasons": []}
        if code is None:
            self.finish(line, "timeout")
        elif code != 0 or counts is None or counts["failed"]:
            self.finish(line, "failed")
        else:
            self.finish(line, "passed" if counts["passed"] or not counts["skipped"] else "skipped")

    def command(self, name, command, seconds):
        code, line = self.timed(name, command, seconds)
        status = {0: "passed", SKIPPED: "skipped", None: "timeout"}.get(code, "failed")
        last = ((self.out / "logs" / f"{name}.log").read_text(errors="replace").strip().splitlines() or [""])[-1]
        line |= {"passed": int(status == "passed"), "failed": int(status in ("failed", "timeout")), "skipped": int(status == "skipped"),
                 "reasons": [last] if status != "passed" else []}
        if status == "passed" and last.startswith("{"):
            line["report"] = json.loads(last)
        self.finish(line, status)

    def timed(self, name, command, seconds):
        print(f"{name:24} ...", end="", flush=True)
        start = time.monotonic()
        code = run_limited(command, seconds, self.out / "logs" / f"{name}.log", self.environment, self.out)
        return code, {"suite": name, "seconds": round(time.monotonic() - start, 1), "limit_seconds": seconds, "exit_code": code}

    def finish(self, line, status):
        self.lines.append({**line, "status": status})
        facts = {"utc": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), **self.facts}
        with open(self.out / "results.jsonl", "a") as file:
            file.write(json.dumps({**self.lines[-1], **facts}) + "\n")
        print(f"\r{line['suite']:24} {status:8} {line['passed']:5} passed {line['failed']:4} failed {line['skipped']:5} skipped {line['seconds']:7.1f} s")
        for text in line["reasons"] + ([json.dumps(line["report"])] if "report" in line else []):
            print(f"{'':24} {text}")

    def exit_code(self, no_device):
        if any(line["status"] in ("failed", "timeout") for line in self.lines):
            return FAILED
        return NO_DEVICE if no_device else PASSED


def suites_of(bundle):
    rows = [row.split() for row in (bundle / "tests/gpu/suites.txt").read_text().splitlines() if row and not row.startswith("#")]
    return {name: int(seconds) for name, seconds in rows}


def parse(default_bundle):
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=pathlib.Path, nargs="?", default=default_bundle)
    parser.add_argument("--out", type=pathlib.Path, help="a folder that does not exist yet; default ravel-results-TIME here")
    parser.add_argument("--suite", action="append", help="only this suite; may be repeated; none: no suite, for --bench alone")
    parser.add_argument("--filter", help="tests of GoogleTest suites, as --gtest_filter")
    parser.add_argument("--bench", action="append", default=[], help="also this id of tests/bench/harness.py, e.g. G5; may be repeated")
    parser.add_argument("--pairs", type=int, help="of --bench: alternations of ours and the peers")
    parser.add_argument("--case", action="append", default=[], help="of --bench: only this case, e.g. 8b-8k; may be repeated")
    parser.add_argument("--work", type=pathlib.Path, help="of --bench: models, caches and finished runs stay here, and what is here is not run again")
    parser.add_argument("--list", action="store_true", help="print the suites and stop")
    return parser.parse_args()


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started ends with this program
    arguments = parse(pathlib.Path(__file__).resolve().parents[2])
    bundle = arguments.bundle.resolve()
    manifest = check_manifest(bundle)
    suites = suites_of(bundle)
    if arguments.list:
        print("\n".join([*suites, *COMMAND_SUITES]))
        return PASSED
    chosen = [name for name in arguments.suite or [*suites, *(name for name in COMMAND_SUITES if name not in MEASURING)] if name != "none"]
    if unknown := set(chosen) - set(suites) - set(COMMAND_SUITES):
        stop(BAD_USE, f"no suite {', '.join(sorted(unknown))}; there are {', '.join([*suites, *COMMAND_SUITES])}")
    out = (arguments.out or pathlib.Path(f"ravel-results-{datetime.datetime.now():%Y%m%d-%H%M%S}")).resolve()
    if out.exists():
        stop(BAD_USE, f"{out} exists: results of different runs are not mixed")
    out.mkdir(parents=True)
    found = libraries.find(manifest["libraries"])
    for name in (name for name, folder in found.items() if folder is None):
        print(f"{libraries.SONAMES[name]} is in none of the folders searched; what needs it is skipped")
    work = arguments.work and arguments.work.resolve()
    environment = environment_of(bundle, out, libraries.link(found, out / "lib"), work)
    facts, no_device = preflight(manifest, environment)
    runner = Runner(bundle, out, environment, {"commit": manifest["commit"], "libraries": facts}, arguments.filter)
    for name in chosen:
        if name in suites:
            runner.google_test(name, suites[name])
        else:
            (program, *words), seconds = COMMAND_SUITES[name]
            interpreter = [sys.executable, "-B"] if program.endswith(".py") else []
            runner.command(name, [*interpreter, bundle / program, *words], seconds)
    for name in arguments.bench:
        command = [sys.executable, "-B", bundle / "tests/bench/harness.py", name, "--results", out / "bench.jsonl"]
        command += ["--pairs", arguments.pairs] if arguments.pairs else []
        command += [word for case in arguments.case for word in ("--case", case)] + (["--work", work] if work else [])
        runner.command(f"bench-{name}", command, BENCH_SECONDS)
    for name in ("tmp", "lib"):
        shutil.rmtree(out / name, ignore_errors=True)
    code = runner.exit_code(no_device)
    totals = {key: sum(line[key] for line in runner.lines) for key in ("passed", "failed", "skipped")}
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped; results in {out}; exit code {code}"
          + (f" (no device: {no_device})" if code == NO_DEVICE else ""))
    return code


if __name__ == "__main__":
    sys.exit(main())
