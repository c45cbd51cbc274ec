#!/usr/bin/env python3
"""The files of deploy/monitoring: the dashboard's structure here, expressions and alert rules by promtool.

    tests/deploy/monitoring_test.py

That every metric they name is exported by a real run is checked in tests/e2e/metrics_test.cc. promtool is that of Debian's
`prometheus` (19 MB), on the PATH or named by RAVEL_PROMTOOL; without it the tests that need it are skipped.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "testing"))
import required  # noqa: E402

MONITORING = ROOT / "deploy" / "monitoring"
PROMTOOL = os.environ.get("RAVEL_PROMTOOL") or shutil.which("promtool")
NEEDS_PROMTOOL = required.skip_unless(PROMTOOL, "promtool", "promtool is not installed (Debian: prometheus); set RAVEL_PROMTOOL")


def promtool(*arguments):
    run = subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    return run.returncode, run.stdout + run.stderr


def dashboard():
    return json.loads((MONITORING / "dashboard.json").read_text())


def expressions():
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


class DashboardTest(unittest.TestCase):
    def test_panels_have_names_queries_and_places_of_their_own(self):
        ids, taken = set(), set()
        for panel in dashboard()["panels"]:
            self.assertNotIn(panel["id"], ids)
            ids.add(panel["id"])
            place = panel["gridPos"]
            self.assertLessEqual(place["x"] + place["w"], 24, panel["title"])
            for x in range(place["x"], place["x"] + place["w"]):
                for y in range(place["y"], place["y"] + place["h"]):
                    self.assertNotIn((x, y), taken, panel["title"])
                    taken.add((x, y))
            if panel["type"] != "row":
                self.assertTrue(panel["title"] and panel["description"] and panel["targets"], panel["id"])
                self.assertEqual(len({t["refId"] for t in panel["targets"]}), len(panel["targets"]), panel["title"])

    def test_variables_that_are_used_are_declared(self):
        text = (MONITORING / "dashboard.json").read_text()
        declared = {variable["name"] for variable in dashboard()["templating"]["list"]}
        used = {name for name in re.findall(r"\$\{?(\w+)", text) if not name.startswith("__")}  # those are Grafana's own
        self.assertEqual(used, declared)

    @NEEDS_PROMTOOL
    def test_expressions_parse(self):
        rules = [f"      - {{record: 'ravel:check{i}', expr: {json.dumps(e.replace('$__rate_interval', '1m').replace('$', 'a'))}}}"
                 for i, e in enumerate(expressions())]
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "rules.yaml"
            file.write_text("groups:\n  - name: dashboard\n    rules:\n" + "\n".join(rules) + "\n")
            code, said = promtool("check", "rules", file)
        self.assertEqual(code, 0, said)
        self.assertIn(f"{len(rules)} rules found", said)


@NEEDS_PROMTOOL
class AlertsTest(unittest.TestCase):
    def test_rules_and_configuration_are_valid(self):
        code, said = promtool("check", "rules", MONITORING / "alerts.yaml")
        self.assertEqual(code, 0, said)
        code, said = promtool("check", "config", MONITORING / "prometheus.yaml")
        self.assertEqual(code, 0, said)

    def test_the_configuration_of_several_hosts_is_valid_beside_its_files(self):
        with tempfile.TemporaryDirectory() as folder:
            for name in ("prometheus-hosts.yaml", "alerts.yaml"):
                shutil.copy(MONITORING / name, folder)
            configuration = pathlib.Path(folder) / "prometheus-hosts.yaml"
            self.assertNotEqual(promtool("check", "config", configuration)[0], 0, "its files are not there")
            for name in ("ca.pem", "site-ca.pem", "token"):
                (pathlib.Path(folder) / name).write_text("x\n")
            code, said = promtool("check", "config", configuration)
            self.assertEqual(code, 0, said)

    def fire(self, alerts):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "alerts.yaml").write_text(alerts)
            cases = pathlib.Path(folder) / "cases.yaml"
            text = (pathlib.Path(__file__).parent / "alerts_test.yaml").read_text()
            cases.write_text(text.replace("ALERTS", "alerts.yaml"))
            return promtool("test", "rules", cases)

    def test_alerts_fire_when_they_should_and_only_then(self):
        alerts = (MONITORING / "alerts.yaml").read_text()
        code, said = self.fire(alerts)
        self.assertEqual(code, 0, said)
        for good, bad in (("> 900", "> 90000"), ("[1h]) >= 4", "[1h]) >= 0"), ("< 0.8", "< 0.2"), ("== 0", "== 2"),
                          ("_heard_seconds > 300", "_heard_seconds > -1"), ("_heard_seconds > 300", "_heard_seconds > 30000")):
            self.assertIn(good, alerts)
            self.assertNotEqual(self.fire(alerts.replace(good, bad, 1))[0], 0, f"nothing noticed {bad}")

    def test_each_alert_has_a_case_that_fires(self):
        cases = (pathlib.Path(__file__).parent / "alerts_test.yaml").read_text()
        for name in re.findall(r"- alert: (\w+)", (MONITORING / "alerts.yaml").read_text()):
            self.assertRegex(cases, rf"alertname: {name}\n\s+exp_alerts:\n", name)


if __name__ == "__main__":
    unittest.main(verbosity=2)
