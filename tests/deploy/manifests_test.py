#!/usr/bin/env python3
"""Every overlay of deploy/kubernetes is built by kubectl and held to the strict schemas of several versions of Kubernetes, those of JobSet
and Kubeflow Trainer to Kubeflow's own models, those of Kueue, the Prometheus operator and cert-manager to custom_resources.py, and to policies: no root, limits, no tag `latest`, selectors that match, flags that the
programs have. Faults that are planted must all be found. Needs the
environment of setup.sh, and built programs (RAVEL_BIN_DIR or a usual build).

    build/deploy-venv/bin/python tests/deploy/manifests_test.py
"""
import copy
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import kubeflow_trainer_api.models as kubeflow
import kubernetes_validate
import pydantic
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "testing"))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import cluster  # noqa: E402
import custom_resources  # noqa: E402

FOLDER = ROOT / "deploy" / "kubernetes"
OLDEST_KUBECTL = (1, 21)  # with kustomize 4.0.5: folders as resources, patches, components
VERSIONS = ["1.34.0", "1.35.0", "1.36.0"]
PROGRAMS = {"ravel-coordinator", "ravel-store", "ravel-worker", "ravelctl"}
USER = 10001  # of deploy/images/build.sh


def overlays():
    return [FOLDER / "base", *sorted(path.parent for path in (FOLDER / "overlays").glob("*/kustomization.yaml"))]


@functools.cache
def kubectl(program=None):
    """That of this environment, else of PATH, if it can build the overlays."""
    beside = pathlib.Path(sys.executable).parent / "kubectl"
    program = program or (str(beside) if beside.exists() else shutil.which("kubectl"))
    wanted = "kubectl {}.{} or later (deploy/README.md); tests/deploy/setup.sh makes an environment with one".format(*OLDEST_KUBECTL)
    if program is None:
        raise OldKubectl(f"there is no kubectl: this needs {wanted}")
    said = subprocess.run([program, "version", "--client", "-o", "json"], check=True, capture_output=True, text=True).stdout
    version = json.loads(said)["clientVersion"]["gitVersion"]
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST_KUBECTL:
        raise OldKubectl(f"{program} is {version}: this needs {wanted}")
    return program


class OldKubectl(Exception):
    pass


def built(folder):
    text = subprocess.run([kubectl(), "kustomize", str(folder)], check=True, capture_output=True, text=True).stdout
    return [document for document in yaml.safe_load_all(text) if document]


def flags_of(program, binaries=None):
    """By words of the command line before them ("", "init", "join"): the flags that --help lists."""
    known = {}
    for verb in {"ravel-coordinator": ["", "init"], "ravel-worker": ["", "join"]}.get(program, [""]):
        command = [str(pathlib.Path(binaries or os.environ.get("RAVEL_BIN_DIR") or cluster.default_binaries()) / program)]
        helped = subprocess.run([*command, *verb.split(), "--help"], check=True, capture_output=True, text=True).stdout
        known[verb] = set(re.findall(r"--[a-z][a-z-]*", helped))
    return known


MODELS = {"JobSet": kubeflow.JobsetV1alpha2JobSet, "ClusterTrainingRuntime": kubeflow.TrainerV1alpha1ClusterTrainingRuntime}


def jobs(document):
    """Templates of the Jobs of a JobSet, or of a runtime that makes one."""
    spec = document.get("spec", {})
    if document["kind"] == "ClusterTrainingRuntime":
        spec = spec["template"]["spec"]
    return [job["template"] for job in spec.get("replicatedJobs", [])]


def pods(documents):
    for document in documents:
        templates = [job["spec"]["template"] for job in jobs(document)] or [document.get("spec", {}).get("template")]
        for template in templates:
            if template and "spec" in template:
                yield document, template


def containers(template):
    spec = template["spec"]
    yield from spec.get("initContainers", [])
    yield from spec["containers"]


def command_lines(container):
    """Program, verb and flags of each program that a container starts, of shell text too."""
    words = [*container.get("command", []), *container.get("args", [])]
    text = " ".join(str(word) for word in words).replace("\\\n", " ")
    for match in re.finditer(r"\b(ravel-coordinator|ravel-store|ravel-worker|ravelctl)((?:\s+\S+)*)", text):
        if match[1] not in PROGRAMS:
            continue
        rest = match[2].split()
        verb = rest[0] if rest and not rest[0].startswith("-") else ""
        yield match[1], verb, [word.split("=")[0] for word in rest if word.startswith("--")]


def dropped(given, kept, path=""):
    """Fields of one tree that the other has not."""
    if isinstance(given, dict):
        kept = kept if isinstance(kept, dict) else {}
        return [name for key, value in given.items()
                for name in ([f"{path}{key}"] if key not in kept else dropped(value, kept[key], f"{path}{key}."))]
    if isinstance(given, list) and isinstance(kept, list):
        return [name for one, other in zip(given, kept) for name in dropped(one, other, path)]
    return []


class Findings:
    """What is wrong with the documents of an overlay, as sentences. Those in `known` have been held to schemas before."""

    def __init__(self, documents, flags, versions, known=()):
        self.documents, self.flags, self.found = documents, flags, []
        self.schemas(versions, known)
        for document, template in pods(documents):
            self.pod(document, template)
        self.selectors()
        self.references()
        for document, text in custom_resources.References(documents, pods(documents)).found:
            self.say(document, text)

    def say(self, document, text):
        self.found.append(f"{document['kind']} {document['metadata']['name']}: {text}")

    def schemas(self, versions, known):
        for document in (document for document in self.documents if document not in known):
            kind = document["kind"]
            if kind in custom_resources.SPECS:
                for text in custom_resources.check_schema(document):
                    self.say(document, f"schema: {text}")
                continue
            for at in [document] if kind not in MODELS else self.jobs_of(document):
                for version in versions:
                    try:
                        kubernetes_validate.validate(at, version, strict=True)
                    except kubernetes_validate.ValidationError as error:
                        self.say(document, f"schema of {version}: {'.'.join(map(str, error.path))}: {error.message[:200]}")
                        break

    def jobs_of(self, document):
        """Held to Kubeflow's model, which drops fields that it does not know; then its Jobs, as documents of their own."""
        try:
            kept = MODELS[document["kind"]].from_dict(document).to_dict()
        except pydantic.ValidationError as error:
            self.say(document, f"model: {error}")
            return []
        if (lost := dropped(document, kept)):
            self.say(document, f"model: unknown {', '.join(lost)}")
        return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": job["spec"]} for job in jobs(document)]

    def pod(self, document, template):
        spec = template["spec"]
        context = spec.get("securityContext", {})
        if context.get("runAsNonRoot") is not True or context.get("runAsUser") != USER:
            self.say(document, f"does not run as user {USER}, not root")
        if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            self.say(document, "no seccomp profile")
        if spec.get("automountServiceAccountToken") is not False:
            self.say(document, "has a token of the service account")
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            if spec.get(key):
                self.say(document, key)
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        volumes |= {claim["metadata"]["name"] for claim in document["spec"].get("volumeClaimTemplates", [])}
        for volume in spec.get("volumes", []):
            if "hostPath" in volume:
                self.say(document, f"volume {volume['name']} is a path of the host")
        for container in containers(template):
            self.container(document, container, volumes)
        self.probes(document, template)

    def probes(self, document, template):
        """Services have all probes; those by HTTP ask a page that the pod serves, over TLS, to callers without a token."""
        served = {}
        for container in containers(template):
            listen = custom_resources.flag(container, "--http-listen") or "off"
            if listen != "off" and not listen.startswith("127."):
                served[int(listen.rpartition(":")[2])] = ["/livez", "/readyz"]
            if (listen := custom_resources.flag(container, "--secure-listen-address")):
                served[int(listen.rpartition(":")[2])] = (custom_resources.flag(container, "--ignore-paths") or "").split(",")
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            if document["kind"] == "StatefulSet" and probe not in template["spec"]["containers"][0]:
                self.say(document, f"no {probe}")
            for container in containers(template):
                asked = container.get(probe, {}).get("httpGet")
                numbers = {port["name"]: port["containerPort"] for port in container.get("ports", [])}
                if asked and (asked["path"] not in served.get(numbers.get(asked["port"], asked["port"]), []) or asked.get("scheme") != "HTTPS"):
                    self.say(document, f"{container['name']}: {probe} asks {asked}, which nobody serves")

    def container(self, document, container, volumes):
        name, context = container["name"], container.get("securityContext", {})
        if context.get("readOnlyRootFilesystem") is not True:
            self.say(document, f"{name}: the root can be written")
        if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
            self.say(document, f"{name}: privileges")
        if context.get("capabilities", {}).get("drop") != ["ALL"] or context.get("capabilities", {}).get("add"):
            self.say(document, f"{name}: capabilities")
        for resource in ("cpu", "memory"):
            if resource not in container.get("resources", {}).get("limits", {}):
                self.say(document, f"{name}: no limit of {resource}")
        image = container["image"].rsplit(":", 1)
        if len(image) != 2 or image[1] == "latest":
            self.say(document, f"{name}: image {container['image']} has no tag, or latest")
        ports = {port["name"] for port in container.get("ports", [])}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            for action in ("tcpSocket", "httpGet"):
                port = container.get(probe, {}).get(action, {}).get("port")
                if isinstance(port, str) and port not in ports:
                    self.say(document, f"{name}: {probe} asks port {port}, which it does not have")
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                self.say(document, f"{name}: no volume {mount['name']}")
        for program, verb, used in command_lines(container):
            known = self.flags[program]
            unknown = set(used) - known.get(verb, set() if verb in known else known[""])
            if unknown or (verb and verb not in known):
                self.say(document, f"{name}: {program} {verb} has no {' '.join(sorted(unknown)) or 'such verb'}")

    def selectors(self):
        labels = [(template["metadata"]["labels"], document) for document, template in pods(self.documents)]

        def matches(selector):
            return [document for given, document in labels if all(given.get(k) == v for k, v in selector.items())]

        for document in self.documents:
            spec = document.get("spec", {})
            if document["kind"] == "Service" and not matches(spec["selector"]):
                self.say(document, "selects nothing")
            if document["kind"] == "Service":
                ports = {port["name"] for _, template in pods(matches(spec["selector"])) for c in containers(template)
                         for port in c.get("ports", [])}
                for port in spec.get("ports", []):
                    if port["targetPort"] not in ports:
                        self.say(document, f"no container has port {port['targetPort']}")
            if document["kind"] == "PodDisruptionBudget":
                if not matches(spec["selector"]["matchLabels"]):
                    self.say(document, "selects nothing")
                if spec.get("maxUnavailable") in (0, "0%") or "minAvailable" in spec:
                    self.say(document, "blocks the drain of a node")
            if document["kind"] == "NetworkPolicy" and not matches(spec["podSelector"].get("matchLabels", {})):
                self.say(document, "selects nothing")
            if document["kind"] == "StatefulSet" and not matches(spec["selector"]["matchLabels"]):
                self.say(document, "does not select its own pods")
        denied = [d for d in self.documents if d["kind"] == "NetworkPolicy" and not d["spec"].get("ingress")]
        for document, template in pods(self.documents):
            if document["kind"] == "ClusterTrainingRuntime":
                continue
            if not any(all(template["metadata"]["labels"].get(k) == v for k, v in d["spec"]["podSelector"]["matchLabels"].items())
                       for d in denied):
                self.found.append(f"pods {template['metadata']['labels']}: no policy denies by default")

    def references(self):
        names = {(document["kind"], document["metadata"]["name"]) for document in self.documents}
        for document, template in pods(self.documents):
            if document["kind"] == "ClusterTrainingRuntime":
                continue  # its pods use what their namespace has
            if ("ServiceAccount", template["spec"].get("serviceAccountName")) not in names:
                self.say(document, "no such service account")
            if document["kind"] == "StatefulSet" and ("Service", document["spec"]["serviceName"]) not in names:
                self.say(document, f"no service {document['spec']['serviceName']}")
            for volume in template["spec"].get("volumes", []):
                claim = volume.get("persistentVolumeClaim", {}).get("claimName")
                if claim and ("PersistentVolumeClaim", claim) not in names:
                    self.say(document, f"no claim {claim}")
                config = volume.get("configMap", {}).get("name")
                if config and ("ConfigMap", config) not in names:
                    self.say(document, f"no config map {config}")
            if document["kind"] == "StatefulSet" and not any(d["kind"] == "PodDisruptionBudget" and d["metadata"]["name"] == document["metadata"]["name"]
                       for d in self.documents):
                self.say(document, "no budget of disruptions")
            namespaces = {d["metadata"].get("namespace") for d in self.documents if d["kind"] not in custom_resources.CLUSTER_KINDS}
            if namespaces != {"ravel"}:
                self.say(document, f"namespaces {namespaces}")


def first(documents, kind, name):
    return next(d for d in documents if d["kind"] == kind and d["metadata"]["name"] == name)


def worker(documents):
    return first(documents, "StatefulSet", "ravel-worker")["spec"]["template"]["spec"]


def coordinator(documents):
    return first(documents, "StatefulSet", "ravel-coordinator")["spec"]["template"]["spec"]


# What people get wrong, one at a time.
FAULTS = {
    "runs as root": lambda d: worker(d)["securityContext"].update(runAsUser=0),
    "may run as root": lambda d: worker(d)["securityContext"].pop("runAsNonRoot"),
    "no seccomp": lambda d: coordinator(d)["securityContext"].pop("seccompProfile"),
    "root that can be written": lambda d: worker(d)["containers"][0]["securityContext"].update(readOnlyRootFilesystem=False),
    "privileged": lambda d: worker(d)["containers"][0]["securityContext"].update(privileged=True),
    "a capability": lambda d: worker(d)["containers"][0]["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
    "no limit of memory": lambda d: worker(d)["containers"][0]["resources"]["limits"].pop("memory"),
    "latest": lambda d: coordinator(d)["containers"][0].update(image="ravel:latest"),
    "no tag": lambda d: coordinator(d)["initContainers"][0].update(image="ravel"),
    "network of the host": lambda d: worker(d).update(hostNetwork=True),
    "path of the host": lambda d: worker(d)["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
    "token of the service account": lambda d: worker(d).update(automountServiceAccountToken=True),
    "unknown flag": lambda d: coordinator(d)["containers"][0]["args"].append("--listem=0.0.0.0:7070"),
    "unknown flag in shell text": lambda d: worker(d)["initContainers"][0]["args"].__setitem__(0, "ravel-worker join --tokem x"),
    "unknown verb": lambda d: worker(d)["initContainers"][0]["args"].__setitem__(0, "ravel-worker enrol --work-dir /x"),
    "probe of no port": lambda d: coordinator(d)["containers"][0]["livenessProbe"]["tcpSocket"].update(port="http"),
    "worker that is never asked": lambda d: worker(d)["containers"][0].pop("livenessProbe"),
    "worker that is ready at once": lambda d: worker(d)["containers"][0].pop("readinessProbe"),
    "probe of no page": lambda d: worker(d)["containers"][0]["readinessProbe"]["httpGet"].update(path="/ready"),
    "probe of a page that needs a token": lambda d: worker(d)["containers"][0]["livenessProbe"]["httpGet"].update(path="/metrics"),
    "probe in plaintext": lambda d: worker(d)["containers"][0]["livenessProbe"]["httpGet"].pop("scheme"),
    "probe of loopback": lambda d: worker(d)["containers"][0]["args"].__setitem__(5, "--http-listen=127.0.0.1:7071"),
    "mount of no volume": lambda d: worker(d)["containers"][0]["volumeMounts"][0].update(name="works"),
    "claim that is not there": lambda d: worker(d)["volumes"][0]["persistentVolumeClaim"].update(claimName="shared"),
    "service that selects nothing": lambda d: first(d, "Service", "ravel-coordinator")["spec"]["selector"].update(x="y"),
    "service of no port": lambda d: first(d, "Service", "ravel-coordinator")["spec"]["ports"][0].update(targetPort="http"),
    "budget that blocks drains": lambda d: first(d, "PodDisruptionBudget", "ravel-worker")["spec"].update(maxUnavailable=0),
    "budget of nothing": lambda d: first(d, "PodDisruptionBudget", "ravel-worker")["spec"]["selector"]["matchLabels"].update(x="y"),
    "pods that nothing denies": lambda d: d.remove(first(d, "NetworkPolicy", "ravel-default-deny")),
    "set that does not select its pods": lambda d: first(d, "StatefulSet", "ravel-worker")["spec"]["template"]["metadata"]["labels"].pop(
        "app.kubernetes.io/component"),
    "misspelled key": lambda d: worker(d).update(terminationGracePeriodSecond=30),
    "wrong type": lambda d: first(d, "StatefulSet", "ravel-worker")["spec"].update(replicas="two"),
    "another namespace": lambda d: first(d, "Service", "ravel-worker")["metadata"].update(namespace="default"),
}


def first_job(documents):
    return jobs(next(d for d in documents if d["kind"] in MODELS))[0]["spec"]


# Faults of single overlays, by overlay and name.
POOL_FAULTS = {
    ("jobset", "misspelled key of a JobSet"): lambda d: first(d, "JobSet", "ravel-pool")["spec"].update(successPolicies={}),
    ("jobset", "wrong type in a JobSet"): lambda d: first(d, "JobSet", "ravel-pool")["spec"]["failurePolicy"].update(maxRestarts="ten"),
    ("jobset", "misspelled key of a Job"): lambda d: first_job(d).update(backofLimit=1),
    ("jobset", "runs as root"): lambda d: first_job(d)["template"]["spec"]["securityContext"].update(runAsUser=0),
    ("jobset", "no job file"): lambda d: d.remove(first(d, "ConfigMap", "ravel-pool-job")),
    ("jobset", "no volume of the state"): lambda d: d.remove(first(d, "PersistentVolumeClaim", "ravel-pool-state")),
    ("jobset", "pods that nothing denies"): lambda d: d.remove(first(d, "NetworkPolicy", "ravel-default-deny")),
    ("trainer-runtime", "misspelled key of a runtime"): lambda d: d[0]["spec"]["mlPolicy"].update(nodes=2),
    ("trainer-runtime", "latest"): lambda d: first_job(d)["template"]["spec"]["containers"][0].update(image="ravel:latest"),
    ("kueue", "an older API"): lambda d: first(d, "LocalQueue", "ravel").update(apiVersion="kueue.x-k8s.io/v1beta1"),
    ("ha-storage", "unknown flag of the store"): lambda d: first(d, "StatefulSet", "ravel-store")["spec"]["template"]["spec"]["containers"][0][
        "args"].append("--disk=/x"),
    ("monitoring", "misspelled key of a monitor"): lambda d: endpoint(d).update(honourLabels=True),
    ("monitoring", "an older API"): lambda d: first(d, "PodMonitor", "ravel-worker").update(apiVersion="monitoring.coreos.com/v1alpha1"),
    ("monitoring", "interval that is none"): lambda d: endpoint(d).update(interval="15"),
    ("monitoring", "monitor that selects nothing"): lambda d: first(d, "PodMonitor", "ravel-coordinator")["spec"]["selector"][
        "matchLabels"].update(x="y"),
    ("monitoring", "monitor of no port"): lambda d: endpoint(d).update(port="http"),
    ("monitoring", "monitor without a token"): lambda d: endpoint(d).pop("authorization"),
    ("monitoring", "monitor with a secret that is not there"): lambda d: endpoint(d)["authorization"]["credentials"].update(name="reader"),
    ("monitoring", "port that no policy opens"): lambda d: d.remove(first(d, "NetworkPolicy", "ravel-metrics")),
    ("monitoring", "rules of another day"): lambda d: first(d, "PrometheusRule", "ravel")["spec"]["groups"][0]["rules"][0].update(expr="up"),
    ("monitoring", "severity that nobody knows"): lambda d: first(d, "PrometheusRule", "ravel")["spec"]["groups"][0]["rules"][0][
        "labels"].update(severity="fatal"),
    ("monitoring", "dashboard that is cut"): lambda d: first(d, "ConfigMap", "ravel-dashboard")["data"].update({"ravel.json": "{}"}),
    ("monitoring", "proxy of another port"): lambda d: proxy(d)["args"].__setitem__(1, "--upstream=http://127.0.0.1:7072/"),
    ("monitoring", "unknown flag of the proxy"): lambda d: proxy(d)["args"].append("--allowed-paths=/metrics"),
    ("monitoring", "probe that the proxy asks for a token"): lambda d: proxy(d)["args"].__setitem__(2, "--allow-paths=/metrics"),
    ("monitoring", "probe of loopback"): lambda d: worker(d)["containers"][0]["readinessProbe"]["httpGet"].update(port=7071),
    ("monitoring", "role that is not there"): lambda d: d.remove(first(d, "ClusterRole", "ravel-metrics-reader")),
    ("monitoring", "account that is not there"): lambda d: d.remove(first(d, "ServiceAccount", "ravel-metrics-reader")),
    ("cert-manager", "misspelled key of a certificate"): lambda d: store_certificate(d).update(dnsName=["x"]),
    ("cert-manager", "certificate of no issuer"): lambda d: store_certificate(d)["issuerRef"].update(name="ravel"),
    ("cert-manager", "issuer of no authority"): lambda d: first(d, "Certificate", "ravel-authority")["spec"].pop("isCA"),
    ("cert-manager", "issuer of no secret"): lambda d: first(d, "Issuer", "ravel-authority")["spec"]["ca"].update(secretName="ravel"),
    ("cert-manager", "URI of another cluster"): lambda d: store_certificate(d).update(uris=["spiffe://other.ravel/store"]),
    ("cert-manager", "URI of nobody"): lambda d: store_certificate(d).update(uris=["spiffe://ravel.ravel/stores"]),
    ("cert-manager", "key of another kind"): lambda d: store_certificate(d)["privateKey"].update(algorithm="RSA"),
    ("cert-manager", "key that changes under the store"): lambda d: store_certificate(d)["privateKey"].update(rotationPolicy="Always"),
    ("cert-manager", "renewed before it is made"): lambda d: store_certificate(d).update(renewBefore="2160h"),
    ("cert-manager", "no client of the coordinator"): lambda d: store_certificate(d)["usages"].remove("client auth"),
    ("cert-manager", "secret that nobody makes"): lambda d: store_certificate(d).update(secretName="ravel-store-tls"),
    ("cert-manager", "files under names of another kind"): lambda d: store_volume(d)["secret"].pop("items"),
    ("cert-manager", "key of a secret that it has not"): lambda d: store_volume(d)["secret"]["items"][0].update(key="cert.pem"),
    ("cert-manager", "cluster without a name"): lambda d: coordinator(d)["initContainers"][0]["args"].__setitem__(
        0, "ravel-coordinator init --state-dir /x --name y --authority /run/ravel-authority"),
    ("enrolment", "rights to all secrets"): lambda d: enrolment_rule(d).pop("resourceNames"),
    ("enrolment", "a right to create secrets"): lambda d: enrolment_rule(d)["verbs"].append("create"),
    ("enrolment", "rights to run programs"): lambda d: enrolment_rule(d)["resources"].append("pods/exec"),
    ("enrolment", "rights to a secret that is not there"): lambda d: enrolment_rule(d).update(resourceNames=["ravel-joint"]),
    ("enrolment", "a role that is not there"): lambda d: d.remove(first(d, "Role", "ravel-enrolment")),
    ("enrolment", "an account that is not there"): lambda d: d.remove(first(d, "ServiceAccount", "ravel-enrolment")),
    ("enrolment", "secret in a manifest"): lambda d: first(d, "Secret", "ravel-join").update(stringData={"token": "ravel1.x"}),
    ("enrolment", "a secret that is not there"): lambda d: d.remove(first(d, "Secret", "ravel-join")),
    ("enrolment", "the authority's key"): lambda d: enrolment(d)["volumes"][0]["secret"]["items"].append({"key": "tls.key", "path": "tls.key"}),
    ("enrolment", "all of the authority's secret"): lambda d: enrolment(d)["volumes"][0]["secret"].pop("items"),
    ("enrolment", "token in a program of Ravel"): lambda d: enrolment(d)["initContainers"][0]["volumeMounts"].append(
        {"name": "account", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}),
    ("enrolment", "no way to the API server"): lambda d: d.remove(first(d, "NetworkPolicy", "ravel-enrolment")),
    ("enrolment", "patch of another secret"): lambda d: enrolment(d)["containers"][0]["args"].__setitem__(3, "ravel-joint"),
    ("enrolment", "misspelled key of the Job"): lambda d: first(d, "Job", "ravel-enrolment")["spec"].update(backofLimit=1),
    ("enrolment", "unknown flag of init"): lambda d: coordinator(d)["initContainers"][0]["args"].__setitem__(
        0, coordinator(d)["initContainers"][0]["args"][0].replace("--node-token-uses", "--node-uses")),
}


def enrolment(documents):
    return first(documents, "Job", "ravel-enrolment")["spec"]["template"]["spec"]


def enrolment_rule(documents):
    return first(documents, "Role", "ravel-enrolment")["rules"][0]


def endpoint(documents):
    return first(documents, "PodMonitor", "ravel-worker")["spec"]["podMetricsEndpoints"][0]


def proxy(documents):
    return worker(documents)["initContainers"][-1]


def store_certificate(documents):
    return first(documents, "Certificate", "ravel-store")["spec"]


def store_volume(documents):
    return first(documents, "StatefulSet", "ravel-store")["spec"]["template"]["spec"]["volumes"][0]


class Manifests(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        kubectl()
        cls.flags = {program: flags_of(program) for program in PROGRAMS}

    def test_every_overlay_holds_to_schemas_and_policies(self):
        for folder in overlays():
            documents = built(folder)
            self.assertEqual(Findings(documents, self.flags, VERSIONS).found, [], folder.name)
            print(f"{folder.name}: {len(documents)} objects, Kubernetes {', '.join(VERSIONS)}")

    def test_a_kubectl_that_is_too_old_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            for version, works in {"v1.20.2": False, "v1.21.0": True, "v1.9.11": False, "v1.36.3-dispatcher": True, "v2.0.0": True}.items():
                program = pathlib.Path(folder) / version
                program.write_text(f"""#!/bin/sh\necho '{{"clientVersion": {{"gitVersion": "{version}"}}}}'\n""")
                program.chmod(0o755)
                if works:
                    self.assertEqual(kubectl(str(program)), str(program))
                else:
                    with self.assertRaisesRegex(OldKubectl, re.escape(f"{version}: this needs kubectl 1.21 or later")):
                        kubectl(str(program))

    def test_monitoring_is_added_to_other_overlays(self):
        build = ROOT / "build"
        build.mkdir(exist_ok=True)
        for overlay in ("ha-storage", "cert-manager", "gpu"):
            with tempfile.TemporaryDirectory(dir=build) as folder:
                text = yaml.safe_dump({"resources": [os.path.relpath(FOLDER / "overlays" / overlay, folder)],
                                       "components": [os.path.relpath(FOLDER / "components" / "monitoring", folder)]})
                (pathlib.Path(folder) / "kustomization.yaml").write_text(text)
                documents = built(folder)
            self.assertEqual(Findings(documents, self.flags, VERSIONS[-1:]).found, [], overlay)
            proxied = [d["metadata"]["name"] for d, t in pods(documents) if "metrics" in [c["name"] for c in containers(t)]]
            self.assertEqual(len(proxied), sum(d["kind"] == "StatefulSet" for d in documents), overlay)

    def test_planted_faults_are_found(self):
        documents = built(FOLDER / "base")
        whole = Findings(documents, self.flags, [], documents).found
        for name, plant in FAULTS.items():
            broken = copy.deepcopy(documents)
            plant(broken)
            self.assertNotEqual(Findings(broken, self.flags, VERSIONS[-1:], documents).found, whole, name)
        for (overlay, name), plant in POOL_FAULTS.items():
            documents = built(FOLDER / "overlays" / overlay)
            broken = copy.deepcopy(documents)
            plant(broken)
            self.assertNotEqual(Findings(broken, self.flags, VERSIONS[-1:], documents).found, [], f"{overlay}: {name}")
        count = len(FAULTS) + len(POOL_FAULTS)
        print(f"{count} of {count} planted faults found")


if __name__ == "__main__":
    unittest.main()
