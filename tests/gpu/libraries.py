"""Where the CUDA libraries are on this machine, and of which version: cuBLASLt, cuDNN, NCCL, NVRTC and the driver.

find() gives the folders for LD_LIBRARY_PATH, which must be set before a program starts: cuDNN opens its own parts and NVRTC by
name. All parts of a library come from the one folder that is found first: RAVEL_CUDA_LIBRARY_PATH (folders, colon between),
the loader's own search, the toolkit (CUDA_HOME, /usr/local/cuda), nvidia/*/lib of this Python environment.

    libraries.py --versions     as JSON, what the loader finds with the environment as it is
"""
import ctypes
import json
import os
import pathlib
import re
import site
import subprocess
import sys
import sysconfig

SONAMES = {"cublasLt": "libcublasLt.so.13", "cudnn": "libcudnn.so.9", "nccl": "libnccl.so.2", "nvrtc": "libnvrtc.so.13"}
DRIVER = "libcuda.so.1"
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


def split_path(text):
    return [pathlib.Path(part) for part in (text or "").split(":") if part]


def loader_folders():
    """LD_LIBRARY_PATH, then the folders of the loader's cache."""
    folders = split_path(os.environ.get("LD_LIBRARY_PATH"))
    for command in ("ldconfig", "/sbin/ldconfig"):
        try:
            cache = subprocess.run([command, "-p"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        except OSError:
            continue
        folders += [pathlib.Path(p).parent for p in re.findall(r"=> (\S+)", cache) if pathlib.Path(p).name in SONAMES.values()]
        break
    return folders


def candidate_folders():
    folders = split_path(os.environ.get("RAVEL_CUDA_LIBRARY_PATH")) + loader_folders()
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home:
            folders += [pathlib.Path(home, "lib64"), pathlib.Path(home, "targets/x86_64-linux/lib")]
    packages = [sysconfig.get_paths()["purelib"], *site.getsitepackages(), site.getusersitepackages()]
    for package in dict.fromkeys(packages):
        folders += sorted(pathlib.Path(package).glob("nvidia/*/lib"))
    return [folder.resolve() for folder in dict.fromkeys(folders) if folder.is_dir()]


def find():
    """({library: folder or None}, folders in the order of LD_LIBRARY_PATH)."""
    candidates = list(dict.fromkeys(candidate_folders()))
    found = {name: next((f for f in candidates if (f / soname).exists()), None) for name, soname in SONAMES.items()}
    return found, [f for f in candidates if f in found.values()]


def dotted(number, *weights):
    """13.1.0 of 130100 with the weights 10000, 100."""
    parts = []
    for weight in weights:
        parts.append(number // weight)
        number %= weight
    return ".".join(str(part) for part in (*parts, number))


def answer(soname, function, integer=ctypes.c_int, by_address=False):
    """(number, path) that a library's function gives about itself, or (None, why not)."""
    try:
        library = ctypes.CDLL(soname)
        call = getattr(library, function)
        value = integer()
        if by_address:
            call(ctypes.byref(value))
        else:
            call.restype = integer
            value.value = call()
    except (OSError, AttributeError) as error:
        return None, str(error)
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if pathlib.Path(line.split()[-1]).name.startswith(soname)}
    return value.value, ", ".join(sorted(paths)) or soname


def driver_release():
    """The driver's own version, which applies to its libraries and its kernel module alike."""
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", text)
    return match.group(1) if match else None


def devices():
    """([{name, compute}], why there is none): asked of the driver."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        return [], f"no driver: {error}"
    if (error := driver.cuInit(0)) != 0:
        return [], f"the driver does not start: cuInit gave error {error}"
    count, found = ctypes.c_int(), []
    driver.cuDeviceGetCount(ctypes.byref(count))
    for index in range(count.value):
        device, major, minor, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, len(name), device)
        driver.cuDeviceGetAttribute(ctypes.byref(major), COMPUTE_MAJOR, device)
        driver.cuDeviceGetAttribute(ctypes.byref(minor), COMPUTE_MINOR, device)
        found.append({"name": name.value.decode(), "compute": f"{major.value}.{minor.value}"})
    return found, "" if found else "the driver is there, but no device"


def versions():
    cublas, cublas_path = answer(SONAMES["cublasLt"], "cublasLtGetVersion", ctypes.c_size_t)
    cudnn, cudnn_path = answer(SONAMES["cudnn"], "cudnnGetVersion", ctypes.c_size_t)
    nccl, nccl_path = answer(SONAMES["nccl"], "ncclGetVersion", by_address=True)
    driver, driver_path = answer(DRIVER, "cuDriverGetVersion", by_address=True)
    present, no_device = devices()
    return {"devices": present, "no_device": no_device,
            "cublasLt": {"version": cublas and dotted(cublas, 10000, 100), "path": cublas_path},
            "cudnn": {"version": cudnn and dotted(cudnn, 10000, 100), "path": cudnn_path},
            "nccl": {"version": nccl and dotted(nccl, 10000, 100), "path": nccl_path},
            "driver": {"version": driver_release(), "cuda": driver and f"{driver // 1000}.{driver % 1000 // 10}", "path": driver_path}}


def refusals(found, built_against):
    """Why libraries that are present cannot be used: another major version, or older than the headers of the build."""
    problems = []
    for name, wanted in built_against.items():
        have = found[name]["version"]
        if have is None:
            continue
        ours, theirs = ([int(part) for part in text.split(".")] for text in (have, wanted))
        if ours[0] != theirs[0] or ours < theirs:
            problems.append(f"{name} {have} ({found[name]['path']}): expected {theirs[0]}, at least {wanted}, which this bundle was built against")
    return problems


if __name__ == "__main__":
    if sys.argv[1:] != ["--versions"]:
        sys.exit(__doc__)
    print(json.dumps(versions()))
