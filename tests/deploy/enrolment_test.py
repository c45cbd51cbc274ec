#!/usr/bin/env python3
"""The pods of deploy/kubernetes/overlays/enrolment as processes on loopback: the Job makes a token, kubectl writes it into a secret of an API
server of this test, the coordinator takes it over at its first start, and workers join by it. openssl makes the authority in place of
cert-manager. Needs the environment of setup.sh, and built programs.

    RAVEL_BIN_DIR=build/cuda/bin build/deploy-venv/bin/python tests/deploy/enrolment_test.py
"""
import base64
import http.server
import json
import pathlib
import re
import ssl
import subprocess
import sys
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import manifests_test  # noqa: E402
import worker_pod_test  # noqa: E402

AUTHORITY = """set -e
openssl ecparam -name prime256v1 -genkey -noout | openssl pkcs8 -topk8 -nocrypt -out tls.key
openssl req -x509 -new -key tls.key -days 30 -subj '/CN=Ravel cluster ravel' -out tls.crt \\
  -addext keyUsage=critical,digitalSignature,keyEncipherment,keyCertSign"""
SERVER = """openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout server.key -out server.crt -days 2 \\
  -subj /CN=api -addext subjectAltName=IP:127.0.0.1"""
TOKEN_OF_ACCOUNT = "token-of-the-account"
SECRETS = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "v1", "resources": [
    {"name": "secrets", "singularName": "secret", "namespaced": True, "kind": "Secret", "verbs": ["get", "patch"]}]}


class Server(http.server.ThreadingHTTPServer):
    """As much of an API server as kubectl asks for. Who is asked for is judged by the Role of the overlay."""

    def __init__(self, rule, mounted, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        subprocess.run(["bash", "-c", SERVER], cwd=folder, check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.rule, self.mounted, self.changes, self.refused, self.data = rule, mounted, 0, [], {}


class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def answer(self, code, document):
        text = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def may(self, verb, path):
        rule, name = self.server.rule, path.rpartition("/")[2]
        good = (self.headers["Authorization"] == f"Bearer {TOKEN_OF_ACCOUNT}" and path == f"/api/v1/namespaces/ravel/secrets/{name}" and
                verb in rule["verbs"] and name in rule["resourceNames"] and rule["resources"] == ["secrets"])
        if not good:
            self.server.refused.append(f"{verb} {path}")
            self.answer(403, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": 403, "message": path})
        return good

    def secret(self):
        return {"kind": "Secret", "apiVersion": "v1", "type": "Opaque", "data": self.server.data,
                "metadata": {"name": "ravel-join", "namespace": "ravel", "resourceVersion": str(self.server.changes)}}

    def do_GET(self):
        path = self.path.partition("?")[0]
        groups = {"/api": {"kind": "APIVersions", "versions": ["v1"]}, "/api/v1": SECRETS,
                  "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []}}
        if path in groups:
            self.answer(200, groups[path])
        elif self.may("get", path):
            self.answer(200, self.secret())

    def do_PATCH(self):
        path = self.path.partition("?")[0]
        patch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.may("patch", path):
            return
        for key, value in patch.get("stringData", {}).items():
            self.server.changes += 1
            self.server.data[key] = base64.b64encode(value.encode()).decode()
            (self.server.mounted / key).write_text(value)  # as the kubelet does
        self.answer(200, self.secret())


class Enrolment(worker_pod_test.PodProcesses):
    def setUp(self):
        super().setUp()
        self.documents = manifests_test.built(manifests_test.FOLDER / "overlays" / "enrolment")
        self.job = manifests_test.enrolment(self.documents)
        for name in ("authority", "patch", "coordinator"):
            (self.folder / name).mkdir()
        subprocess.run(["bash", "-c", AUTHORITY], cwd=self.folder / "authority", check=True, capture_output=True)
        self.server = Server(manifests_test.enrolment_rule(self.documents), self.folder / "join", self.folder)
        thread = threading.Thread(target=self.server.serve_forever)
        thread.start()

        def end():
            self.server.shutdown()
            thread.join()
            self.server.server_close()

        self.addCleanup(end)
        self.coordinator_at = "localhost:0"

    def words(self, container, volume):
        """What a container runs, with folders of this test for its volumes."""
        words = [*container.get("command", [manifests_test.kubectl()]), *container["args"]]
        for there, here in {"/run/ravel-authority": self.folder / "authority", "/run/ravel-join": self.folder / "join",
                            "/run/ravel-patch": self.folder / "patch", "/var/lib/ravel": self.folder / volume,
                            "=/shared": f"={self.folder / 'shared'}", "ravel-coordinator:7070": self.coordinator_at,
                            "--listen=[::]:7070": "--listen=127.0.0.1:0", "--http-listen=[::]:7071": "--http-listen=127.0.0.1:0"}.items():
            words = [word.replace(there, str(here)) for word in words]
        return words

    def run_job(self):
        said = self.run_to_end(*self.words(self.job["initContainers"][0], "none"))
        return said + self.run_to_end(*self.words(self.job["containers"][0], "none"), "--kubeconfig=/dev/null", "--namespace=ravel",
                                      f"--server=https://127.0.0.1:{self.server.server_port}",
                                      f"--certificate-authority={self.folder / 'server.crt'}", f"--token={TOKEN_OF_ACCOUNT}")

    def fails(self, *command):
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=self.environment)
        self.assertNotEqual(done.returncode, 0)
        return done.stderr

    def test_nobody_runs_a_command_and_workers_join(self):
        pod = manifests_test.coordinator(self.documents)
        init = self.words(pod["initContainers"][0], "coordinator")
        self.assertIn("--node-token", self.fails(*init))  # the Job has not run yet: the pod tries again
        self.assertFalse((self.folder / "coordinator" / "state" / "tls").exists())

        said = self.run_job()
        token = (self.folder / "join" / "token").read_text()
        self.assertRegex(token, r"^ravel1\.[0-9a-f]{64}\.[0-9a-f]{40}$")
        self.assertNotIn(token, said)
        self.assertEqual((self.folder / "patch" / "patch.json").stat().st_mode & 0o077, 0)
        self.run_job()  # another pod of the Job: the token stays
        self.assertEqual((self.folder / "join" / "token").read_text(), token)
        self.assertEqual((self.server.changes, self.server.refused), (1, []))

        self.run_to_end(*init)
        self.run_to_end(*init)  # the pod starts again on its volume
        self.start("coordinator", *self.words(pod["containers"][0], "coordinator"), "--port-file", self.folder / "port")
        self.coordinator_at = f"localhost:{self.number_in('port')}"
        worker = manifests_test.worker(self.documents)
        for name in ("w0", "w1"):
            (self.folder / name).mkdir()
            join = self.words(worker["initContainers"][0], name)
            join[-1] = re.sub("(ravel-worker join)", rf"\1 --node-id {name}", join[-1])  # the host's name is the pod's there
            self.run_to_end(*join)
            self.start(name, *self.words(worker["containers"][0], name))
        context = self.folder / "coordinator" / "state" / "admin.context.json"
        control = ["ravelctl", "--context", context, "--coordinator", self.coordinator_at]
        self.wait_for(lambda: self.run_to_end(*control, "nodes", "list").count("READY") == 2)
        audit = self.run_to_end(*control, "audit", "-o", "json")
        self.assertIn("node/*", audit)
        self.assertNotIn(token.rpartition(".")[2], audit)

    def test_a_token_of_another_authority_makes_nothing(self):
        self.run_job()
        subprocess.run(["bash", "-c", AUTHORITY], cwd=self.folder / "authority", check=True, capture_output=True)
        init = self.words(manifests_test.coordinator(self.documents)["initContainers"][0], "coordinator")
        self.assertIn("--node-token: has the fingerprint", self.fails(*init))
        self.assertFalse((self.folder / "coordinator" / "state" / "tls").exists())


if __name__ == "__main__":
    unittest.main()
