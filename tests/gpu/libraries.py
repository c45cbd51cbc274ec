"""Where the CUDA libraries are on this machine, and of which version: cuBLASLt, cuDNN, NCCL, NVRTC and the driver.

find() searches RAVEL_CUDA_LIBRARY_PATH (folders, colon between), the loader's own search, the toolkit (CUDA_HOME,
/usr/local/cuda) and nvidia/*/lib of this Python environment. A library of RAVEL_CUDA_LIBRARY_PATH is taken if it is not older
than the build's headers; else the newest of all that are not. link() puts all parts of each into one folder for
LD_LIBRARY_PATH, which must be set before a program starts: cuDNN opens its own parts and NVRTC by name.

    libraries.py --versions             as JSON, what the loader finds with the environment as it is
    libraries.py --version-of LIBRARY   of that name's file, as the loader finds it
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
# All files of a library, which belong together.
PARTS = {"cublasLt": "libcublasLt.so*", "cudnn": "libcudnn*.so*", "nccl": "libnccl.so*", "nvrtc": "libnvrtc*.so*"}
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


def named_folders():
    """Of RAVEL_CUDA_LIBRARY_PATH: a person has chosen these."""
    return [folder.resolve() for folder in split_path(os.environ.get("RAVEL_CUDA_LIBRARY_PATH")) if folder.is_dir()]


def candidate_folders():
    folders = named_folders() + loader_folders()
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home:
            folders += [pathlib.Path(home, "lib64"), pathlib.Path(home, "targets/x86_64-linux/lib")]
    packages = [sysconfig.get_paths()["purelib"], *site.getsitepackages(), site.getusersitepackages()]
    for package in dict.fromkeys(packages):
        folders += sorted(pathlib.Path(package).glob("nvidia/*/lib"))
    return list(dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir()))


def numbers(text):
    return [int(part) for part in text.split(".")]


def is_usable(version, wanted):
    """Of the same major version as the headers of the build, and not older."""
    return wanted is None or numbers(version)[0] == numbers(wanted)[0] and numbers(version) >= numbers(wanted)


def version_in(folder, name):
    """"13.1.0" of the library in a folder; None where it does not load."""
    path = ":".join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")]).rstrip(":")
    run = subprocess.run([sys.executable, "-B", __file__, "--version-of", name], env={**os.environ, "LD_LIBRARY_PATH": path},
                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=60)
    return run.stdout.strip() or None if run.returncode == 0 else None


def choose(folders, named, wanted, version_of):
    """Of folders that have a library: the first usable one of `named`, else the newest usable one, else the newest."""
    if len(folders) < 2:
        return folders[0] if folders else None
    versions = {folder: version_of(folder) for folder in folders}
    usable = [folder for folder in folders if versions[folder] and is_usable(versions[folder], wanted)]
    chosen = next((folder for folder in usable if folder in named), None)
    return chosen or max(usable or folders, key=lambda folder: numbers(versions[folder] or "0"))


def find(built_against, version_in=version_in):
    """{library: folder or None} for the versions {library: "13.1.0"} of the build's headers."""
    candidates, named = candidate_folders(), named_folders()
    return {name: choose([folder for folder in candidates if (folder / soname).exists()], named, built_against.get(name),
                         lambda folder, name=name: version_in(folder, name)) for name, soname in SONAMES.items()}


def link(found, folder):
    """Links all files of the found libraries into a folder, so that no older one beside them is met first."""
    folder.mkdir(parents=True)
    for name, where in found.items():
        for file in sorted(where.glob(PARTS[name])) if where else []:
            (folder / file.name).symlink_to(file)
    return folder


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


def library_version(name):
    """("13.1.0", path), or (None, why not)."""
    if name == "nvrtc":
        try:
            major, minor = ctypes.c_int(), ctypes.c_int()
            ctypes.CDLL(SONAMES[name]).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        except (OSError, AttributeError) as error:
            return None, str(error)
        return f"{major.value}.{minor.value}", SONAMES[name]
    function, integer, by_address = {"cublasLt": ("cublasLtGetVersion", ctypes.c_size_t, False), "cudnn": ("cudnnGetVersion", ctypes.c_size_t, False),
                                     "nccl": ("ncclGetVersion", ctypes.c_int, True)}[name]
    number, path = answer(SONAMES[name], function, integer, by_address)
    return number and dotted(number, 10000, 100), path


def versions():
    driver, driver_path = answer(DRIVER, "cuDriverGetVersion", by_address=True)
    present, no_device = devices()
    asked = {name: library_version(name) for name in ("cublasLt", "cudnn", "nccl")}
    return {"devices": present, "no_device": no_device,
            **{name: {"version": version, "path": path} for name, (version, path) in asked.items()},
            "driver": {"version": driver_release(), "cuda": driver and f"{driver // 1000}.{driver % 1000 // 10}", "path": driver_path}}


def refusals(found, built_against):
    """Why libraries that are present cannot be used: another major version, or older than the headers of the build."""
    problems = []
    for name, wanted in built_against.items():
        have = found[name]["version"]
        if have is not None and not is_usable(have, wanted):
            problems.append(f"{name} {have} ({found[name]['path']}): expected {numbers(wanted)[0]}, at least {wanted}, which this bundle was built "
                            "against, and no newer one was found")
    return problems


def main():
    if sys.argv[1:] == ["--versions"]:
        print(json.dumps(versions()))
    elif len(sys.argv) == 3 and sys.argv[1] == "--version-of" and sys.argv[2] in SONAMES:
        version, _ = library_version(sys.argv[2])
        print(version or "")
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
