#!/usr/bin/env python3
"""Records the metrics of a real job that loses a worker: one coordinator and two workers on this machine, all scraped once a
second. A worker is killed with SIGKILL half-way, and started again some time later.

    tests/deploy/record_run.py --bin build/dev/bin tests/deploy/recording.txt.gz

The job is deploy/examples/quickstart.yaml over the corpus of deploy/quickstart.sh. It takes some four minutes on two cores.
"""
import argparse
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import recording  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "deploy" / "examples" / "quickstart.yaml"
QUIET_SECONDS = 6  # before the job, and after its end
DOWN_SECONDS = 30  # between the kill and the new start of the worker
LOOK_SECONDS = 10  # between two calls of `ravelctl get`
LIMIT_SECONDS = 900
SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)")


def scrape(target):
    """Samples as Prometheus would store them: with the labels `job` and `instance` that it adds, and `up`."""
    labels = f'instance="{target["instance"]}",job="{target["job"]}"'
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{target['port']}/metrics", timeout=0.8) as answer:
            text = answer.read().decode()
    except (OSError, urllib.error.URLError):
        return {f"up{{{labels}}}": "0"}
    samples = {f"up{{{labels}}}": "1"}
    for line in text.splitlines():
        match = SAMPLE.fullmatch(line)
        if match is None:
            continue
        name, own, value = match.groups()
        added = f'instance="{target["instance"]}"' if own and re.search(r'(^|,)job="', own) else labels
        samples[f"{name}{{{own + ',' if own else ''}{added}}}"] = value
    return samples


class Cluster:
    def __init__(self, binaries, folder):
        self.binaries = binaries
        self.folder = folder
        self.processes = {}
        self.targets = {}
        self.address = ""

    def start(self, name, program, *arguments):
        port_file = self.folder / f"{name}.http-port"
        port_file.unlink(missing_ok=True)
        with open(self.folder / f"{name}.log", "a", encoding="utf-8") as log:
            self.processes[name] = subprocess.Popen(
                [self.binaries / program, "--dev-loopback", "--http-listen", "127.0.0.1:0", "--http-port-file", port_file,
                 *arguments], stdout=log, stderr=subprocess.STDOUT)
        self.targets[name] = {"instance": name, "job": program, "port": self.wait_for(port_file)}

    def wait_for(self, file):
        for _ in range(300):
            if file.exists() and file.read_text().strip():
                return int(file.read_text())
            time.sleep(0.1)
        sys.exit(f"record_run.py: {file} was not written; logs are in {self.folder}")

    def start_coordinator(self):
        port_file = self.folder / "port"
        self.start("coordinator", "ravel-coordinator", "--listen", "127.0.0.1:0", "--state-dir", self.folder / "state",
                   "--port-file", port_file)
        self.address = f"127.0.0.1:{self.wait_for(port_file)}"

    def start_worker(self, name):
        self.start(name, "ravel-worker", "--coordinator", self.address, "--node-id", name, "--cpu-devices", "1",
                   "--work-dir", self.folder / name)

    def submit(self, job):
        with open(self.folder / "follow.log", "w", encoding="utf-8") as log:
            self.processes["follow"] = subprocess.Popen(
                [self.binaries / "ravelctl", "--coordinator", self.address, "submit", "-f", job, "--follow"],
                stdout=log, stderr=subprocess.STDOUT)

    def look(self):
        """What a person who waits does: a call of the API. Nobody waits for it here."""
        self.processes["look"] = subprocess.Popen(
            [self.binaries / "ravelctl", "--coordinator", self.address, "get", "quickstart"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill(self, name):
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def is_idle(self, name):
        return name not in self.processes or self.processes[name].poll() is not None

    def stop(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def job_file(binaries, folder, steps):
    """The example with this folder's paths, on a corpus that is prepared once under build/."""
    data = ROOT / "build" / "quickstart" / "bible"
    subprocess.run([ROOT / "deploy" / "corpus.sh", "bible", data / "text"], check=True)
    text = EXAMPLE.read_text()
    vocabulary = re.search(r"vocabSize: (\d+)", text).group(1)
    tokens = data / f"tokens-{vocabulary}"
    if not tokens.with_name(tokens.name + ".idx").exists():
        subprocess.run([binaries / "ravelctl", "data", "prepare", "--input", *sorted((data / "text").glob("*.txt")),
                        "--tokenizer", f"train-bpe:{vocabulary}", "--validation-fraction", "0.02", "--output", tokens],
                       check=True)
    text = text.replace("/var/tmp/ravel-quickstart/tokens", str(tokens)).replace("/var/tmp/ravel-quickstart", str(folder))
    text = re.sub(r"(?m)^    steps: \d+", f"    steps: {steps}", text)
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def value_of(samples, name, label=""):
    return sum(float(value) for series, value in samples.items() if series.startswith(name + "{") and label in series)


class Story:
    """What happens at which scrape."""

    def __init__(self, cluster, kept, job, steps):
        self.cluster, self.kept, self.job, self.steps = cluster, kept, job, steps
        self.killed = self.returned = self.ended = None

    def tell(self, text):
        self.kept.note(text)
        print(f"{self.kept.scrapes:4d} s  {text}", flush=True)

    def turn(self, samples):
        """Acts on the newest scrape; False once all is told."""
        now = self.kept.scrapes
        step = value_of(samples, "ravel_job_step")
        if step > 0 and now % LOOK_SECONDS == 0 and self.cluster.is_idle("look"):
            self.cluster.look()
        if now == QUIET_SECONDS:
            self.cluster.submit(self.job)
            self.tell("submit")
        elif self.killed is None and step >= self.steps * 0.4:
            self.cluster.kill("worker-1")
            self.killed = now
            self.tell(f"kill -9 of worker-1 at step {step:.0f}")
        elif self.killed is not None and self.returned is None and now >= self.killed + DOWN_SECONDS:
            self.cluster.start_worker("worker-1")
            self.returned = now
            self.tell("worker-1 is started again")
        elif self.ended is None and value_of(samples, "ravel_job_state", 'state="SUCCEEDED"') == 1:
            self.ended = now
            self.tell("the job has succeeded")
        if value_of(samples, "ravel_job_state", 'state="FAILED"') or now > LIMIT_SECONDS:
            sys.exit(f"record_run.py: the job did not succeed; logs are in {self.cluster.folder}")
        return self.ended is None or now < self.ended + QUIET_SECONDS


def record(cluster, job, steps):
    cluster.start_coordinator()
    for name in ("worker-0", "worker-1"):
        cluster.start_worker(name)
    begin = int(time.time()) + 1
    kept = recording.Recording(begin)
    story = Story(cluster, kept, job, steps)
    while True:
        # A sample gets the time at which its scrape was due, as Prometheus does it.
        time.sleep(max(0.0, kept.time_of(kept.scrapes) - time.time()))
        samples = {}
        for target in cluster.targets.values():
            samples.update(scrape(target))
        kept.add(samples)
        if not story.turn(samples):
            return kept


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--bin", type=pathlib.Path, required=True, help="folder of built programs")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("output", type=pathlib.Path)
    arguments = parser.parse_args()
    binaries = arguments.bin.resolve()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ravel-recording-"))
    job = job_file(binaries, folder, arguments.steps)
    cluster = Cluster(binaries, folder)
    try:
        kept = record(cluster, job, arguments.steps)
    finally:
        cluster.stop()
    kept.write(arguments.output)
    print(f"{arguments.output}: {kept.scrapes} scrapes of {len(kept.series)} series, {arguments.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
