#!/usr/bin/env python3
"""The dashboard and the alerts of deploy/monitoring over a recorded run, in which a worker was killed and came back.

    RAVEL_PROMTOOL=$(tests/deploy/promtool.sh | tail -1) RAVEL_BIN_DIR=build/dev/bin tests/deploy/recorded_run_test.py

A Prometheus on loopback serves tests/deploy/recording.txt.gz, which record_run.py has made. Without promtool and prometheus
(Debian: prometheus), or without built programs, the tests that need them are skipped.
"""
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import urllib.request
import xml.dom.minidom

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).resolve().parents[1] / "testing")]
import dashboard  # noqa: E402
import draw_dashboard  # noqa: E402
import record_run  # noqa: E402
import recording  # noqa: E402
import required  # noqa: E402

ALERTS = dashboard.ROOT / "deploy" / "monitoring" / "alerts.yaml"
PICTURE = dashboard.ROOT / "deploy" / "monitoring" / "dashboard.svg"
# Queries without an answer in this run, by panel, and why.
EMPTY = {"MFU": "the run was on CPUs, whose peak is not known"}
# Alerts whose condition holds for a moment of this run, none of them for long enough to fire.
PENDING = {"RavelNodesLost"}
STEP = 1


class RecordingTest(unittest.TestCase):
    def test_what_is_written_is_read_again(self):
        kept = recording.Recording(1000)
        kept.add({"up": "1"})
        kept.note("kill -9 of worker-1")
        kept.add({"up": "0", 'x{job="a b"}': "2.5"})
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "r.gz"
            kept.write(path)
            again = recording.read(path)
        self.assertEqual((again.series, again.events, again.end), (kept.series, kept.events, 1001))
        self.assertEqual(again.values("x", 'job="a b"'), [(1001, 2.5)])
        self.assertEqual(recording.openmetrics(again), 'up 1 1000\nup 0 1001\nx{job="a b"} 2.5 1001\n# EOF\n')

    def test_variables_are_put_in(self):
        self.assertEqual(dashboard.expand('a{j="$job"}[$__rate_interval] ${job}s', {"job": "x", "__rate_interval": "1m"}),
                         'a{j="x"}[1m] xs')


@required.skip_unless(recording.programs(), "promtool", "promtool or prometheus is missing (Debian: prometheus); set RAVEL_PROMTOOL")
class RecordedRunTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.kept = recording.read(draw_dashboard.RECORDING)
        cls.board = dashboard.load()
        cls.server = recording.Server(cls.kept, rules=[ALERTS])
        cls.enterClassContext(cls.server)
        cls.variables = dashboard.variables_of(cls.board, cls.server, cls.kept.begin, cls.kept.end)
        # The last scrapes before it.
        events = {what.split(" at ")[0]: cls.kept.time_of(scrape - 1) for scrape, what in cls.kept.events}
        cls.killed = events["kill -9 of worker-1"]
        cls.returned = events["worker-1 is started again"]

    def lines(self, title, end=None):
        """Lines of a panel by legend, up to a time."""
        panel = next(panel for panel in dashboard.panels(self.board) if panel["title"] == title)
        lines = [line for target in panel["targets"] for line in dashboard.answer(
            self.server, target, self.variables, self.kept.begin, end or self.kept.end, STEP)]
        self.assertEqual(len({line.legend for line in lines}), len(lines), f"{title}: two lines have one legend")
        return {line.legend: dict(line.points) for line in lines}

    def test_every_query_of_every_panel_has_an_answer(self):
        for panel, target in dashboard.queries(self.board):
            lines = dashboard.answer(self.server, target, self.variables, self.kept.begin, self.killed, STEP)
            lines += dashboard.answer(self.server, target, self.variables, self.killed, self.kept.end, STEP)
            finite = [value for line in lines for _, value in line.points if math.isfinite(value)]
            with self.subTest(panel=panel["title"], query=target["expr"]):
                if panel["title"] in EMPTY:
                    self.assertFalse(finite, "has an answer and is listed as empty")
                else:
                    self.assertTrue(finite, "no answer: a wrong query, or a reason for EMPTY")

    def test_panels_show_the_failure(self):
        self.assertEqual(self.lines("Restarts", self.killed)["ravel_job_restarts_total"][self.killed], 0)
        self.assertGreaterEqual(self.lines("Restarts")["ravel_job_restarts_total"][self.kept.end], 1)
        causes = self.lines("Restarts by cause")
        self.assertIn("NodeLost", causes)
        self.assertTrue(all(at > self.killed and value >= 0.9 for at, value in causes["NodeLost"].items()), causes)

        lost = self.lines("Device time by cause")
        for cause in ("detect", "replay"):
            self.assertEqual(lost[cause][self.killed], 0)
            self.assertGreater(max(lost[cause].values()), 0)
        nodes = self.lines("Nodes")
        self.assertEqual([nodes["READY"][at] for at in (self.killed, self.returned, self.kept.end)], [2, 1, 2])
        self.assertEqual([nodes["LOST"][at] for at in (self.killed, self.returned, self.kept.end)], [0, 1, 0])
        steps = self.lines("Step")["step"]
        after = [value for at, value in steps.items() if self.killed < at < self.returned]
        self.assertLess(min(after), steps[self.killed], "the step does not fall back to the commit")
        held = self.lines("Devices")["held"]
        self.assertEqual([held[at] for at in (self.killed, self.returned)], [2, 1])
        # The seconds of all causes are those of the devices that it held.
        whole = sum(points[self.killed] for points in lost.values())
        self.assertAlmostEqual(whole, 2, delta=0.1)

    def test_a_job_is_in_one_state_at_a_time(self):
        states = [values for _, values in self.server.query_range(
            'count(ravel_job_state{namespace="default"})', self.kept.begin, self.kept.end, STEP)]
        several = [at for at, count in states[0] if count > 1]
        # For LOOKBACK_SECONDS after a change the old state is still there.
        self.assertLess(len(several), 60)
        self.assertEqual(list(self.lines("State")), ["SUCCEEDED"])
        self.assertEqual(list(self.lines("State", self.killed)), ["RUNNING"])

    def test_alert_rules_evaluate(self):
        groups = self.server.wait_for_rules()
        rules = [rule for group in groups for rule in group["rules"]]
        self.assertEqual({rule["name"] for rule in rules}, set(re.findall(r"- alert: (\w+)", ALERTS.read_text())))
        self.assertEqual([rule["name"] for rule in rules if rule["health"] != "ok"], [])
        held = {}
        for rule in rules:
            for _, points in self.server.query_range(rule["query"], self.kept.begin, self.kept.end, STEP):
                held.setdefault(rule["name"], []).extend(at for at, _ in points)
        self.assertEqual(set(held), PENDING)
        self.assertTrue(all(self.killed < at <= self.returned + 10 for at in held["RavelNodesLost"]))

    def test_the_picture_is_that_of_this_dashboard(self):
        drawn = draw_dashboard.picture(self.board, self.kept, self.server)
        xml.dom.minidom.parseString(drawn)
        for panel in self.board["panels"]:
            self.assertIn(dashboard.expand(panel["title"], self.variables), drawn)
        self.assertLess(len(drawn), 200_000)
        self.assertTrue(drawn == PICTURE.read_text(), "the dashboard or the recording has changed: run draw_dashboard.py again")


@required.skip_unless(recording.programs() and os.environ.get("RAVEL_BIN_DIR"), "promtool", "RAVEL_BIN_DIR names no built programs")
class PagesTest(unittest.TestCase):
    def test_promtool_takes_the_pages_of_real_programs(self):
        with tempfile.TemporaryDirectory() as folder:
            cluster = record_run.Cluster(pathlib.Path(os.environ["RAVEL_BIN_DIR"]).resolve(), pathlib.Path(folder))
            try:
                cluster.start_coordinator()
                cluster.start_worker("worker-0")
                for target in cluster.targets.values():
                    with urllib.request.urlopen(f"http://127.0.0.1:{target['port']}/metrics", timeout=10) as answer:
                        page = answer.read()
                    check = subprocess.run([recording.programs()[0], "check", "metrics"], input=page, capture_output=True,
                                           timeout=60, check=False)
                    self.assertEqual((check.returncode, check.stdout + check.stderr), (0, b""), target)
            finally:
                cluster.stop()


if __name__ == "__main__":
    unittest.main(verbosity=2)
