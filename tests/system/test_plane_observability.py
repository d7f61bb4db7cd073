"""The plane's dashboard, alerts and runbook agree with the metrics of a real replica and bridge, and with a real Prometheus."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import time
from typing import Any, Final, NamedTuple
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import paths
from cli_cases import SECONDS, Program
from metrics_reference import exported, read_documented
from nats_servers import nats_server, needs_nats
from ports import reserve_port
from prometheus_cases import PROMETHEUS, PROMTOOL, Prometheus, count_scrapes, needs_prometheus
from service_cases import MODEL, Service, engine, serving, wait_for

pytestmark = needs_nats
ROOT: Final = paths.ROOT
KIT: Final = ROOT / "observability"
RULES, RULES_TEST = KIT / "plane-rules.yaml", KIT / "plane-rules-test.yaml"
DASHBOARD: dict[str, Any] = json.loads((KIT / "grafana-plane.json").read_text())
ALERTS: list[dict[str, Any]] = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
RUNBOOK: Final = (ROOT / "docs" / "operations" / "plane-runbook.md").read_text()
Samples = dict[str, list[tuple[dict[str, str], float]]]


def find_expressions() -> list[tuple[str, str]]:
    """Return title and PromQL of each target, with the dashboard's variables as Grafana sets them for All."""
    chosen = {"instance": ".*", "__rate_interval": "30s"}
    found = [(panel["title"], target["expr"]) for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    return [(title, re.sub(r"\$(\w+)", lambda variable: chosen[variable[1]], expression)) for title, expression in found]


def find_metrics(expression: str) -> set[str]:
    return set(re.findall(r"\bkvevents_\w+", expression))


class Plane(NamedTuple):
    """A replica and the bridge whose pages it reads."""

    replica: Service
    bridge: Program
    metrics_port: int

    def read_metrics(self) -> tuple[str, str]:
        """Return the exported metrics of the bridge and of the replica."""
        with urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=SECONDS) as answer:
            return answer.read().decode(), self.replica.get("/metrics").body.decode()

    def exported(self) -> Samples:
        """Return the samples of both by name."""
        found: Samples = {}
        for page in self.read_metrics():
            for family in text_string_to_metric_families(page):
                for sample in family.samples:
                    found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found


@contextmanager
def run_plane(folder: Path) -> Iterator[Plane]:
    with ExitStack() as stack:
        server = stack.enter_context(nats_server(folder))
        one = stack.enter_context(engine())
        port = reserve_port()
        worker = f"one={one.publisher.endpoint},{one.publisher.replay_endpoint}"
        limits = ("--partitions", 2, "--partition-size", "64MiB")
        source_options = ("--model", MODEL, "--worker", worker, "--metrics-port", port, "--bridge-name", "bridge")
        bridge = stack.enter_context(Program("bridge", "--nats", server.url, *limits, *source_options))
        # A replica with a shard exports the metrics of every replica, and more.
        service_port = reserve_port()
        shard = (
            "--port",
            service_port,
            "--replica-name",
            "a",
            "--shard-url",
            f"http://127.0.0.1:{service_port}",
            "--replication-factor",
            1,
        )
        replica = stack.enter_context(serving("--nats", server.url, "--snapshot-seconds", "0.5", *shard))
        one.store(range(64))
        replica.exact("one", blocks=4)
        plane = Plane(replica, bridge, port)
        wait_for("a snapshot", lambda: "kvevents_plane_partition_snapshot_timestamp_seconds" in plane.exported())
        yield plane


@pytest.fixture(scope="module", name="plane")
def start_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    with run_plane(tmp_path_factory.mktemp("nats")) as plane:
        yield plane


# --- what is exported --------------------------------------------------------------------------------------------------------


def test_every_metric_of_the_dashboard_and_the_alerts_is_exported_with_its_labels(plane: Plane) -> None:
    """No panel and no alert refers to a metric or label that does not exist."""
    exported = plane.exported()
    for title, expression in [*find_expressions(), *((rule["alert"], rule["expr"]) for rule in ALERTS)]:
        assert find_metrics(expression) <= exported.keys(), title
        grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
        expected = {label.strip() for labels in grouped for label in labels.split(",")} - {"instance", "job"}
        labels = {label for name in find_metrics(expression) for label in exported[name][0][0]}
        assert expected <= labels, title


def test_metrics_of_a_plane_without_faults_have_values_without_faults(plane: Plane) -> None:
    """The test checks the values of the metrics that alerts use."""
    found = {name: [value for _, value in samples] for name, samples in plane.exported().items()}
    expected = {
        "kvevents_plane_synced": [1],
        "kvevents_plane_readable": [1],
        "kvevents_plane_bridges": [1],
        "kvevents_plane_snapshot_failed": [0],
        "kvevents_plane_index_builds_total": [1],
        "kvevents_plane_divergences_total": [0],
        "kvevents_plane_invalid_records_total": [0],
        "kvevents_plane_duplicate_records_total": [0],
        "kvevents_plane_discarded_pages_total": [0],
        "kvevents_plane_partition_lag_pages": [0, 0],
        "kvevents_shard_partitions": [2, 2, 0],
        "kvevents_shard_replicas": [0],
        "kvevents_shard_denied_replicas": [0],
        "kvevents_shard_request_failures_total": [0],
        "kvevents_shard_incomplete_answers_total": [0],
        "kvevents_bridge_connected": [1],
        "kvevents_bridge_name_shared": [0],
        "kvevents_bridge_partition_blocked": [0, 0],
        "kvevents_bridge_network_failure_suspected": [0],
        "kvevents_bridge_invalid_records_total": [0],
    }
    assert {name: found[name] for name in expected} == expected
    assert time() - min(found["kvevents_plane_partition_last_page_timestamp_seconds"]) < 10


def test_the_reference_lists_the_exported_metrics(plane: Plane) -> None:
    """The reference has each metric with its help text and with the labels of its samples."""
    of_bridge, of_replica = map(exported, plane.read_metrics())
    assert of_bridge == read_documented("Bridge")
    of_service = read_documented("Service").keys()
    assert {name: metric for name, metric in of_replica.items() if name not in of_service} == read_documented("Replica")


# --- dashboard and alerts------------------------------------------------------------------------------------------------------


def test_every_alert_has_annotations_and_a_runbook_section() -> None:
    anchors = {heading.lower() for heading in re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE)}
    assert {rule["alert"].lower() for rule in ALERTS} == anchors
    for rule in ALERTS:
        assert rule["labels"].keys() == {"severity", "component"}
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/operations/plane-runbook.md#{rule['alert'].lower()}"
    assert {case["name"] for case in yaml.safe_load(RULES_TEST.read_text())["tests"]} == {rule["alert"] for rule in ALERTS}
    assert set(re.findall(r"\]\(#([\w-]+)\)", RUNBOOK)) <= anchors


def test_the_dashboard_can_be_imported_anywhere() -> None:
    """The dashboard names no data source, its panels do not overlap, and every variable exists."""
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) <= variables | {"__rate_interval", "__all"}
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    for panel in panels:
        assert {target["datasource"]["uid"] for target in panel["targets"]} | {panel["datasource"]["uid"]} == {"${datasource}"}
        assert panel["description"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    positions = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for position in positions
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


@needs_prometheus
@pytest.mark.parametrize("check", [("check", "rules", RULES), ("test", "rules", RULES_TEST)], ids=["check", "test"])
def test_alerts_fire_when_they_are_due_and_not_before(check: tuple[object, ...]) -> None:
    """promtool can load the rules, and each alert passes its test."""
    done = subprocess.run([PROMTOOL, *map(str, check)], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# --- a real Prometheus -------------------------------------------------------------------------------------------------------


@contextmanager
def start_prometheus(plane: Plane, home: Path) -> Iterator[Prometheus]:
    (home / "rules.yaml").write_text(re.sub(r"for: \d+m", "for: 0s", RULES.read_text()))
    targets = [f"{plane.replica.host}:{plane.replica.port}", f"127.0.0.1:{plane.metrics_port}"]
    settings = {
        "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "kvevents", "static_configs": [{"targets": targets}]}],
    }
    (home / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{reserve_port()}"
    command = (PROMETHEUS, f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/data")
    with Program(command=(*command, f"--web.listen-address={address}")) as program:
        program.err.wait("Server is ready to receive web requests")
        prometheus = Prometheus(f"http://{address}")
        wait_for("enough scrapes for a rate", lambda: count_scrapes(prometheus) >= 3)
        yield prometheus


@pytest.fixture(scope="module", name="prometheus")
def scraping_prometheus(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with start_prometheus(plane, tmp_path_factory.mktemp("prometheus")) as prometheus:
        yield prometheus


@needs_prometheus
def test_every_panel_shows_data(plane: Plane, prometheus: Prometheus) -> None:
    for title, expression in find_expressions():
        wait_for(f"{title} to show data", lambda: prometheus.query(expression))  # noqa: B023 - called at once


@needs_prometheus
def test_an_alert_fires_when_the_bridge_is_killed(tmp_path: Path) -> None:
    """The test has a plane of its own, which the other tests do not need."""
    with run_plane(tmp_path) as plane, start_prometheus(plane, tmp_path) as prometheus:

        def firing() -> set[str]:
            return {labels["alertname"] for labels in prometheus.firing()}

        wait_for("no firing alert", lambda: not firing())
        plane.bridge.process.kill()
        wait_for("KveventsBridgeAbsent", lambda: "KveventsBridgeAbsent" in firing())
        assert not firing() & {
            "KveventsPlaneUnreadable",
            "KveventsReplicaNotSynced",
            "KveventsReplicasDiverged",
            "KveventsLogInvalid",
        }
