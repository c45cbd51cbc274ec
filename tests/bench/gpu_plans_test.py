#!/usr/bin/env python3
"""Every job of G1, G3, G4 and G7 fits the device that it is made for, by `ravelctl plan`. Needs no device and no PyTorch."""
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

BENCH = pathlib.Path(__file__).resolve().parent
sys.path += [str(BENCH), str(BENCH / "peers"), str(BENCH.parent / "testing")]
import cluster  # noqa: E402
import gpu_jobs  # noqa: E402
from gpu_shapes import SHAPES  # noqa: E402


class GpuPlansTest(unittest.TestCase):
    def plan(self, case, offload=None):
        """The plan as JSON; ravelctl fails where it does not fit."""
        with tempfile.TemporaryDirectory() as folder:
            job = pathlib.Path(folder, "job.yaml")
            job.write_text(gpu_jobs.job_text(case, "planned", folder, steps=15, lr=1e-4, offload=offload))
            command = [cluster.default_binaries() / "ravelctl", "plan", job, "--devices", f"1x{gpu_jobs.DEVICE}", "-o", "json"]
            run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.assertEqual(run.returncode, 0, f"{case}: {run.stderr}")
        return json.loads(run.stdout)

    def test_every_job_fits(self):
        for case in [case for cases in gpu_jobs.CASES.values() for case in cases]:
            with self.subTest(case):
                self.assertEqual(self.plan(case)["types"]["moments"], SHAPES[case]["states"])

    def test_the_device_holds_less_where_all_state_is_on_its_host(self):
        for case in gpu_jobs.CASES["G7"]:
            state, rest = ({row["what"]: row["bytes"] for row in self.plan(case, offload)["memory"]} for offload in (None, {"fraction": 1}))
            self.assertGreater(state["exp_avg"], 0)
            self.assertNotIn("exp_avg", rest)

    def test_the_peer_and_the_job_keep_moments_in_the_same_type(self):
        optimizer = gpu_jobs.optimizer_of(SHAPES["8b-8k"], 1e-4)
        self.assertEqual((optimizer["stateDtype"], optimizer["mainWeights"]), ("bf16", "bf16_remainder"))
        self.assertNotIn("stateDtype", gpu_jobs.optimizer_of(SHAPES["3b"], 1e-4))


if __name__ == "__main__":
    unittest.main()
