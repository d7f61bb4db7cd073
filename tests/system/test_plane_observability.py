"""The plane's dashboard, alerts and runbook agree with the metrics of a real replica and bridge, and with a real Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import time
from typing import NamedTuple
from urllib.request import urlopen

import pytest

from cli_cases import SECONDS, Program
from metrics_reference import exported, read_documented
from nats_cases import needs_nats
from observability_cases import Kit, Samples, find_metrics, parse_samples, wait_for_samples
from prometheus_cases import Prometheus, needs_prometheus, run_prometheus
from service_cases import MODEL, Service, engine, serving, wait_for
from tools.nats_servers import nats_server
from tools.ports import reserve_port

pytestmark = needs_nats
KIT = Kit("grafana-plane.json", "plane-rules", "plane-runbook")


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
        """Return the samples of the bridge and of the replica."""
        return parse_samples(*self.read_metrics())

    def values(self, name: str) -> list[float]:
        """Return the values of a metric."""
        return [value for _, value in self.exported().get(name, [])]


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
        replica = stack.enter_context(serving("--nats", server.url, "--snapshot-seconds", "0.5", "--replica-name", "a"))
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
    used = {name for _, expression in KIT.all_expressions() for name in find_metrics(expression)}
    exported = wait_for_samples(used, plane.exported)
    for title, expression in KIT.all_expressions():
        grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", expression)
        expected = {label.strip() for labels in grouped for label in labels.split(",")} - {"instance", "job"}
        labels = {label for name in find_metrics(expression) for label in exported[name][0][0]}
        assert expected <= labels, title


def test_metrics_of_a_plane_without_faults_have_values_without_faults(plane: Plane) -> None:
    """The values of the metrics that alerts use. The replica reads pages a little later than they are written."""
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
        "kvevents_bridge_connected": [1],
        "kvevents_bridge_name_shared": [0],
        "kvevents_bridge_partition_blocked": [0, 0],
        "kvevents_bridge_network_failure_suspected": [0],
        "kvevents_bridge_invalid_records_total": [0],
    }
    for name, values in expected.items():
        wait_for(f"{name} to be {values}", lambda: plane.values(name) == values)  # noqa: B023 - called at once
    before = time()
    wait_for("newer pages", lambda: min(plane.values("kvevents_plane_partition_last_page_timestamp_seconds")) > before)


def test_the_reference_lists_the_exported_metrics(plane: Plane) -> None:
    """The reference has each metric with its help text and with the labels of its samples."""
    of_bridge, of_replica = map(exported, plane.read_metrics())
    assert of_bridge == read_documented("Bridge")
    of_service = read_documented("Service").keys()
    assert {name: metric for name, metric in of_replica.items() if name not in of_service} == read_documented("Replica")


# --- dashboard and alerts------------------------------------------------------------------------------------------------------


def test_every_alert_has_annotations_and_a_runbook_section() -> None:
    KIT.check_alerts()


def test_links_within_the_runbook_refer_to_existing_headings() -> None:
    KIT.check_runbook_links()


def test_the_dashboard_can_be_imported_anywhere() -> None:
    KIT.check_dashboard()


@needs_prometheus
def test_alerts_fire_when_they_are_due_and_not_before() -> None:
    KIT.check_rules()


# --- a real Prometheus -------------------------------------------------------------------------------------------------------


@contextmanager
def start_prometheus(plane: Plane, home: Path) -> Iterator[Prometheus]:
    targets = f"{plane.replica.host}:{plane.replica.port}", f"127.0.0.1:{plane.metrics_port}"
    with run_prometheus(home, KIT.rules, *targets) as prometheus:
        yield prometheus


@pytest.fixture(scope="module", name="prometheus")
def scraping_prometheus(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with start_prometheus(plane, tmp_path_factory.mktemp("prometheus")) as prometheus:
        yield prometheus


@needs_prometheus
def test_every_panel_shows_data(plane: Plane, prometheus: Prometheus) -> None:
    for title, expression in KIT.dashboard_expressions():
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
