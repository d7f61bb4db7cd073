"""`kvevents.sim.live.AuditingFollower`: the incarnation of each batch, and lookups around resets of a subscriber."""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any, Self

import pytest

from kvevents.errors import ConfigError
from kvevents.events import BlockStored, KVEvent, KVEventBatch
from kvevents.index import PrefixIndex
from kvevents.sim import live as follower_module
from kvevents.sim.audit import AuditCounts, EngineLookup, LookupPosition
from kvevents.sim.live import AuditingFollower
from kvevents.sim.network import Sockets
from kvevents.sim.settings import FleetSettings
from kvevents.stream import BatchReport, DegradedReason, Gap, RawBatch, RawDelivery, Reset, Source, Trust
from kvevents.subscriber import Sink
from kvevents.wire.encode import batch_encoder
from publisher_cases import wait_until

WORKER = ("engine-0", 0)
STARTED_AT = (100.0, 200.0)
"""When the incarnations of the engine begin."""
encode = batch_encoder()


def make_block(number: int) -> BlockStored:
    """Return block `number` of the prompt, whose parent is the previous block."""
    tokens = [4 * number + place for place in range(4)]
    return BlockStored([number], number - 1 if number else None, tokens, 4, medium="GPU")


def make_batch(engine_incarnation: int, number: int, events: Sequence[KVEvent], incarnation: int) -> RawBatch:
    """Return a batch that was sent `number` seconds after an incarnation of the engine began."""
    return RawBatch(
        *WORKER, incarnation, number, False, encode(KVEventBatch(STARTED_AT[engine_incarnation] + number, list(events), 0))
    )


def make_lookup(engine_incarnation: int, number: int, cached: int) -> EngineLookup:
    """Return a lookup of the prompt before batch `number`, which found `cached` tokens."""
    sequence: Any = SimpleNamespace(tokens=array("I", range(40)), lora=None, salt=None)
    return EngineLookup(LookupPosition(engine_incarnation, number, 0), sequence, 40, cached)


class ScriptedSubscriber:
    """A subscriber with scripted deliveries. Its streams have the reasons `degraded` from the beginning."""

    script: deque[RawDelivery]
    degraded: frozenset[DegradedReason] = frozenset()
    reports: list[tuple[RawDelivery, BatchReport | None]]

    def __init__(self, sources: Sequence[Source], *, decode: bool, sink: Sink) -> None:
        assert not decode
        self.sources = sources
        self.sink = sink

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def receive(self, timeout: float) -> RawDelivery | None:
        if not self.script:
            threading.Event().wait(timeout)
            return None
        delivery = self.script.popleft()
        (audit_script,) = self.sink.apply_many([delivery])
        self.reports.append((delivery, audit_script.report))
        return delivery

    def status(self, source: str, rank: int) -> Any:
        return SimpleNamespace(source=source, rank=rank, trust=Trust.EXACT, degraded_reasons=self.degraded)

    def statuses(self) -> list[Any]:
        return [self.status(*WORKER)]


def engine_incarnation(_: object, ts: float) -> int:
    return sum(ts >= started_at for started_at in STARTED_AT) - 1


def audit_script(
    script: Sequence[RawDelivery],
    lookups: Sequence[EngineLookup],
    monkeypatch: pytest.MonkeyPatch,
    degraded: frozenset[DegradedReason] = frozenset(),
) -> AuditCounts:
    """Return the counts of the audit after all deliveries of the script."""
    monkeypatch.setattr(follower_module, "Subscriber", ScriptedSubscriber)
    monkeypatch.setattr(ScriptedSubscriber, "script", deque(script), raising=False)
    reports: list[tuple[RawDelivery, BatchReport | None]] = []
    monkeypatch.setattr(ScriptedSubscriber, "reports", reports, raising=False)
    monkeypatch.setattr(ScriptedSubscriber, "degraded", degraded)
    with closing(AuditingFollower(PrefixIndex(), engine_incarnation)) as follower:
        follower.audit.add(WORKER)
        for one in lookups:
            follower.audit.expect(WORKER, one)
        follower.follow([])
        wait_until(lambda: is_ok(follower) and len(reports) == len(script), "all deliveries")
    assert [delivery for delivery, *_ in reports] == list(script)
    follower.audit.finish()
    return follower.audit.counts


def is_ok(follower: AuditingFollower) -> bool:
    """Raise the failure of the follower, if any. Return True otherwise."""
    follower.check()
    return True


def counts(found: AuditCounts) -> tuple[int, int, int]:
    return found.checked, found.disagreements, found.unproven


FIRST: list[RawDelivery] = [make_batch(0, 0, [make_block(0)], 0), make_batch(0, 1, [make_block(1)], 0)]
LOOKUPS = [make_lookup(0, 0, 0), make_lookup(0, 1, 4), make_lookup(0, 2, 8)]


def test_lookups_are_compared_at_their_place_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counts(audit_script(FIRST, LOOKUPS, monkeypatch)) == (3, 0, 0)
    wrong = [make_lookup(0, 0, 0), make_lookup(0, 1, 8), make_lookup(0, 2, 8)]
    assert counts(audit_script(FIRST, wrong, monkeypatch)) == (3, 1, 0)


def test_an_incarnation_is_recognised_by_its_timestamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The subscriber counts incarnation 5 where the engine counts 1. The numbers do not matter."""
    script = [
        *FIRST,
        Reset(*WORKER, 5, "restarted"),
        make_batch(1, 0, [make_block(0)], 5),
        make_batch(1, 1, [make_block(1)], 5),
    ]
    lookups = [*LOOKUPS, make_lookup(1, 0, 0), make_lookup(1, 1, 4), make_lookup(1, 2, 8)]
    assert counts(audit_script(script, lookups, monkeypatch)) == (6, 0, 0)


def test_lookups_after_the_last_batch_of_an_incarnation_are_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine was killed before it sent its last batches. Lookups of an incarnation without any batch are unproven, too."""
    script = [*FIRST, Reset(*WORKER, 1, "restarted"), make_batch(1, 0, [make_block(0)], 1)]
    lookups = [*LOOKUPS, make_lookup(0, 3, 12), make_lookup(0, 7, 12), make_lookup(1, 0, 0), make_lookup(1, 1, 4)]
    assert counts(audit_script(script, lookups, monkeypatch)) == (5, 0, 2)


def test_an_unnecessary_reset_causes_no_disagreement_if_all_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine did not restart. Its batches have timestamps of the same incarnation and are replayed."""
    script = [
        *FIRST,
        Reset(*WORKER, 1, "it seemed so"),
        *(make_batch(0, number, [make_block(number)], 1) for number in range(4)),
    ]
    lookups = [*LOOKUPS, make_lookup(0, 3, 12), make_lookup(0, 4, 16)]
    assert counts(audit_script(script, lookups, monkeypatch)) == (5, 0, 0)


def test_lookups_after_an_unnecessary_reset_are_unproven_if_the_stream_is_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier batches are not sent again, so the index has fewer blocks than the engine. The stream is degraded."""
    script: list[RawDelivery] = [Reset(*WORKER, 1, "it seemed so"), Gap(*WORKER, 0, 1, 1), make_batch(0, 2, [make_block(5)], 1)]
    found = audit_script(script, [make_lookup(0, 2, 8), make_lookup(0, 3, 8)], monkeypatch, frozenset({DegradedReason.LOST}))
    assert (found.checked, found.unproven) == (0, 2)


# --- over sockets


@contextmanager
def follow_sockets() -> Iterator[tuple[Sockets, AuditingFollower]]:
    settings = FleetSettings(engines=1, blocks=10, block_size=4)
    with Sockets(settings) as sockets, closing(AuditingFollower(PrefixIndex(), sockets.incarnation)) as follower:
        follower.audit.add(WORKER)
        sockets.open(WORKER)
        follower.follow([sockets.addresses[WORKER].source])
        yield sockets, follower


def test_trust_and_lookups_follow_a_stream_through_its_incarnations() -> None:
    """A lookup is compared soon after the batches before it, even if no batch follows."""
    with follow_sockets() as (sockets, follower):
        for number in range(3):
            wait_until(lambda: sockets.subscribers() == 1, "the subscriber to be connected")
            follower.audit.expect(WORKER, make_lookup(number, 0, 0))
            for seq in range(2):
                sockets.publish(WORKER, KVEventBatch(time.time(), [make_block(seq)], 0))
                follower.audit.expect(WORKER, make_lookup(number, seq + 1, 4 * seq + 4))
            wait_until(lambda: is_ok(follower) and follower.audit.counts.checked == 3 * number + 3, "three comparisons")  # noqa: B023 - over before the next one
            wait_until(lambda: follower.trust[WORKER] == "EXACT", "the stream to be EXACT")
            if number < 2:
                sockets.close(WORKER)
                wait_until(lambda: follower.trust[WORKER] != "EXACT", "the end of the incarnation to be detected")
                sockets.open(WORKER)
        assert counts(follower.audit.counts) == (9, 0, 0)
        assert [status.counters.resets for status in follower.statuses] == [2]


def test_a_stream_that_cannot_be_followed_raises_at_once() -> None:
    with closing(AuditingFollower(PrefixIndex(), engine_incarnation)) as follower, pytest.raises(ConfigError):
        follower.follow([Source("nowhere", name="engine-0")])


def test_a_stream_is_not_exact_before_it_is_followed_and_close_can_be_repeated() -> None:
    follower = AuditingFollower(PrefixIndex(), engine_incarnation)
    assert not follower.exact(WORKER)
    follower.check()
    follower.close()
    follower.close()
