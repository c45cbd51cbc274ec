#!/usr/bin/env python3
"""What a training benchmark does with runs that were kept, killed, failed or wrong. Both sides are fakes: no device, no PyTorch."""
import pathlib
import sys
import tempfile
import unittest

BENCH = pathlib.Path(__file__).resolve().parent
sys.path += [str(BENCH), str(BENCH / "peers"), str(BENCH.parent / "testing")]
import gpu_training_speed as speed  # noqa: E402
from kept_runs import KeptRuns  # noqa: E402

LOSSES = [6.0, 5.5, 5.0, 4.5, 4.0]


class FakeWork:
    """Both sides of the case 3b; `events` names the runs in their order."""
    case, kind, flops = "3b", "gpu", 2e10

    def __init__(self, killed_at=None, failing=(), peer_losses=LOSSES):
        self.killed_at, self.failing, self.peer_losses, self.events = killed_at, failing, peer_losses, []

    def begin(self, name):
        if name == self.killed_at:
            raise KeyboardInterrupt
        self.events.append(name)

    def run(self, pair):  # as OurSide has it
        self.begin(f"ours {pair}")
        return LOSSES, 2.0

    def peer(self, kind):
        self.begin(kind)
        if kind in self.failing:
            raise speed.PeerFailed("exit 1: out of memory")
        return self.peer_losses, 4.0 if kind == "single" else 3.0, "torch 0"

    def rate(self, seconds):
        return 1200 / seconds


class KeptRunsTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.file = pathlib.Path(self.folder.name, "runs.jsonl")

    def kept(self, **key):
        return KeptRuns(self.file, {"case": "3b", **key})

    def measure(self, work, pairs):
        return speed.measure(work, pairs, self.kept(), work)

    def test_a_killed_benchmark_goes_on_with_the_run_it_was_killed_in(self):
        first = FakeWork(killed_at="fsdp2")
        with self.assertRaises(KeyboardInterrupt):
            self.measure(first, 2)
        second = FakeWork()
        samples, _, _ = self.measure(second, 2)
        self.assertEqual(first.events + second.events, ["ours 0", "single", "fsdp2", "ours 1", "single", "fsdp2"])
        self.assertEqual(samples, {"ours": [600, 600], "single": [300, 300], "fsdp2": [400, 400]})

    def test_more_pairs_add_to_those_that_are_there(self):
        self.measure(FakeWork(), 1)
        more = FakeWork()
        self.measure(more, 3)
        self.assertEqual(more.events.count("single"), 2)
        again = FakeWork()
        self.measure(again, 3)
        self.assertEqual(again.events, [])

    def test_runs_of_other_programs_are_not_mixed(self):
        self.kept(programs="a").add("ours", 0, rate=1)
        self.assertIsNone(self.kept(programs="b").get("ours", 0))
        self.assertIsNotNone(self.kept(programs="a").get("ours", 0))

    def test_a_line_that_was_cut_off_is_no_run(self):
        self.kept().add("ours", 0, rate=1)
        self.file.write_text(self.file.read_text() + '{"key": {"case": "3b"}, "side": "ours", "pa')
        self.kept().add("ours", 1, rate=2)
        self.assertEqual([run["pair"] for run in self.kept().runs], [0, 1])

    def test_a_failed_peer_is_recorded_once_and_the_other_one_is_the_peer(self):
        work = FakeWork(failing=("fsdp2",))
        samples, worst, version = self.measure(work, 2)
        self.assertEqual(work.events.count("fsdp2"), 1)
        line = speed.line_of(work, samples, worst, version, {"fsdp2": self.kept().failure("fsdp2")})
        self.assertEqual((line["ratio"], line["peer"]), (2.0, 300))
        self.assertEqual(line["peers"]["fsdp2"]["failed"], "exit 1: out of memory")

    def test_the_better_peer_is_the_peer(self):
        work = FakeWork()
        self.assertEqual(speed.line_of(work, *self.measure(work, 1), {})["ratio"], 1.5)

    def test_without_any_peer_nothing_is_reported(self):
        with self.assertRaisesRegex(SystemExit, "no peer is left: single: exit 1.*; fsdp2: exit 1"):
            self.measure(FakeWork(failing=("single", "fsdp2")), 1)

    def test_different_losses_are_no_speed(self):
        with self.assertRaisesRegex(SystemExit, "losses of Ravel and single differ"):
            self.measure(FakeWork(peer_losses=[2 * loss for loss in LOSSES]), 1)

    def test_a_peer_with_too_few_losses_is_no_speed(self):
        with self.assertRaisesRegex(SystemExit, "losses of Ravel and single differ"):
            self.measure(FakeWork(peer_losses=LOSSES[:3]), 1)


class PeerTest(unittest.TestCase):
    def test_what_a_peer_said_last_is_why_it_failed(self):
        work = object.__new__(speed.Workload)
        work.shape = {}
        work.case, work.kind, work.model, work.batches, work.steps, work.lr = "no-such-shape", "cpu", "m", "b", 1, 1.0
        with self.assertRaisesRegex(speed.PeerFailed, "exit [12]: "):
            work.peer("single")


if __name__ == "__main__":
    unittest.main()
