"""A dashboard, its alerts and its runbook, and the samples of a metrics page that they are compared with."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterable
from typing import Any, Final

import yaml
from prometheus_client.parser import text_string_to_metric_families

import paths
from cli_cases import SECONDS
from prometheus_cases import PROMTOOL
from service_cases import wait_for

FOLDER: Final = paths.ROOT / "observability"
WIDTH: Final = 24
"""Columns of a Grafana dashboard."""

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Labels and value of each sample, by the sample's name."""


def parse_samples(*pages: str) -> Samples:
    found: Samples = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def wait_for_samples(names: Iterable[str], read: Callable[[], Samples]) -> Samples:
    """Return all samples when each of these metrics has some. Several have none before a snapshot or a fault."""
    found = read()
    for name in names:
        if name not in found:
            wait_for(f"a sample of {name}", lambda: name in read())  # noqa: B023 - called at once
    return read()


def find_metrics(expression: str) -> set[str]:
    """Return the names of all metrics in PromQL."""
    return set(re.findall(r"\b(?:kvevents|process)_\w+", expression))


class Kit:
    """The files of `observability/` for one kind of process, and its runbook."""

    def __init__(self, dashboard: str, rules: str, runbook: str) -> None:
        self.dashboard: dict[str, Any] = json.loads((FOLDER / dashboard).read_text())
        self.rules = FOLDER / f"{rules}.yaml"
        self.rules_test = FOLDER / f"{rules}-test.yaml"
        groups = yaml.safe_load(self.rules.read_text())["groups"]
        self.alerts: list[dict[str, Any]] = [rule for group in groups for rule in group["rules"]]
        self.runbook_path = f"docs/operations/{runbook}.md"
        self.runbook = (paths.ROOT / self.runbook_path).read_text()

    @property
    def panels(self) -> list[dict[str, Any]]:
        return [panel for panel in self.dashboard["panels"] if panel["type"] != "row"]

    @property
    def variables(self) -> set[str]:
        return {each["name"] for each in self.dashboard["templating"]["list"]}

    def dashboard_expressions(self) -> list[tuple[str, str]]:
        """Return title and PromQL of each target and annotation, with the variables as Grafana sets them for All."""
        found = [(panel["title"], target["expr"]) for panel in self.panels for target in panel["targets"]]
        found += [(each["name"], each["expr"]) for each in self.dashboard.get("annotations", {}).get("list", [])]
        chosen = dict.fromkeys(self.variables, ".*") | {"__rate_interval": "30s"}
        return [(title, re.sub(r"\$(\w+)", lambda variable: chosen[variable[1]], expression)) for title, expression in found]

    def all_expressions(self) -> list[tuple[str, str]]:
        """Return title and PromQL of the dashboard and of all alerts."""
        return [*self.dashboard_expressions(), *((rule["alert"], rule["expr"]) for rule in self.alerts)]

    def check_dashboard(self) -> None:
        """Check that Grafana can import it anywhere: no fixed data source, no overlapping panels, no unknown variable."""
        assert set(re.findall(r"\$\{?(\w+)", json.dumps(self.dashboard))) <= self.variables | {"__rate_interval", "__all"}
        assert self.dashboard.get("id") is None
        ids = [panel["id"] for panel in self.dashboard["panels"]]
        assert len(set(ids)) == len(ids)
        for panel in self.panels:
            sources = {target["datasource"]["uid"] for target in panel["targets"]} | {panel["datasource"]["uid"]}
            assert sources == {"${datasource}"}
            assert panel["title"]
            assert panel["description"]
        positions = [panel["gridPos"] for panel in self.dashboard["panels"]]
        cells = [
            (x, y)
            for position in positions
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        ]
        assert len(set(cells)) == len(cells)
        assert max(x for x, _ in cells) < WIDTH

    def check_alerts(self) -> None:
        """Check that each alert has its annotations, a section of the runbook and a test."""
        anchors = {heading.lower() for heading in re.findall(r"^## (\w+)$", self.runbook, re.MULTILINE)}
        assert {rule["alert"].lower() for rule in self.alerts} == anchors
        for rule in self.alerts:
            assert rule["labels"].keys() == {"severity", "component"}
            assert rule["labels"]["severity"] in {"warning", "critical"}
            assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
            assert rule["annotations"]["runbook_url"] == f"{self.runbook_path}#{rule['alert'].lower()}"
        tested = {case["name"].split(" of ")[0] for case in yaml.safe_load(self.rules_test.read_text())["tests"]}
        assert tested == {rule["alert"] for rule in self.alerts}

    def check_runbook_links(self) -> None:
        """Check that links within the runbook refer to its headings."""
        headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", self.runbook, re.MULTILINE)}
        assert set(re.findall(r"\]\(#([\w-]+)\)", self.runbook)) <= headings

    def check_rules(self) -> None:
        """Check with promtool that Prometheus can load the rules, and that each alert passes its test."""
        for kind, file in (("check", self.rules), ("test", self.rules_test)):
            command = [PROMTOOL, kind, "rules", str(file)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
