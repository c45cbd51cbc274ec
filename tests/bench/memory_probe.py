"""Peak memory of running processes: proportional set size (shared pages divided among their users), sampled."""
import os
import threading
import time


def proportional_kib(pid):
    """Pss of a process in KiB; None once it has ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("Pss:")), None)
    except OSError:
        return None


def parent_and_command(pid):
    """(parent id, command line with blanks between words); None once it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            parent = int(file.read().rsplit(")", 1)[1].split()[1])
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return parent, file.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return None


def descendants_with(text):
    """Ids of the processes below this one whose command line contains `text`."""
    known = {int(name): parent_and_command(name) for name in os.listdir("/proc") if name.isdigit()}
    known = {pid: facts for pid, facts in known.items() if facts}

    def below(pid):
        while pid in known and pid != os.getpid():
            pid = known[pid][0]
        return pid == os.getpid()

    return [pid for pid, (_, command) in known.items() if text in command and pid != os.getpid() and below(pid)]


class PeakPss:
    """with PeakPss("name") as probe: ...; then probe.peaks() is {process id: peak Pss in bytes} of the descendants whose command
    line contains the name. They may come and go."""

    def __init__(self, name, every_seconds=0.05):
        self.name, self.every_seconds = name, every_seconds
        self.samples = []  # (time, process id, bytes); those of one round have one time
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self):
        processes, round_ = [], 0
        while not self._ended.wait(self.every_seconds):
            if round_ % 4 == 0:
                processes = descendants_with(self.name)
            round_ += 1
            now = time.time()
            for process in processes:
                kib = proportional_kib(process)
                if kib is not None:
                    self.samples.append((now, process, kib * 1024))

    def peaks(self, until=float("inf")):
        """Of the samples before the time `until`."""
        found = {}
        for at, process, size in self.samples:
            if at < until:
                found[process] = max(found.get(process, 0), size)
        return found

    def peak_together(self, processes, until=float("inf")):
        """The most that these processes had at one time."""
        rounds = {}
        for at, process, size in self.samples:
            if at < until and process in processes:
                rounds[at] = rounds.get(at, 0) + size
        return max(rounds.values(), default=0)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()
