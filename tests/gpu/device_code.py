#!/usr/bin/env python3
"""Checks that a shared library holds device code for exactly the named architectures, the same number of parts for each, and no
PTX:  device_code.py LIBRARY ARCHITECTURE...   e.g. device_code.py libravel_cuda.so 90 100

Reads the headers of the fat binaries in the library, so that neither the toolkit nor a device is needed.
"""
import collections
import pathlib
import struct
import sys

MAGIC = struct.pack("<I", 0xBA55ED50)
PTX, CODE = 1, 2


def parts(data):
    """(kind, architecture) of every part of every fat binary."""
    at = data.find(MAGIC)
    while at >= 0:
        version, header_bytes, size = struct.unpack_from("<HHQ", data, at + 4)
        begin, end = at + header_bytes, at + header_bytes + size
        if version != 1 or header_bytes != 16 or end > len(data):
            at = data.find(MAGIC, at + 4)  # these four bytes may occur anywhere
            continue
        while begin < end:
            kind, _, part_header_bytes, part_bytes = struct.unpack_from("<HHIQ", data, begin)
            if kind not in (PTX, CODE) or part_header_bytes < 64:
                sys.exit(f"device_code.py: a fat binary of unknown form at byte {begin}: kind {kind}, header of {part_header_bytes} bytes")
            yield kind, struct.unpack_from("<I", data, begin + 28)[0]
            begin += part_header_bytes + part_bytes
        at = data.find(MAGIC, end)


def main():
    if len(sys.argv) < 3 or not all(word.isdigit() for word in sys.argv[2:]):
        sys.exit(__doc__)
    wanted = {int(word) for word in sys.argv[2:]}
    found = collections.Counter(parts(pathlib.Path(sys.argv[1]).read_bytes()))
    code = {architecture: count for (kind, architecture), count in found.items() if kind == CODE}
    print(f"{sys.argv[1]}: " + (", ".join(f"sm_{a}: {n} parts" for a, n in sorted(code.items())) or "no device code"))
    if set(code) != wanted:
        sys.exit(f"device_code.py: expected code for {sorted(wanted)}, found {sorted(code)}")
    if len(set(code.values())) != 1:
        sys.exit("device_code.py: some kernels were not compiled for every architecture")
    if any(kind == PTX for kind, _ in found):
        sys.exit("device_code.py: PTX is included, which no bundle should carry")


if __name__ == "__main__":
    main()
