#!/usr/bin/env python3
"""The worker's pod of deploy/kubernetes/base as processes on loopback: what its containers run, with folders of the test in place of its
volumes. Its probes are asked as the kubelet asks them. Needs the environment of setup.sh, and built programs.

    RAVEL_BIN_DIR=build/cuda/bin build/deploy-venv/bin/python tests/deploy/worker_pod_test.py
"""
import os
import pathlib
import ssl
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import manifests_test  # noqa: E402


class PodProcesses(unittest.TestCase):
    """Containers as processes, with folders in place of volumes."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="ravel-pod-")
        self.addCleanup(scratch.cleanup)
        self.folder = pathlib.Path(scratch.name)
        for name in ("volume", "join", "shared"):
            (self.folder / name).mkdir()
        binaries = manifests_test.cluster.default_binaries().resolve()
        self.environment = {**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"}

    def run_to_end(self, *command):
        return subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE, text=True, env=self.environment).stdout

    def start(self, name, *command):
        with open(self.folder / f"{name}.log", "w") as log:
            process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=self.environment)

        def end():
            process.kill()
            process.wait()

        self.addCleanup(end)
        return process

    def wait_for(self, what, seconds=60):
        end = time.monotonic() + seconds
        while not (found := what()):
            self.assertLess(time.monotonic(), end, "\n".join(path.read_text()[-3000:] for path in self.folder.glob("*.log")))
            time.sleep(0.05)
        return found

    def number_in(self, name):
        path = self.folder / name
        return int(self.wait_for(lambda: path.exists() and path.read_text().strip()))


class WorkerPod(PodProcesses):
    def setUp(self):
        super().setUp()
        self.state = self.folder / "state"
        self.run_to_end("ravel-coordinator", "init", "--state-dir", self.state, "--name", "localhost")
        self.coordinator = self.start("coordinator", "ravel-coordinator", "--state-dir", self.state, "--listen", "127.0.0.1:0",
                                      "--port-file", self.folder / "port")
        self.coordinator_at = f"localhost:{self.number_in('port')}"
        token = self.run_to_end("ravelctl", "--context", self.state / "admin.context.json", "--coordinator", self.coordinator_at,
                                 "enrol", "node")
        (self.folder / "join" / "token").write_text(token)
        self.pod = manifests_test.worker(manifests_test.built(manifests_test.FOLDER / "base"))

    def command(self, container):
        """What the container runs, with this test's folders and addresses."""
        words = [*container["command"], *container["args"]]
        for there, here in {"/var/lib/ravel": self.folder / "volume", "/run/ravel-join": self.folder / "join",
                            "=/shared": f"={self.folder / 'shared'}", "ravel-coordinator:7070": self.coordinator_at,
                            "--http-listen=[::]:7071": "--http-listen=127.0.0.1:0"}.items():
            words = [word.replace(there, str(here)) for word in words]
        return words

    def asked(self, path, token=None):
        request = urllib.request.Request(f"https://127.0.0.1:{self.pages}{path}")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # as the kubelet
        try:
            with urllib.request.urlopen(request, timeout=5, context=context) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def probe(self, name):
        return self.asked(self.pod["containers"][0][name]["httpGet"]["path"])

    def test_probes_ask_what_the_daemon_serves(self):
        init = self.command(self.pod["initContainers"][0])
        self.run_to_end(*init)
        page_token = self.folder / "volume" / "page-token"
        token = page_token.read_text()
        self.assertRegex(token, "^[0-9a-f]{64}$")
        self.assertEqual(page_token.stat().st_mode & 0o077, 0)
        self.run_to_end(*init)  # the pod starts again on its volume
        self.assertEqual(page_token.read_text(), token)

        worker = self.start("worker", *self.command(self.pod["containers"][0]), "--http-port-file", self.folder / "pages")
        self.pages = self.number_in("pages")
        self.assertEqual(self.probe("startupProbe"), 200)
        self.wait_for(lambda: self.probe("readinessProbe") == 200)
        self.assertEqual(self.asked("/metrics"), 401)
        self.assertEqual(self.asked("/metrics", token), 200)

        self.coordinator.kill()
        self.coordinator.wait()
        self.wait_for(lambda: self.probe("readinessProbe") == 503)
        self.assertEqual(self.probe("livenessProbe"), 200)
        self.assertIsNone(worker.poll())


if __name__ == "__main__":
    unittest.main()
