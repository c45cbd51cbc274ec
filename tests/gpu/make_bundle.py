#!/usr/bin/env python3
"""Lays out the portable bundle and writes its manifest; called by the target `bundle` of the preset cuda-portable.

    make_bundle.py --build FOLDER --out FOLDER --type TYPE --toolkit VERSION --include FOLDER PROGRAM...

The bundle mirrors the repository where it holds scripts, so that they find each other in both: bin/ has the programs and
libravel_cuda.so, tests/ and deploy/ the scripts, job files and golden data. MANIFEST.json names commit, flags, toolkit, the
versions of the libraries that it was built against, and the SHA-256 of every file.
"""
import argparse
import hashlib
import json
import pathlib
import re
import shutil
import stat
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROLES = ("ravel-coordinator", "ravel-worker", "ravel-trainer", "ravelctl")
SCRIPTS = ("tests/gpu/README.md", "tests/gpu/*.py", "tests/gpu/run.sh", "tests/gpu/first_hour.sh", "tests/bench/README.md", "tests/bench/*.py",
           "tests/bench/peers/*.py", "tests/testing/cluster.py", "tests/testing/tiny_job.py", "tests/kernels/golden/golden.txt",
           "tests/worker/trainer/golden/loss_curves*.txt", "deploy/examples/*.yaml")
BUILD_ONLY = {"make_bundle.py", "check_bundle.py", "device_code.py", "libraries_test.py", "first_hour_test.py", "gpu_plans_test.py", "gpu_training_speed_test.py"}


def version_of(header, names):
    """The numbers of the macros `names` in a header, joined by dots."""
    text = header.read_text(errors="replace")
    found = [re.search(rf"#define\s+{name}\s+(\d+)", text) for name in names]
    if not all(found):
        sys.exit(f"make_bundle.py: {header}: expected the macros {', '.join(names)}")
    return ".".join(match.group(1) for match in found)


def built_against(include):
    return {"cublasLt": version_of(include / "cublas_api.h", ["CUBLAS_VER_MAJOR", "CUBLAS_VER_MINOR", "CUBLAS_VER_PATCH"]),
            "cudnn": version_of(include / "cudnn_version.h", ["CUDNN_MAJOR", "CUDNN_MINOR", "CUDNN_PATCHLEVEL"]),
            "nccl": version_of(include / "nccl.h", ["NCCL_MAJOR", "NCCL_MINOR", "NCCL_PATCH"])}


def git(*words):
    run = subprocess.run(["git", "-C", ROOT, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return run.stdout.strip() if run.returncode == 0 else "unknown"


def fill(out, build, programs):
    (out / "bin").mkdir(parents=True)
    for program in programs:
        shutil.copy2(program, out / "bin" / program.name)
    for role in ROLES:
        (out / "bin" / role).symlink_to("ravel")
    for pattern in SCRIPTS:
        files = sorted(ROOT.glob(pattern))
        if not files:
            sys.exit(f"make_bundle.py: nothing matches {pattern}")
        for file in files:
            if file.name not in BUILD_ONLY:
                target = out / file.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)
    shutil.copy2(build / "tests/gpu/suites.txt", out / "tests/gpu/suites.txt")
    (out / "run.sh").symlink_to("tests/gpu/run.sh")


def digests(out):
    files = sorted(p for p in out.rglob("*") if p.is_file() and not p.is_symlink())
    return {str(p.relative_to(out)): {"sha256": hashlib.sha256(p.read_bytes()).hexdigest(), "bytes": p.stat().st_size,
                                      "executable": bool(p.stat().st_mode & stat.S_IXUSR)} for p in files}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--type", required=True)
    parser.add_argument("--toolkit", required=True)
    parser.add_argument("--include", type=pathlib.Path, required=True)
    parser.add_argument("programs", type=pathlib.Path, nargs="+")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    fill(arguments.out, arguments.build, arguments.programs)
    cache = dict(re.findall(r"^(\w+):\w+=(.*)$", (arguments.build / "CMakeCache.txt").read_text(), re.M))
    manifest = {"commit": git("rev-parse", "HEAD"), "dirty": git("status", "--porcelain", "--untracked-files=no") != "",
                "build": {"type": arguments.type, "cxx_flags": cache.get(f"CMAKE_CXX_FLAGS_{arguments.type.upper()}", ""),
                          "cuda_architectures": cache.get("CMAKE_CUDA_ARCHITECTURES", ""), "toolkit": arguments.toolkit},
                "libraries": built_against(arguments.include), "links": {f"bin/{role}": "ravel" for role in ROLES} | {"run.sh": "tests/gpu/run.sh"},
                "files": digests(arguments.out)}
    (arguments.out / "MANIFEST.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(f"{arguments.out}: {len(manifest['files'])} files, {sum(f['bytes'] for f in manifest['files'].values()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
