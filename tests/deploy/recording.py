"""Recorded metrics of a run, and a Prometheus on loopback that serves them. Standard library only.

A recording is gzipped text, so that it stays small and can be read with zcat:

    # ravel recording 1
    # begin 1795790000 interval 1 scrapes 240
    # event 84 kill -9 of worker-1
    ravel_job_step{namespace="default",job="quickstart",...}<TAB>0 0 1 - 3 ...

Each line has a series and its value at every scrape; "-" where the scrape did not have it. `openmetrics` turns that into the
text that `promtool tsdb create-blocks-from openmetrics` takes.
"""
import gzip
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request

HEAD = "# ravel recording 1"
ABSENT = "-"
# A series is gone that many seconds after its last sample. Real scrapes write a marker when a series ends; imported text has
# none, and without this a job would be in all of its states for five minutes.
LOOKBACK_SECONDS = 3
START_SECONDS = 30
KILL_SECONDS = 10


class Recording:
    def __init__(self, begin, interval=1):
        self.begin = begin  # seconds since 1970 of the first scrape
        self.interval = interval
        self.scrapes = 0
        self.events = []  # (scrape, text)
        self.series = {}  # name and labels -> values as text, one for each scrape

    def add(self, samples):
        """One scrape of all targets: {series: value as text}."""
        for name in samples:
            self.series.setdefault(name, [ABSENT] * self.scrapes)
        self.scrapes += 1
        for name, values in self.series.items():
            values.append(samples.get(name, ABSENT))

    def note(self, text):
        self.events.append((self.scrapes, text))

    def time_of(self, scrape):
        return self.begin + scrape * self.interval

    @property
    def end(self):
        return self.time_of(self.scrapes - 1)

    def values(self, name, *labels):
        """(time, value) of the one series of this name whose labels hold all of the texts."""
        found = [series for series in self.series
                 if re.match(r"[^{]*", series).group() == name and all(label in series for label in labels)]
        assert len(found) == 1, f"{len(found)} series of {name} with {labels}"
        return [(self.time_of(i), float(value)) for i, value in enumerate(self.series[found[0]]) if value != ABSENT]

    def write(self, path):
        lines = [HEAD, f"# begin {self.begin} interval {self.interval} scrapes {self.scrapes}"]
        lines += [f"# event {scrape} {text}" for scrape, text in self.events]
        lines += [f"{name}\t{' '.join(self.series[name])}" for name in sorted(self.series)]
        # No time in the header: the same recording gives the same bytes.
        with gzip.GzipFile(path, "wb", compresslevel=9, mtime=0) as file:
            file.write(("\n".join(lines) + "\n").encode())


def read(path):
    lines = gzip.decompress(pathlib.Path(path).read_bytes()).decode().splitlines()
    head = re.fullmatch(r"# begin (\d+) interval (\d+) scrapes (\d+)", lines[1])
    if lines[0] != HEAD or not head:
        raise ValueError(f"{path}: no recording")
    recording = Recording(int(head.group(1)), int(head.group(2)))
    recording.scrapes = int(head.group(3))
    for line in lines[2:]:
        if line.startswith("# event "):
            scrape, text = line[len("# event "):].split(" ", 1)
            recording.events.append((int(scrape), text))
            continue
        name, values = line.split("\t")
        recording.series[name] = values.split(" ")
        if len(recording.series[name]) != recording.scrapes:
            raise ValueError(f"{path}: {name} has {len(recording.series[name])} values")
    return recording


def openmetrics(recording):
    lines = [f"{name} {value} {recording.time_of(i)}"
             for name in sorted(recording.series)
             for i, value in enumerate(recording.series[name]) if value != ABSENT]
    return "\n".join(lines) + "\n# EOF\n"


def programs():
    """Paths of promtool and prometheus, or None where one is missing."""
    promtool = os.environ.get("RAVEL_PROMTOOL") or shutil.which("promtool")
    if promtool is None:
        return None
    beside = pathlib.Path(promtool).with_name("prometheus")
    prometheus = str(beside) if beside.exists() else shutil.which("prometheus")
    return (promtool, prometheus) if prometheus else None


class Server:
    """A Prometheus on loopback over a recording, with rules; for `with`."""

    def __init__(self, recording, rules=()):
        self.promtool, self.prometheus = programs()
        self.recording = recording
        self.rules = [str(pathlib.Path(rule).resolve()) for rule in rules]
        self.folder = tempfile.TemporaryDirectory(prefix="ravel-prometheus-")
        self.process = None

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.folder.cleanup()

    def start(self):
        folder = pathlib.Path(self.folder.name)
        (folder / "recording.txt").write_text(openmetrics(self.recording))
        subprocess.run([self.promtool, "tsdb", "create-blocks-from", "openmetrics", folder / "recording.txt", folder / "data"],
                       check=True, capture_output=True, timeout=START_SECONDS)
        (folder / "prometheus.yaml").write_text(
            json.dumps({"global": {"evaluation_interval": "1s"}, "rule_files": self.rules}))
        log = folder / "log"
        with open(log, "w", encoding="utf-8") as out:
            self.process = subprocess.Popen(
                [self.prometheus, f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data",
                 "--web.listen-address=127.0.0.1:0", "--storage.tsdb.retention.time=100y",
                 f"--query.lookback-delta={LOOKBACK_SECONDS}s"],
                stdout=out, stderr=subprocess.STDOUT, cwd=folder)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            said = log.read_text()
            port = re.search(r'msg="Listening on".* address=127\.0\.0\.1:([1-9]\d*)', said)
            if port and "Server is ready" in said:
                self.address = f"http://127.0.0.1:{port.group(1)}"
                return
            time.sleep(0.1)
        raise RuntimeError("prometheus did not start:\n" + log.read_text()[-3000:])

    def get(self, path, **parameters):
        url = f"{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def query_range(self, query, begin, end, step):
        """[(labels, [(time, value)])] of a query."""
        result = self.get("query_range", query=query, start=begin, end=end, step=step)["result"]
        return [(row["metric"], [(t, float(value)) for t, value in row["values"]]) for row in result]

    def query(self, query, at):
        result = self.get("query", query=query, time=at)["result"]
        return [(row["metric"], [(row["value"][0], float(row["value"][1]))]) for row in result]

    def wait_for_rules(self):
        """Groups of rules, once each rule was evaluated."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            groups = self.get("rules")["groups"]
            if groups and all(rule["health"] != "unknown" for group in groups for rule in group["rules"]):
                return groups
            time.sleep(0.2)
        raise RuntimeError(f"rules were not evaluated: {groups}")

    def label_values(self, label, match, begin, end):
        return self.get(f"label/{label}/values", **{"match[]": match, "start": begin, "end": end})
