"""The values of /metrics. `test_observability.py` tests a real service with a real Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from kvevents.client.reasons import Reason
from kvevents.events import BlockStored, EventBatch
from kvevents.service.data_plane import AnswerCounts, DataPlaneCounts, HistogramCounts, PathCounts
from kvevents.service.exposition import STATES, format_metrics
from kvevents.service.fleet import fleet
from kvevents.service.fleet.member import Member, SourceFault
from kvevents.service.fleet.registration import Registration
from kvevents.service.service import Service
from kvevents.service.settings import ServiceSettings
from kvevents.stream import DegradedReason, RawBatch, Trust
from kvevents.wire import encode_batch

BLOCK = 16


@pytest.fixture(name="service")
def service_without_sources() -> Iterator[Service]:
    with make_service() as service:
        yield service


@contextmanager
def make_service() -> Iterator[Service]:
    service = Service(ServiceSettings())
    yield service
    service.fleet.follower.subscriber.close()


def register(service: Service, instance: str = "engine-0", **more: object) -> Member:
    registration = Registration(instance=instance, endpoint="tcp://127.0.0.1:1", model="tiny", **more)  # type: ignore[arg-type]
    service.fleet.register(registration).result()
    return service.fleet.members[registration.key]


def refresh_fleet(service: Service) -> None:
    """Refresh the members that received events, as the ingest thread does."""
    service.fleet.refresh()


def store(service: Service, member: Member, *media: str) -> None:
    """Store a block on each of these media."""
    events = [BlockStored([1], None, list(range(BLOCK)), BLOCK, medium=medium) for medium in media]
    service.index.apply(RawBatch(*member.registration.key, 0, 0, False, encode_batch(EventBatch(0.0, list(events)))))
    refresh_fleet(service)


def samples(service: Service) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return all samples by name and labels, each of which occurs once."""
    found = [
        ((sample.name, frozenset(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(format_metrics(service).decode())
        for sample in family.samples
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def value(service: Service, name: str, **wanted: str) -> float | None:
    """Return the sum of the samples with these labels; None without samples."""
    found = [each for (one, found), each in samples(service).items() if one == name and wanted.items() <= dict(found).items()]
    return sum(found) if found else None


def test_each_source_is_in_one_state(service: Service) -> None:
    for number in range(3):
        register(service, f"engine-{number}")
    refresh_fleet(service)
    for number in range(3):
        states = {state: value(service, "kvevents_source_state", engine=f"engine-{number}", state=state) for state in STATES}
        assert states == {**dict.fromkeys(STATES, 0), "CONNECTING": 1}
    assert {state: value(service, "kvevents_sources", state=state) for state in STATES} == {
        **dict.fromkeys(STATES, 0),
        "CONNECTING": 3,
    }


def test_unknown_values_are_absent(service: Service) -> None:
    """Zero would be a valid time, number or limit."""
    member = register(service)
    for name in (
        "kvevents_source_last_batch_timestamp_seconds",
        "kvevents_source_lag_seconds",
        "kvevents_source_last_seq",
        "kvevents_index_limit_bytes",
        "kvevents_snapshot_timestamp_seconds",
    ):
        assert value(service, name) is None
    assert value(service, "kvevents_source_batches_total") is None
    refresh_fleet(service)
    assert value(service, "kvevents_source_batches_total") == 0, (
        "without a first sample of 0, `increase()` misses the first batches"
    )
    assert value(service, "kvevents_source_last_seq") is None
    member.last_event, member.lag = 1_700_000_000.5, 0.25
    assert value(service, "kvevents_source_last_batch_timestamp_seconds") == 1_700_000_000.5
    assert value(service, "kvevents_source_lag_seconds") == 0.25
    assert member.status
    member.status = replace(member.status, last_seq=0)
    assert value(service, "kvevents_source_last_seq") == 0


def test_unknown_media_are_counted_as_other(service: Service) -> None:
    store(service, register(service), "GPU", "CPU", "PMEM", "TAPE")
    tiers = {tier: value(service, "kvevents_index_tier_blocks", tier=tier) for tier in ("gpu", "cpu", "disk", "other")}
    assert tiers == {"gpu": 1, "cpu": 1, "disk": 0, "other": 2}
    assert b"PMEM" not in format_metrics(service)


# --- reasons -----------------------------------------------------------------------------------------------------------------


def test_each_fault_of_a_member_has_a_code(service: Service) -> None:
    member = register(service, block_size=2 * BLOCK, replay_endpoint="tcp://127.0.0.1:2")
    store(service, member, "GPU")
    assert member.info
    assert member.status
    info = replace(member.info, lacks_refused=True, lacks_dropped=True, estimate="set-aside")
    member.refresh(member.status, info, hidden_before=0.0)
    assert len(member.index_faults) == 4
    member.update_trust(Trust.EXACT, 0.0)
    assert member.trust_status.state == "DEGRADED"
    assert sorted(member.trust_status.reason_codes) == ["block-size", "evicted", "orphans-dropped", "set-aside"]


@pytest.mark.parametrize(
    ("estimate", "block_sizes", "codes"),
    [
        (None, [BLOCK, 4 * BLOCK], ()),
        ("unknown-kind", [BLOCK], ("estimated-matches",)),
        ("unknown-hashing", [BLOCK, 4 * BLOCK], ("estimated-matches",)),
        ("several-block-sizes", [BLOCK, 4 * BLOCK], ("estimated-matches",)),
        ("page-hashes", [BLOCK], ("estimated-matches",)),
        ("unknown-parents", [BLOCK], ("unknown-parents",)),
        (None, [4 * BLOCK], ("block-size",)),
    ],
)
def test_matches_that_the_index_estimates_are_not_exact(
    service: Service, estimate: str | None, block_sizes: list[int], codes: tuple[str, ...]
) -> None:
    """Blocks of several sizes are not a fault: hybrid models have groups of several block sizes."""
    member = register(service, block_size=BLOCK, replay_endpoint="tcp://127.0.0.1:2")
    store(service, member, "GPU")
    assert member.info
    assert member.status
    info = replace(member.info, block_sizes=block_sizes, estimate=estimate)
    member.refresh(member.status, info, hidden_before=0.0)
    member.update_trust(Trust.EXACT, 0.0)
    assert member.trust_status.state == ("DEGRADED" if codes else "EXACT")
    assert member.trust_status.reason_codes == codes


def test_each_degraded_reason_has_a_code(service: Service) -> None:
    member = register(service)
    refresh_fleet(service)
    assert member.status
    member.status = replace(member.status, degraded_reasons=frozenset(DegradedReason))
    member.update_trust(Trust.DEGRADED.with_reason("..."), 0.0)
    assert list(member.trust_status.reason_codes) == sorted(reason.name.lower().replace("_", "-") for reason in DegradedReason)


@pytest.mark.parametrize(
    ("trust", "fault", "reasons"),
    [
        (Trust.EXACT, None, []),
        (Trust.CONNECTING, None, ["connecting"]),
        (Trust.REPLAYING, None, ["replaying"]),
        (Trust.STALE, None, ["disconnected"]),
        (Trust.STALE, SourceFault(Reason.REFUSED, "nothing listens at tcp://10.0.0.1:1"), ["refused"]),
        (Trust.CONNECTING, SourceFault(Reason.WRONG_SOCKET, "it is a ROUTER socket"), ["wrong-socket"]),
        (Trust.EXACT, SourceFault(Reason.REFUSED, "nothing listens at tcp://10.0.0.1:1"), []),
        (Trust.DEGRADED.with_reason("?"), None, ["other"]),
    ],
)
def test_every_source_that_is_not_exact_has_a_reason(
    service: Service, trust: Trust, fault: SourceFault | None, reasons: list[str]
) -> None:
    member = register(service, replay_endpoint="tcp://127.0.0.1:2")
    member.faults = {} if fault is None else {"endpoint": fault}
    member.update_trust(trust, 0.0)
    assert list(member.trust_status.reason_codes) == reasons
    found = {dict(values)["reason"] for name, values in samples(service) if name == "kvevents_source_reason"}
    assert found == set(reasons)


# --- requests ----------------------------------------------------------------------------------------------------------------


def test_requests_and_lookups_are_those_of_the_data_plane(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = HistogramCounts([0, 1, 1, *[0] * 9, 1], 3.0004)
    answers = AnswerCounts(
        lookups=3,
        hits=2,
        depth=HistogramCounts([1, 0, 0, 1, 0, 0, 0, 0, 0], 0.5),
        requests={"/query": PathCounts({200: 2, 404: 1}, seconds)},
    )
    monkeypatch.setattr(service.data_plane, "counts", lambda: DataPlaneCounts(answers))
    for name, wanted, count in (
        ("kvevents_http_requests_total", {"path": "/query", "status": "200"}, 2),
        ("kvevents_http_request_duration_seconds_count", {"path": "/query"}, 3),
        ("kvevents_http_request_duration_seconds_bucket", {"path": "/query", "le": "0.0004"}, 2),
        ("kvevents_http_request_duration_seconds_bucket", {"path": "/query", "le": "+Inf"}, 3),
        ("kvevents_http_request_duration_seconds_sum", {"path": "/query"}, 3.0004),
        ("kvevents_lookups_total", {}, 3),
        ("kvevents_lookup_hits_total", {}, 2),
        ("kvevents_lookup_match_ratio_count", {}, 2),
        ("kvevents_lookup_match_ratio_bucket", {"le": "0.5"}, 2),
    ):
        assert value(service, name, **wanted) == pytest.approx(count), name


# --- sources ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sources", [1, 16, 47])
def test_refreshes_reach_every_source_while_sources_join_and_leave(sources: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "REFRESH_SECONDS", 0.0)
    with make_service() as service:
        refresh_members(service, sources, 2 * fleet.REFRESHES_PER_ROUND)


def refresh_members(service: Service, sources: int, refreshes: int) -> None:
    members = [register(service, f"engine-{number}") for number in range(sources)]
    first, last = members[0], members[-1]
    service.index.apply(RawBatch(*last.registration.key, 0, 0, False, encode_batch(EventBatch(0.0, []))))
    service.fleet.on_tick()
    assert all(member.status is not None for member in members)
    assert last.info is not None
    if sources > 1:
        service.fleet.unregister(first.registration.key).result()
    newcomer = register(service, "newcomer")
    service.fleet.on_tick()
    assert newcomer.status is not None
    assert newcomer.info is None
    service.index.apply(RawBatch(*newcomer.registration.key, 0, 0, False, encode_batch(EventBatch(0.0, []))))
    for _ in range(refreshes):
        service.fleet.on_tick()
    assert newcomer.info is not None


def test_only_the_first_sources_have_series_of_their_own() -> None:
    """A page of 1,500 sources with long names has less than 1 MB. What is left out is counted."""
    with make_service() as service:
        for number in range(1_500):
            register(service, f"engine-{number:04}.inference.svc.cluster.local:5557")
        refresh_fleet(service)
        assert len(format_metrics(service)) < 1_000_000
        most = service.settings.limits.max_metric_sources
        engines = {dict(values)["engine"] for name, values in samples(service) if name == "kvevents_source_batches_total"}
        assert engines == {f"engine-{number:04}.inference.svc.cluster.local:5557" for number in range(most)}
        assert value(service, "kvevents_sources_without_series") == 1_500 - most
        assert value(service, "kvevents_sources", state="CONNECTING") == 1_500
