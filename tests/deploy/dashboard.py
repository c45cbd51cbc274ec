"""The Grafana dashboard of deploy/monitoring as data, and what a Prometheus answers to its queries."""
import dataclasses
import json
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "monitoring" / "dashboard.json"
# Grafana's value for a data source that scrapes every 15 s, which is its default.
RATE_INTERVAL = "1m"


@dataclasses.dataclass
class Line:
    """One series of one query of a panel."""
    legend: str
    labels: dict
    points: list  # (time, value)


def load():
    return json.loads(FILE.read_text())


def expand(text, variables):
    """Puts values in for $name and ${name}."""
    def value(match):
        return variables[match.group(1) or match.group(2)]
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, text)


def panels(board, kinds=None):
    return [panel for panel in board["panels"] if (panel["type"] in kinds if kinds else panel["type"] != "row")]


def queries(board):
    """(panel, target) of each query."""
    return [(panel, target) for panel in panels(board) for target in panel["targets"]]


def variables_of(board, server, begin, end):
    """The first value of each variable, found with the variable's own query as Grafana would."""
    values = {"__rate_interval": RATE_INTERVAL}
    for variable in board["templating"]["list"]:
        if variable["type"] != "query":
            values[variable["name"]] = "recorded"
            continue
        match, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
        found = server.label_values(label, expand(match, values), begin, end)
        assert found, f"variable {variable['name']} has no value"
        values[variable["name"]] = found[0]
    return values


def legend_of(target, labels):
    if target["legendFormat"]:
        return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match.group(1), ""), target["legendFormat"])
    return labels.get("__name__", "value")


def answer(server, target, variables, begin, end, step):
    """Lines of one query: over the range, or at its end where the query is an instant one."""
    query = expand(target["expr"], variables)
    rows = server.query(query, end) if target.get("instant") else server.query_range(query, begin, end, step)
    return [Line(legend_of(target, labels), labels, points) for labels, points in rows]
