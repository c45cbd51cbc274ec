"""Runs of a benchmark in a file, a JSON line each, so that a benchmark that was killed goes on with the next one."""
import hashlib
import json
import os
import pathlib

import cluster


def digest_of_programs():
    """Of what a job runs: results of other builds are not mixed."""
    digest = hashlib.sha256()
    programs = cluster.default_binaries()
    for file in (programs / "ravel-trainer", pathlib.Path(os.environ.get("RAVEL_CUDA_LIBRARY", programs / "libravel_cuda.so"))):
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()


class KeptRuns:
    """The runs of `file` with this key. Lines with another key stay and are not read; a line that was cut off is no run."""

    def __init__(self, file, key):
        self.file, self.key, self.runs = pathlib.Path(file), key, []
        text = self.file.read_text() if self.file.exists() else ""
        for line in text.splitlines():
            try:
                run = json.loads(line)
            except ValueError:
                continue
            if run["key"] == key:
                self.runs.append(run)
        self.cut_off = bool(text) and not text.endswith("\n")

    def add(self, side, pair, **facts):
        run = {"key": self.key, "side": side, "pair": pair, **facts}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with open(self.file, "a") as file:
            file.write(("\n" if self.cut_off else "") + json.dumps(run) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.cut_off = False
        self.runs.append(run)

    def get(self, side, pair):
        return next((run for run in self.runs if run["side"] == side and run["pair"] == pair), None)

    def failure(self, side):
        """Why a side failed, once and for all pairs; None where it did not."""
        return next((run["failed"] for run in self.runs if run["side"] == side and "failed" in run), None)
