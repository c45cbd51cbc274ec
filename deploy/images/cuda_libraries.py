#!/usr/bin/env python3
"""Copies what libravel_cuda.so opens by name into an image's file system, with its licences, for deploy/images/build.sh.
    deploy/images/cuda_libraries.py LIB64 ROOT
LIB64 is a toolkit's folder of libraries. Prints packages and licences for the SBOM (SPDX 2.3) as one JSON object. Versions are
those that the libraries themselves answer; no device is needed."""
import ctypes
import glob
import hashlib
import json
import os
import re
import shutil
import sys

FOLDER = "usr/lib/x86_64-linux-gnu"  # where the loader looks


def of_number(number):
    """10203 -> "1.2.3"."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def returned(name):
    """The version as a function's result."""
    def ask(library):
        function = getattr(library, name)
        function.restype = ctypes.c_size_t
        return of_number(function())
    return ask


def nccl_version(library):
    number = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(number)) != 0:
        raise OSError("ncclGetVersion fails")
    return of_number(number.value)


def nvrtc_version(library):
    major, minor = ctypes.c_int(), ctypes.c_int()
    if library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)) != 0:
        raise OSError("nvrtcVersion fails")
    return f"{major.value}.{minor.value}"


# Product: its libraries by soname, the shortest of which answers; the question; places of its licence.
# cuBLASLt and cuDNN compile kernels by NVRTC. Nothing opens libcublas.so or libnvrtc.alt.so.
PRODUCTS = {
    "cublas": (r"libcublasLt\.so\.\d+", returned("cublasLtGetVersion"),
               ["{lib64}/../dist-info/nvidia_cublas-*/licenses/License.txt", "{lib64}/../EULA.txt"]),
    "cudnn": (r"libcudnn(_\w+)?\.so\.\d+", returned("cudnnGetVersion"),
              ["{lib64}/../dist-info/nvidia_cudnn_*/licenses/License.txt", "/usr/share/doc/libcudnn*/copyright"]),
    "nccl": (r"libnccl\.so\.\d+", nccl_version,
             ["{lib64}/../dist-info/nvidia_nccl_*/licenses/License.txt", "/usr/share/doc/libnccl*/copyright"]),
    "nvrtc": (r"libnvrtc(-builtins)?\.so\.\d+(\.\d+)?", nvrtc_version,
              ["{lib64}/../dist-info/nvidia_cuda_nvrtc-*/licenses/License.txt", "{lib64}/../EULA.txt"]),
}


def sonames(lib64, pattern):
    """Names by which libraries are opened. Those with the whole version, which a name links to, are the same files."""
    names = sorted(name for name in os.listdir(lib64) if re.fullmatch(pattern, name))
    return [name for name in names if not any(name != other and os.path.samefile(f"{lib64}/{name}", f"{lib64}/{other}")
                                              and len(other) < len(name) for other in names)]


def licence_of(lib64, product):
    places = [place.format(lib64=lib64) for place in PRODUCTS[product][2]]
    for place in places:
        for path in sorted(glob.glob(place)):
            with open(path, encoding="utf-8") as text:
                return text.read()
    sys.exit(f"cuda_libraries.py: the licence of {product} must be in the image, and is not in {' or '.join(places)}")


def sha256(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def add(lib64, root, product):
    """Copies a product. Returns its packages, one a library, and its licence."""
    pattern, ask, _ = PRODUCTS[product]
    names = sonames(lib64, pattern)
    if not names:
        sys.exit(f"cuda_libraries.py: {lib64} has no {product}: {pattern}")
    main_library = min(names, key=len)
    try:
        version = ask(ctypes.CDLL(f"{lib64}/{main_library}"))
    except (OSError, AttributeError) as error:
        sys.exit(f"cuda_libraries.py: {lib64}/{main_library} does not say its version: {error}")
    licence = {"licenseId": f"LicenseRef-NVIDIA-{product}", "name": f"NVIDIA {product}", "extractedText": licence_of(lib64, product)}
    os.makedirs(f"{root}/usr/share/doc/nvidia-{product}")
    with open(f"{root}/usr/share/doc/nvidia-{product}/copyright", "w", encoding="utf-8") as text:
        text.write(licence["extractedText"])
    packages = []
    for name in names:
        copied = f"{root}/{FOLDER}/{name}"
        shutil.copyfile(f"{lib64}/{name}", copied)
        packages.append({
            "name": name.partition(".so.")[0], "versionInfo": version, "supplier": "Organization: NVIDIA",
            "packageFileName": f"./{FOLDER}/{name}", "licenseDeclared": licence["licenseId"],
            "checksums": [{"algorithm": "SHA256", "checksumValue": sha256(copied)}]})
    return packages, licence


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: cuda_libraries.py LIB64 ROOT")
    lib64, root = sys.argv[1:]
    packages, licences = [], []
    for product in PRODUCTS:
        added, licence = add(lib64, root, product)
        packages += added
        licences.append(licence)
    json.dump({"packages": packages, "licences": licences}, sys.stdout)


if __name__ == "__main__":
    main()
