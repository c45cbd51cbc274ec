#!/usr/bin/env python3
"""Checks what a bundle promises:  check_bundle.py BUNDLE

Under 60 MB; every program and library needs nothing but glibc's libc, libm and their like, of version 2.36 or older; they are
stripped; device code is for Hopper alone; every file is as the manifest says. Needs binutils (readelf), no device.
"""
import hashlib
import json
import pathlib
import re
import subprocess
import sys

MAX_BYTES = 60_000_000
MAX_GLIBC = (2, 36)
GLIBC = {"libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "ld-linux-x86-64.so.2"}


def readelf(file, *options):
    return subprocess.run(["readelf", "--wide", *options, file], check=True, stdout=subprocess.PIPE, text=True).stdout


def binary_problems(file):
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", readelf(file, "--dynamic")))
    versions = [tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", readelf(file, "--version-info"))]
    newest = max(versions, default=(0,))
    print(f"  {file.name}: {file.stat().st_size / 1e6:.1f} MB, needs {', '.join(sorted(needed))}; glibc {'.'.join(map(str, newest))}")
    if needed - GLIBC:
        yield f"{file}: needs {', '.join(sorted(needed - GLIBC))}"
    if newest > MAX_GLIBC:
        yield f"{file}: needs glibc {'.'.join(map(str, newest))}, newer than {'.'.join(map(str, MAX_GLIBC))}"
    if re.search(r"\] \.(symtab|debug_info) ", readelf(file, "--section-headers")):
        yield f"{file}: not stripped"


def manifest_problems(bundle):
    manifest = json.loads((bundle / "MANIFEST.json").read_text())
    for name, facts in manifest["files"].items():
        file = bundle / name
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != facts["sha256"]:
            yield f"{name}: missing, or other than the manifest says"
    for name, target in manifest["links"].items():
        if not (bundle / name).resolve().is_file():
            yield f"{name}: not a link to {target}"
    listed = set(manifest["files"]) | set(manifest["links"]) | {"MANIFEST.json"}
    for file in bundle.rglob("*"):
        if not file.is_dir() and str(file.relative_to(bundle)) not in listed:
            yield f"{file.relative_to(bundle)}: not in the manifest"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    bundle = pathlib.Path(sys.argv[1])
    total = sum(p.lstat().st_size for p in bundle.rglob("*") if not p.is_dir())
    print(f"{bundle}: {total / 1e6:.1f} MB of {MAX_BYTES / 1e6:.0f} MB")
    problems = [f"{total} bytes, more than {MAX_BYTES}"] if total >= MAX_BYTES else []
    binaries = [p for p in sorted((bundle / "bin").iterdir()) if not p.is_symlink() and p.read_bytes()[:4] == b"\x7fELF"]
    for file in binaries:
        problems += binary_problems(file)
    problems += manifest_problems(bundle)
    library = bundle / "bin/libravel_cuda.so"
    code = subprocess.run([sys.executable, pathlib.Path(__file__).with_name("device_code.py"), library, "90"])
    if code.returncode != 0:
        problems.append("libravel_cuda.so: device code is not of Hopper alone")
    for problem in problems:
        print(f"check_bundle.py: {problem}", file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
