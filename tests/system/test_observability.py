"""The dashboard, the alerts and the runbook agree with the metrics of a real service, and a real Prometheus evaluates them.

The service follows engines with every fault that has a metric. One engine loses a batch permanently, one has a gap that replay
repairs, and one restarts. One sends invalid events, one sends a wrong digest, and one is killed.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from time import time
from typing import Any, NamedTuple

import msgspec
import pytest

from cli_cases import RECORDING, RUN, SECONDS, Program
from cli_record_cases import serving as publishing_at
from kvevents.events import BlockRemoved, BlockStored, EventBatch, Heartbeat
from kvevents.index import PrefixIndex
from kvevents.service.exposition import STATES
from kvevents.service.http.routes import ROUTES
from kvevents.stream import Batch
from kvevents.testing import Faults, TapePlayer
from kvevents.wire import encode_batch
from load_cases import load_server
from metrics_reference import exported, read_documented
from observability_cases import Kit, Samples, find_metrics, parse_samples, wait_for_samples
from prometheus_cases import PROMTOOL, Prometheus, needs_prometheus, run_prometheus
from publisher_cases import ANY
from service_cases import Service, serving, wait_for
from tools.ports import reserve_port

KIT = Kit("grafana-dashboard.json", "prometheus-rules", "runbook")
MODEL = "tiny"
TOKENS = list(range(48))


class Fleet(NamedTuple):
    """A service and its engines."""

    service: Service
    killed: Program
    """An engine in its own process."""
    started_at: float
    """Unix time before the first batch."""

    def exported(self) -> Samples:
        answer = self.service.get("/metrics")
        assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        return parse_samples(answer.body.decode())

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples with these labels."""
        return sum(value for found, value in self.exported().get(name, []) if labels.items() <= found.items())


def make_odd_tape() -> list[tuple[bytes, int, bytes]]:
    """A tape with a prompt, an unknown event, and an event with too few tokens for its blocks."""
    batches: list[bytes] = [
        encode_batch(EventBatch(time(), [BlockStored([1, 2], None, TOKENS[:32], 16, medium="GPU")])),
        msgspec.msgpack.encode([time(), [["BlockMoved", [1]]], 0]),
        encode_batch(EventBatch(time(), [BlockStored([7, 8], None, TOKENS[:16], 16, medium="PMEM")])),
    ]
    return [(b"", number, payload) for number, payload in enumerate(batches)]


def make_diverging_tape() -> list[tuple[bytes, int, bytes]]:
    """A tape with a prompt, a heartbeat with the right digest and one with a wrong digest."""
    index, stored = PrefixIndex(), BlockStored([1, 2], None, TOKENS[:32], 16, medium="GPU")
    index.apply(Batch("a", 0, 0, 0, 0.0, [stored], False))
    heartbeats = [BlockRemoved([], heartbeat=Heartbeat(digest, 3_600.0)) for digest in (index.digest("a"), "0" * 32)]
    return [(b"", number, encode_batch(EventBatch(time(), [event]))) for number, event in enumerate([stored, *heartbeats])]


LENGTHS = {"odd": 3, "diverging": 3}


@pytest.fixture(scope="module", name="fleet")
def start_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Yield a service after the faults of its engines."""
    home = tmp_path_factory.mktemp("kvevents")
    config = home / "fleet.toml"
    config.write_text(f"""
        state_dir = "{home}/state"
        snapshot_seconds = 0.5
        memory_limit = {1 << 30}
        load = {{ max_age_seconds = 3600, request_seconds = 60 }}  # so that a busy machine does not lose it for a moment
        [[dns]]
        target = "engines.invalid:5557"
        model = "m"
    """)
    with ExitStack() as stack:
        service = stack.enter_context(serving("--config", config))
        fleet = Fleet(service, stack.enter_context(Program("play", RECORDING, "--run", RUN, *PLAYED)), time())
        tapes = {
            "healing": TapePlayer(RECORDING, run=RUN, faults=Faults(drop={3, 4})),
            "losing": TapePlayer(RECORDING, run=RUN, faults=Faults(skipped={5})),
            "restarting": TapePlayer(RECORDING, run=RUN),
            "odd": TapePlayer(make_odd_tape()),
            "diverging": TapePlayer(make_diverging_tape()),
        }
        load = stack.enter_context(load_server(3, 2)).url
        for name, tape in tapes.items():
            stack.enter_context(tape)
            more = {"load": load} if name == "healing" else {}
            register(service, name, tape.endpoint, tape.replay_endpoint, **more)
        register(service, "killed", *publishing_at(fleet.killed), load=f"http://127.0.0.1:{reserve_port()}")
        for name, tape in tapes.items():
            wait_for(f"{name} to be connected", lambda name=name: is_unconfirmed(service, name))  # type: ignore[misc]
            assert tape.wait_for_subscriber(SECONDS)
            tape.play(LENGTHS.get(name, 10))
        wait_for("all batches before the restart", lambda: service.source("restarting")["last_seq"] == 9)
        tapes["restarting"].restart(unseen_until=2)
        wait_for("a load", lambda: service.source("healing")["load"])
        # Workers that hold nothing are in "instances" too, and what the others hold may be reset.
        wait_for("a hit of what stays", lambda: "odd" in service.query(TOKENS, model_name=MODEL)["scores"])
        assert service.post("/v1/match", model=MODEL, tokens=TOKENS).status == 200
        assert service.post("/v1/select", model=MODEL, tokens=TOKENS).status == 200
        assert service.post("/query", {"model_name": "absent's", "token_ids": TOKENS}).status == 404
        yield fleet


def is_unconfirmed(service: Service, name: str) -> bool:
    """Return whether an engine is connected and has sent no live batch yet."""
    codes: list[str] = service.source(name)["trust"]["reason_codes"]
    return codes == ["replay-unproven"]


PLAYED = ("--endpoint", ANY, "--replay", ANY, "--wait-for-subscriber", "--speed", "max", "--linger")


def register(service: Service, name: str, endpoint: str, replay: str | None, **more: Any) -> None:
    answer = service.register(name, endpoint, replay_endpoint=replay, model_name=MODEL, block_size=None, **more)
    assert answer.status == 201, answer


# --- what is exported --------------------------------------------------------------------------------------------------------


def test_each_fault_has_its_metric(fleet: Fleet) -> None:
    expected_values = [
        ("kvevents_source_gaps_total", {"engine": "healing", "outcome": "recovered"}, 1),
        ("kvevents_source_gaps_total", {"engine": "losing", "outcome": "lost"}, 1),
        ("kvevents_source_lost_batches_total", {"engine": "losing"}, 1),
        ("kvevents_source_resets_total", {"engine": "restarting"}, 1),
        ("kvevents_source_rejected_events_total", {"engine": "odd"}, 1),
        ("kvevents_rejected_events_total", {"reason": "unknown-tag"}, 1),
        ("kvevents_index_rejected_stores_total", {"reason": "length-mismatch"}, 1),
        ("kvevents_source_reason", {"engine": "losing", "state": "DEGRADED", "reason": "lost"}, 1),
        ("kvevents_source_reason", {"engine": "odd", "reason": "rejected"}, 1),
        ("kvevents_source_reason", {"engine": "odd", "reason": "set-aside"}, 1),
        ("kvevents_source_state", {"engine": "healing", "state": "EXACT"}, 1),
        ("kvevents_source_heartbeats_total", {"engine": "diverging"}, 6),
        ("kvevents_source_digest_matches_total", {"engine": "diverging"}, 3),
        ("kvevents_source_divergences_total", {"engine": "diverging"}, 3),
        ("kvevents_source_resets_total", {"engine": "diverging"}, 2),
        ("kvevents_source_reason", {"engine": "diverging", "state": "DEGRADED", "reason": "diverged"}, 1),
        ("kvevents_sources", {}, 6),
        ("kvevents_discovery_faults", {}, 1),
        ("kvevents_snapshot_failed", {}, 0),
    ]
    for name, labels, value in expected_values:
        wait_for(f"{name}{labels} to be {value}", lambda: fleet.value(name, **labels) == value)  # noqa: B023 - called at once
    for outcome in ("complete", "truncated"):
        wait_for(f"replays {outcome}", lambda: fleet.value("kvevents_source_replays_total", outcome=outcome) > 0)  # noqa: B023
    wait_for("a snapshot", lambda: 0 <= time() - fleet.value("kvevents_snapshot_timestamp_seconds") < 5)
    assert fleet.value("kvevents_http_requests_total", path="/query", status="404") == 1
    assert fleet.value("kvevents_lookup_match_ratio_count") >= 3
    assert fleet.value("kvevents_lookup_hits_total") >= 3
    assert fleet.value("kvevents_index_limit_bytes") == 1 << 30
    assert fleet.value("kvevents_source_engine_requests", engine="healing") == 5
    assert fleet.value("kvevents_source_engine_load_known", engine="healing") == 1
    assert fleet.value("kvevents_source_engine_load_known", engine="killed") == 0
    assert fleet.started_at <= fleet.value("kvevents_source_last_batch_timestamp_seconds", engine="healing") <= time()


def test_every_metric_of_the_dashboard_and_the_alerts_is_exported(fleet: Fleet) -> None:
    """Each metric in an expression of the dashboard or an alert has a sample."""
    used = {name for _, expression in KIT.all_expressions() for name in find_metrics(expression)}
    assert len(used) > 40
    assert used <= wait_for_samples(used, fleet.exported).keys()


def test_selectors_use_only_labels_that_the_metric_has(fleet: Fleet) -> None:
    """The test checks the labels of selectors, not those of aggregations."""
    selectors = [
        (name, set(re.findall(r"(\w+)\s*=", selector)) - {"instance", "job"})
        for _, expression in KIT.all_expressions()
        for name, selector in re.findall(r"\b(kvevents_\w+)\{([^}]*)\}", expression)
    ]
    exported = wait_for_samples({name for name, _ in selectors}, fleet.exported)
    for name, labels in selectors:
        assert labels <= set(exported[name][0][0]), name


def test_label_values_are_bounded_and_never_come_from_peers(fleet: Fleet) -> None:
    """An engine sent an unknown medium and an unknown type of event, and a client sent an unknown model."""
    fleet.service.get("/no/such/path")
    exported = fleet.exported()
    samples = [(name, labels) for name, found in exported.items() for labels, _ in found]
    text = json.dumps(samples)
    assert not [word for word in ("PMEM", "BlockMoved", "such") if word in text]
    assert {labels["tier"] for labels, _ in exported["kvevents_index_tier_blocks"]} == {"gpu", "cpu", "disk", "other"}
    assert {labels["path"] for labels, _ in exported["kvevents_http_requests_total"]} <= ROUTES.keys()
    assert {labels["state"] for labels, _ in exported["kvevents_source_state"]} == set(STATES)
    assert not {"instance", "job"} & {label for _, labels in samples for label in labels}, "Prometheus sets these itself"


@needs_prometheus
def test_names_of_metrics_follow_the_conventions_of_prometheus(fleet: Fleet) -> None:
    """Prometheus' linter accepts the exported metrics."""
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"],
        input=fleet.service.get("/metrics").body,
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# --- dashboard and alerts------------------------------------------------------------------------------------------------------


def test_the_dashboard_can_be_imported_anywhere() -> None:
    assert KIT.variables == {"datasource", "instance", "model", "engine"}
    KIT.check_dashboard()


def test_every_alert_has_annotations_and_a_runbook_section() -> None:
    KIT.check_alerts()


def test_the_reference_lists_the_exported_metrics(fleet: Fleet) -> None:
    """The reference has each metric with its help text and its labels. Some metrics have samples only after faults."""
    found = exported(fleet.service.get("/metrics").body.decode())
    expected = read_documented("Service")
    assert {name: metric.meaning for name, metric in found.items()} == {name: each.meaning for name, each in expected.items()}
    for name, metric in found.items():
        assert metric.labels <= expected[name].labels, name


def test_links_within_the_runbook_refer_to_existing_headings() -> None:
    KIT.check_runbook_links()


@needs_prometheus
def test_alerts_fire_when_they_are_due_and_not_before() -> None:
    KIT.check_rules()


# --- a real Prometheus -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", name="prometheus")
def scraping_prometheus(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    target = f"{fleet.service.host}:{fleet.service.port}"
    with run_prometheus(tmp_path_factory.mktemp("prometheus"), KIT.rules, target) as prometheus:
        yield prometheus


@needs_prometheus
def test_every_panel_shows_data(fleet: Fleet, prometheus: Prometheus) -> None:
    fleet.service.query(TOKENS, model_name=MODEL)
    wait_for("another scrape", lambda: prometheus.query(f"kvevents_lookups_total >= {fleet.value('kvevents_lookups_total')}"))
    expressions = KIT.dashboard_expressions()
    assert len(expressions) > 40
    for title, expression in expressions:
        if title != "Resets":  # an annotation has data only at the moment of its event
            wait_for(f"{title} to show data", lambda: prometheus.query(expression))  # noqa: B023 - called at once


@needs_prometheus
def test_alerts_fire_when_an_engine_is_killed(fleet: Fleet, prometheus: Prometheus) -> None:
    """Alerts of earlier faults fire too, each with its engine."""

    def is_firing(alert: str, **labels: str) -> bool:
        return any({"alertname": alert, **labels}.items() <= found.items() for found in prometheus.firing())

    wait_for(
        "KveventsSourceDegraded", lambda: is_firing("KveventsSourceDegraded", engine="losing", model=MODEL, severity="warning")
    )
    wait_for(
        "KveventsDiscoveryFaults",
        lambda: is_firing("KveventsDiscoveryFaults", instance=f"{fleet.service.host}:{fleet.service.port}"),
    )
    wait_for("the engine to be EXACT", lambda: fleet.service.trust("killed")[0] == "EXACT")
    assert not is_firing("KveventsSourceStale", engine="killed")
    fleet.killed.process.kill()
    wait_for("KveventsSourceStale", lambda: is_firing("KveventsSourceStale", engine="killed", rank="0", state="STALE"))
    assert not is_firing("KveventsSourceStale", engine="healing")
    assert not is_firing("KveventsIngestFailed")
