#!/usr/bin/env python3
"""first_hour.sh with a bundle whose run.sh writes down what it was asked for, and ends as it is told. No device is needed."""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

GPU = pathlib.Path(__file__).resolve().parent
sys.path.append(str(GPU))
import run_suites  # noqa: E402

FAKE_RUN = """#!/usr/bin/env bash
echo "$@" >>"$(dirname "$0")/calls"
mkdir -p "$3"
echo "output of $3"
[[ ! -e $(dirname "$0")/hang ]] || exec tail -f /dev/null
[[ ! -e $(dirname "$0")/fail ]] || exit "$(cat "$(dirname "$0")/fail")"
"""


class FirstHourTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.root = pathlib.Path(temporary.name).resolve()
        self.bundle, self.results = self.make_bundle("bundle"), self.root / "results"

    def make_bundle(self, name):
        bundle = self.root / name
        bundle.mkdir()
        (bundle / "MANIFEST.json").write_text(f'{{"commit": "{name}"}}')
        (bundle / "run.sh").write_text(FAKE_RUN)
        (bundle / "run.sh").chmod(0o755)
        return bundle

    def first_hour(self, *words, seconds="60"):
        return subprocess.run([GPU / "first_hour.sh", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.root,
                              env={**os.environ, "RAVEL_STEP_SECONDS": seconds})

    def run_all(self, *words, **options):
        return self.first_hour(self.bundle, "--results", self.results, *words, **options)

    def calls(self):
        file = self.bundle / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def steps(self):
        run = self.first_hour("--list")
        self.assertEqual(run.returncode, 0, run.stderr)
        return run.stdout.splitlines()

    def test_every_step_is_something_that_run_sh_takes(self):
        cmake = (GPU / "CMakeLists.txt").read_text()
        for step in self.steps():
            words = step.rsplit(": ", 1)[1].split()
            with self.subTest(step), unittest.mock.patch.object(sys, "argv", ["run.sh", *words]):
                parsed = run_suites.parse(pathlib.Path("bundle"))
                for suite in parsed.suite:
                    known = suite == "none" or suite in run_suites.COMMAND_SUITES or f"ravel_test({suite}\n" in cmake \
                        or f"gpu_processes_test({suite.removeprefix('gpu_').removesuffix('_test')} " in cmake
                    self.assertTrue(known, suite)

    def test_all_steps_run_once_in_their_order(self):
        run = self.run_all()
        self.assertEqual(run.returncode, 0, run.stderr)
        count = len(self.steps())
        self.assertEqual(len(self.calls()), count)
        self.assertIn(f"--out {self.results}/step-1/attempt-1 --suite none", self.calls()[0])
        self.assertIn("output of", (self.results / "step-1/attempt-1.log").read_text())
        again = self.run_all()
        self.assertEqual(again.stdout.count("has passed"), count)
        self.assertEqual(len(self.calls()), count)

    def test_benchmarks_share_a_folder_that_stays(self):
        self.run_all()
        self.assertEqual(sum(f"--work {self.results}/work" in call for call in self.calls()), 2)

    def test_a_step_that_fails_ends_the_run_and_is_run_again(self):
        (self.bundle / "fail").write_text("3")
        run = self.run_all()
        self.assertEqual(run.returncode, 3)
        self.assertEqual(len(self.calls()), 1)
        (self.bundle / "fail").unlink()
        self.assertEqual(self.run_all("--next").returncode, 0)
        self.assertIn("step-1/attempt-2", self.calls()[1])
        self.assertEqual(len(self.calls()), 2)

    def test_one_step_by_its_number_and_the_next_one(self):
        self.assertEqual(self.run_all("--step", "3").returncode, 0)
        self.assertEqual(self.run_all("--next").returncode, 0)
        self.assertEqual([call.split("/step-")[1].split("/")[0] for call in self.calls()], ["3", "1"])

    def test_a_step_whose_time_is_up_has_not_passed(self):
        (self.bundle / "hang").touch()
        run = self.run_all("--step", "1", seconds="0.2")
        self.assertEqual(run.returncode, 1)
        self.assertIn("its 0.2 s are up; run it again to go on", run.stdout)
        self.assertFalse((self.results / "step-1/passed").exists())

    def test_results_of_two_bundles_are_not_mixed(self):
        self.run_all("--step", "1")
        run = self.first_hour(self.make_bundle("other"), "--results", self.results)
        self.assertEqual(run.returncode, 2)
        self.assertIn("has results of another bundle", run.stderr)

    def test_wrong_use_says_what_is_expected(self):
        count = len(self.steps())
        for words, text in (([], "which bundle?"), ([self.root], "is no bundle"), ([self.bundle, self.bundle], "one bundle"),
                            ([self.bundle, "--step", "0"], f"expected 1 to {count}, got 0"), ([self.bundle, "--step", "x"], "got x"),
                            ([self.bundle, "--step", str(count + 1)], f"expected 1 to {count}"), ([self.bundle, "--step"], "--step needs a value"),
                            ([self.bundle, "--step", "1", "--next"], "not both"), ([self.bundle, "--steps"], "no option --steps")):
            with self.subTest(words):
                run = self.first_hour(*words)
                self.assertEqual(run.returncode, 2)
                self.assertIn(text, run.stderr)
        self.assertEqual(self.calls(), [])


if __name__ == "__main__":
    unittest.main()
