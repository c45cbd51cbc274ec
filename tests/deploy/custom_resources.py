"""Resources of Kueue, the Prometheus operator and cert-manager, of which no package has a schema: the fields that may be here, and what they
name in other documents."""
import json
import pathlib
import re

import yaml

MONITORING = pathlib.Path(__file__).resolve().parents[2] / "deploy" / "monitoring"
DURATION = re.compile(r"[1-9][0-9]*(ms|s|m|h)")
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
LABEL = re.compile(r"([a-z0-9.-]+/)?[A-Za-z_][A-Za-z0-9_.-]*")
MAP = {LABEL: str}
SELECTOR = {"matchLabels": MAP, "matchExpressions": [{"key!": LABEL, "operator!": {"In", "NotIn"}, "values!": [str]}]}
KEY = {"algorithm!": {"ECDSA"}, "size!": {256}, "encoding!": {"PKCS8"}, "rotationPolicy!": {"Never"}}
ISSUER = {"group!": {"cert-manager.io"}, "kind!": {"Issuer", "ClusterIssuer"}, "name!": NAME}
RULE = {"alert!": re.compile(r"Ravel\w+"), "expr!": str, "for": DURATION, "labels!": {"severity!": {"critical", "warning"}},
        "annotations!": {"summary!": str, "description": str}}
ENDPOINT = {"port!": NAME, "path": re.compile("/[a-z/]*"), "scheme": {"http", "https"}, "interval": DURATION, "honorLabels": bool,
            "tlsConfig": {"insecureSkipVerify": bool, "serverName": NAME},
            "authorization": {"type": str, "credentials!": {"name!": NAME, "key!": str}}}
# By kind: version and spec. A key with `!` must be there; a set lists values, a pattern matches all of a text.
SPECS = {
    "LocalQueue": ("kueue.x-k8s.io/v1beta2", {"clusterQueue!": NAME}),
    "PodMonitor": ("monitoring.coreos.com/v1", {"selector!": SELECTOR, "podMetricsEndpoints!": [ENDPOINT]}),
    "PrometheusRule": ("monitoring.coreos.com/v1", {"groups!": [{"name!": NAME, "rules!": [RULE]}]}),
    "Issuer": ("cert-manager.io/v1", {"selfSigned": {}, "ca": {"secretName!": NAME}}),
    "Certificate": ("cert-manager.io/v1", {
        "secretName!": NAME, "issuerRef!": ISSUER, "privateKey!": KEY, "isCA": bool, "commonName": str, "duration!": DURATION,
        "renewBefore": DURATION, "usages": [{"digital signature", "server auth", "client auth", "cert sign"}], "dnsNames": [NAME],
        "uris": [re.compile(r"spiffe://[a-z0-9-]+\.ravel/(store|coordinator|node/[\w.-]+)")]}),
}
METADATA = {"name!": NAME, "namespace!": NAME, "labels!": MAP, "annotations": MAP}
CLUSTER_KINDS = {"Namespace", "ClusterRole", "ClusterRoleBinding", "ClusterTrainingRuntime"}
# The flags of kube-rbac-proxy that may be used here.
PROXY_FLAGS = {"--secure-listen-address", "--upstream", "--allow-paths", "--ignore-paths", "--tls-cert-file", "--tls-private-key-file",
               "--tls-min-version", "--client-ca-file", "--auth-token-audiences", "--proxy-endpoints-port"}
# Secrets that the administrator makes (deploy/README.md).
BY_HAND = {"ravel-join", "ravel-store-identity"}


def differs(value, schema, path):
    """What in a tree is not as the schema says, as sentences."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{path}: expected an object"]
        found = [f"{path}.{key[:-1]}: is missing" for key in schema if isinstance(key, str) and key.endswith("!") and key[:-1] not in value]
        for key, inner in value.items():
            matching = [s for k, s in schema.items() if (k.fullmatch(key) if isinstance(k, re.Pattern) else k.rstrip("!") == key)]
            found += differs(inner, matching[0], f"{path}.{key}") if matching else [f"{path}.{key}: unknown"]
        return found
    if isinstance(schema, list):
        if not isinstance(value, list) or not value:
            return [f"{path}: expected a list"]
        return [text for index, inner in enumerate(value) for text in differs(inner, schema[0], f"{path}[{index}]")]
    if isinstance(schema, set):
        good = any(value == one and type(value) is type(one) for one in schema)
    elif isinstance(schema, re.Pattern):
        good = isinstance(value, str) and schema.fullmatch(value) is not None
    else:
        good = type(value) is schema and value != ""
    return [] if good else [f"{path}: {value!r}"]


def check_schema(document):
    version, spec = SPECS[document["kind"]]
    return differs(document, {"apiVersion!": {version}, "kind!": str, "metadata!": METADATA, "spec!": spec}, document["kind"])


def selects(selector, labels):
    return (all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items()) and
            all((labels.get(e["key"]) in e["values"]) == (e["operator"] == "In") for e in selector.get("matchExpressions", [])))


def seconds(text):
    return int(re.match(r"\d+", text)[0]) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[text.lstrip("0123456789")]


def containers(template):
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def flag(container, name):
    words = " ".join(map(str, [*container.get("command", []), *container.get("args", [])]))
    found = re.search(rf"{name}[= ](\S+)", words)
    return found[1] if found else None


class References:
    """What resources name must be among the documents: (document, sentence) for what is not. `pods`: (document, template)."""

    def __init__(self, documents, pods):
        self.documents = [d for d in documents if d["kind"] not in SPECS or not check_schema(d)]
        self.pods, self.found = list(pods), []
        self.names = {(d["kind"], d["metadata"]["name"]) for d in self.documents}
        checks = {"PodMonitor": self.monitor, "PrometheusRule": self.rules, "Issuer": self.issuer, "Certificate": self.certificate,
                  "ConfigMap": self.dashboard, "Secret": self.secret, "ClusterRoleBinding": self.binding, "RoleBinding": self.binding,
                  "Role": self.role}
        for document in self.documents:
            if document["kind"] in checks:
                checks[document["kind"]](document)
        for document, template in self.pods:
            self.proxies(document, template)
            self.secret_volumes(document, template)
            self.callers(document, template)

    def say(self, document, text):
        self.found.append((document, text))

    def all(self, kind):
        return [d for d in self.documents if d["kind"] == kind]

    def monitor(self, document):
        spec = document["spec"]
        matching = [t for _, t in self.pods if selects(spec["selector"], t["metadata"]["labels"])]
        if not matching:
            self.say(document, "selects nothing")
        for endpoint in spec["podMetricsEndpoints"]:
            for template in matching:
                ports = {p["name"]: p["containerPort"] for c in containers(template) for p in c.get("ports", [])}
                number = ports.get(endpoint["port"])
                if number is None:
                    self.say(document, f"a pod has no port {endpoint['port']}")
                elif not any(selects(policy["spec"]["podSelector"], template["metadata"]["labels"]) and
                             any(number == p["port"] for rule in policy["spec"].get("ingress", []) for p in rule.get("ports", []))
                             for policy in self.all("NetworkPolicy")):
                    self.say(document, f"no policy lets anybody reach port {number}")
            credentials = endpoint.get("authorization", {}).get("credentials")
            if credentials is None:
                self.say(document, "shows no token")
            elif ("Secret", credentials["name"]) not in self.names or credentials["key"] != "token":
                self.say(document, f"no secret {credentials['name']} with the key {credentials['key']}")

    def rules(self, document):
        if document["spec"] != yaml.safe_load((MONITORING / "alerts.yaml").read_text()):
            self.say(document, "is not deploy/monitoring/alerts.yaml")

    def dashboard(self, document):
        if document["metadata"].get("labels", {}).get("grafana_dashboard") == "1":
            if list(document["data"]) != ["ravel.json"] or (
                    json.loads(document["data"]["ravel.json"]) != json.loads((MONITORING / "dashboard.json").read_text())):
                self.say(document, "is not deploy/monitoring/dashboard.json")

    def secret(self, document):
        account = document["metadata"].get("annotations", {}).get("kubernetes.io/service-account.name")
        if "data" in document or "stringData" in document:
            self.say(document, "has a secret in a manifest")
        elif document.get("type") == "Opaque":
            if not any(document["metadata"]["name"] in rule.get("resourceNames", []) for role in self.all("Role") for rule in role["rules"]):
                self.say(document, "is empty, and nobody may fill it")
        elif document.get("type") != "kubernetes.io/service-account-token":
            self.say(document, f"is of the type {document.get('type')}")
        elif ("ServiceAccount", account) not in self.names:
            self.say(document, f"no service account {account}")

    def binding(self, document):
        role = document["roleRef"]["name"]
        if (document["roleRef"]["kind"], role) not in self.names and not role.startswith("system:"):
            self.say(document, f"no role {role}")
        for subject in document["subjects"]:
            if (subject["kind"], subject["name"]) not in self.names or subject["namespace"] != "ravel":
                self.say(document, f"no {subject['kind']} {subject['name']}")

    def role(self, document):
        """A right to secrets is one to read and change those that are here, by name."""
        for rule in document["rules"]:
            names = rule.get("resourceNames", [])
            if rule["apiGroups"] != [""] or rule["resources"] != ["secrets"] or not set(rule["verbs"]) <= {"get", "patch"} or not names:
                self.say(document, f"gives more than to read and change single secrets: {rule}")
            for name in names:
                if ("Secret", name) not in self.names:
                    self.say(document, f"no secret {name}")

    def callers(self, document, template):
        """Programs of Ravel have no token of Kubernetes, and who has one has a policy that lets it reach the API server."""
        projected = {v["name"] for v in template["spec"].get("volumes", [])
                     for s in v.get("projected", {}).get("sources", []) if "serviceAccountToken" in s}
        for container in containers(template):
            if not projected & {m["name"] for m in container.get("volumeMounts", [])}:
                continue
            if container["image"].rsplit("/", 1)[-1].startswith("ravel:"):
                self.say(document, f"{container['name']}: has a token of Kubernetes")
            ports = {p["port"] for policy in self.all("NetworkPolicy") if selects(policy["spec"]["podSelector"], template["metadata"]["labels"])
                     for rule in policy["spec"].get("egress", []) if "to" not in rule for p in rule["ports"]}
            if not {443, 6443} <= ports:
                self.say(document, f"{container['name']}: no policy lets it reach the API server")
            words = container.get("args", [])
            if "/kubectl:" in container["image"] and not any(
                    words[i:i + 2] == ["patch", "secret"] and ("Secret", words[i + 2]) in self.names for i in range(len(words) - 2)):
                self.say(document, f"{container['name']}: patches no secret that is here")

    def issuer(self, document):
        if len(document["spec"]) != 1:
            self.say(document, "expected one of selfSigned and ca")
        secret = document["spec"].get("ca", {}).get("secretName")
        if secret and not any(c["spec"]["secretName"] == secret and c["spec"].get("isCA") for c in self.all("Certificate")):
            self.say(document, f"no certificate of an authority makes the secret {secret}")

    def certificate(self, document):
        spec = document["spec"]
        if (spec["issuerRef"]["kind"], spec["issuerRef"]["name"]) not in self.names:
            self.say(document, f"no {spec['issuerRef']['kind']} {spec['issuerRef']['name']}")
        if seconds(spec.get("renewBefore", "0s")) >= seconds(spec["duration"]):
            self.say(document, "is renewed before it is made")
        if not any(v.get("secret", {}).get("secretName") == spec["secretName"] for _, t in self.pods for v in t["spec"].get("volumes", [])):
            self.say(document, f"nothing mounts {spec['secretName']}")
        if spec.get("isCA"):
            return
        clusters = {flag(c, "--cluster") for _, t in self.pods for c in containers(t)} - {None}
        for uri in spec.get("uris", [""]):
            if uri.removeprefix("spiffe://").split(".")[0] not in clusters:
                self.say(document, f"the URI {uri!r} is not of the cluster {clusters}")
        if not {"server auth", "client auth"} <= set(spec.get("usages", [])):
            self.say(document, "a store is a server, and a client of the coordinator")
        for name in spec.get("dnsNames", []):
            if ("Service", name.split(".")[0]) not in self.names:
                self.say(document, f"no service {name}")

    def proxies(self, document, template):
        every = containers(template)
        for container in every:
            if "kube-rbac-proxy" not in container["image"]:
                continue
            unknown = {word.split("=")[0] for word in container["args"]} - PROXY_FLAGS
            if unknown:
                self.say(document, f"kube-rbac-proxy has no {' '.join(sorted(unknown))}")
            if flag(container, "--allow-paths") and flag(container, "--ignore-paths"):
                self.say(document, "kube-rbac-proxy does not take --allow-paths together with --ignore-paths")
            upstream = re.fullmatch(r"http://(127\.0\.0\.1:\d+)/", flag(container, "--upstream") or "")
            if upstream is None or upstream[1] not in {flag(c, "--http-listen") for c in every}:
                self.say(document, "the proxy asks where nobody listens")
            listen = (flag(container, "--secure-listen-address") or "").rsplit(":", 1)[-1]
            if listen not in {str(port["containerPort"]) for port in container.get("ports", [])}:
                self.say(document, f"the proxy listens on a port that it does not name: {listen}")

    def secret_volumes(self, document, template):
        made = {c["spec"]["secretName"] for c in self.all("Certificate")}
        for volume in template["spec"].get("volumes", []):
            secret = volume.get("secret", {})
            name = secret.get("secretName")
            if name and name not in made | BY_HAND and ("Secret", name) not in self.names:
                self.say(document, f"nobody makes the secret {name}")
            keys = {item["key"] for item in secret.get("items", [])}
            if name in made and not keys <= {"tls.crt", "tls.key", "ca.crt"}:
                self.say(document, f"cert-manager's secrets have no {keys}")
            if name in made and document["kind"] == "Job" and (not keys or "tls.key" in keys):
                self.say(document, f"a Job has the key of {name}")
            if name in made and name in BY_HAND and not keys:
                self.say(document, f"the secret {name} has other names for its files when cert-manager makes it")
