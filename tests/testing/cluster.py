"""A whole Ravel on loopback for scripts: one coordinator, N worker daemons. Standard library only."""
import json
import os
import pathlib
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def default_binaries():
    """The folder of the programs: RAVEL_BIN_DIR, else bin/ of the newest of the usual builds."""
    if os.environ.get("RAVEL_BIN_DIR"):
        return pathlib.Path(os.environ["RAVEL_BIN_DIR"])
    found = [p for p in (ROOT / "build" / name / "bin" for name in ("release", "dev", "cuda")) if (p / "ravelctl").exists()]
    if not found:
        raise SystemExit("no build/{release,dev}/bin/ravelctl: build first (cmake --preset release && cmake --build --preset release)")
    return max(found, key=lambda p: (p / "ravelctl").stat().st_mtime)


class Cluster:
    """with Cluster(folder, workers=2) as cluster: cluster.train(job_file); all processes end with the block."""

    def __init__(self, folder, workers, binaries=None, environment=None, pin_cores=False, worker_options=("--cpu-devices", "1"),
                 detection="1s"):
        self.folder = pathlib.Path(folder)
        self.workers = workers
        self.binaries = pathlib.Path(binaries or default_binaries())
        self.environment = {**os.environ, **(environment or {})}
        self.pin_cores = pin_cores
        self.worker_options = list(worker_options)
        self.detection = detection
        self.processes = []

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.kill()
            process.wait()

    def _spawn(self, name, command):
        log = open(self.folder / f"{name}.log", "ab")
        process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                   env=self.environment)
        log.close()
        self.processes.append(process)

    def _start(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        port = self.folder / "port"
        self._spawn("coordinator", [self.binaries / "ravel-coordinator", "--dev-loopback", "--listen", "127.0.0.1:0",
                                    "--state-dir", self.folder / "state", "--port-file", port, "--detection", self.detection,
                                    "--enable-faults"])
        self._until(lambda: port.exists() and port.read_text().strip(), "the coordinator's port")
        self.address = f"127.0.0.1:{port.read_text().strip()}"
        for i in range(self.workers):
            pin = ["taskset", "-c", str(i % os.cpu_count())] if self.pin_cores else []
            self._spawn(f"worker-{i}", pin + [
                self.binaries / "ravel-worker", "--dev-loopback", "--coordinator", self.address, "--node-id", f"worker-{i}",
                "--work-dir", self.folder / f"worker-{i}", "--enable-faults", *self.worker_options])
        self._until(lambda: self.ctl("nodes", "list", "-o", "json", check=False).stdout.count('"READY"') == self.workers,
                    f"{self.workers} ready workers")

    def _until(self, condition, what, seconds=20):
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                logs = "".join(p.read_text(errors="replace")[-1000:] for p in self.folder.glob("*.log"))
                raise RuntimeError(f"waited in vain for {what}:\n{logs}")
            time.sleep(0.05)

    def ctl(self, *arguments, check=True):
        """ravelctl ARGUMENTS...; its output as text."""
        command = [str(self.binaries / "ravelctl"), "--coordinator", self.address] + [str(a) for a in arguments]
        run = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        if check and run.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: exit {run.returncode}\n{run.stdout[-2000:]}{run.stderr[-4000:]}")
        return run

    def train(self, job_file, name):
        """Submits, waits for success, and returns the history: one dict per step."""
        self.ctl("submit", "-f", job_file, "--follow")
        return [json.loads(line) for line in self.ctl("metrics", name, "-o", "jsonl").stdout.splitlines() if line.strip()]

    def trainers(self):
        """Process ids of the trainers, in the order of their start."""
        daemons, found = {process.pid for process in self.processes}, []
        for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
            try:
                name, rest = stat.read_text().split("(", 1)[1].rsplit(")", 1)
            except (OSError, IndexError):
                continue  # it has ended
            if name == "ravel-trainer" and int(rest.split()[1]) in daemons:
                found.append(int(stat.parent.name))
        return sorted(found)

    def job(self, name):
        return json.loads(self.ctl("get", name, "-o", "json").stdout)

    def events(self, name):
        """What happened to a job, oldest first: dicts with timeMs, type, reason, rank, message and so on, all as text."""
        return [json.loads(line) for line in self.ctl("events", name, "-o", "jsonl").stdout.splitlines() if line.strip()]

    def step_records(self, uid):
        """Every step that any epoch of a job has reported, with time_ms, as far as the coordinator has written it."""
        file = self.folder / "state" / "metrics" / f"{uid}.jsonl"
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[:text.rfind("\n") + 1].splitlines()]

    def worker_log(self, i=0):
        """The lines of a daemon's log, as dicts."""
        return [json.loads(line) for line in (self.folder / f"worker-{i}.log").read_text(errors="replace").splitlines() if line.startswith("{")]

    def checkpoints(self, name):
        """{step: directory} of the committed checkpoints."""
        listed = json.loads(self.ctl("checkpoints", "list", name, "-o", "json").stdout)
        return {int(c["step"]): c["path"] for c in listed["items"] if c["state"] == "COMMITTED"}


def batch(job_file, step, binaries=None):
    """Token ids of global batch `step` (0-based): a list of samples of sequenceLength + 1 ids, lane by lane."""
    run = subprocess.run([str(pathlib.Path(binaries or default_binaries()) / "ravelctl"), "data", "batch", "-f", str(job_file),
                          "--step", str(step), "-o", "json"], capture_output=True, text=True)
    if run.returncode != 0:
        raise RuntimeError(f"data batch: exit {run.returncode}: {run.stderr}")
    return [sample["tokens"] for lane in json.loads(run.stdout)["lanes"] for sample in lane["samples"]]
