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
from kvevents.sim.audit import AuditCounts, Expected, Mark
from kvevents.sim.live import AuditingFollower
from kvevents.sim.network import Sockets
from kvevents.sim.settings import FleetSettings
from kvevents.stream import BatchReport, DegradedReason, Gap, RawBatch, RawDelivery, Reset, Source, Trust
from kvevents.subscriber import Sink
from kvevents.wire.encode import batch_encoder
from publisher_cases import wait_until

WORKER = ("engine-0", 0)
BORN = (100.0, 200.0)
"""When the engine's lives begin."""
encode = batch_encoder()


def stored(number: int) -> BlockStored:
    """A block of the prompt: block `number` behind the one before."""
    tokens = [4 * number + place for place in range(4)]
    return BlockStored([number], number - 1 if number else None, tokens, 4, medium="GPU")


def raw(life: int, number: int, events: Sequence[KVEvent], incarnation: int) -> RawBatch:
    """As sent some time into a life of the engine."""
    return RawBatch(*WORKER, incarnation, number, False, encode(KVEventBatch(BORN[life] + number, list(events), 0)))


def expected(life: int, number: int, cached: int) -> Expected:
    """A lookup of the prompt before a batch, which found so many tokens."""
    sequence: Any = SimpleNamespace(tokens=array("I", range(40)), lora=None, salt=None)
    return Expected(Mark(life, number, 0), sequence, 40, cached)


class Scripted:
    """A subscriber whose deliveries are written down; `doubts` holds from the beginning."""

    script: deque[RawDelivery]
    doubts: frozenset[DegradedReason] = frozenset()
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
        (outcome,) = self.sink.apply_many([delivery])
        self.reports.append((delivery, outcome.report))
        return delivery

    def status(self, source: str, rank: int) -> Any:
        return SimpleNamespace(source=source, rank=rank, trust=Trust.EXACT, degraded_reasons=self.doubts)

    def statuses(self) -> list[Any]:
        return [self.status(*WORKER)]


def life(_: object, ts: float) -> int:
    return sum(ts >= born for born in BORN) - 1


def outcome(
    script: Sequence[RawDelivery],
    lookups: Sequence[Expected],
    monkeypatch: pytest.MonkeyPatch,
    doubts: frozenset[DegradedReason] = frozenset(),
) -> AuditCounts:
    """What the audit says when all of it was delivered."""
    monkeypatch.setattr(follower_module, "Subscriber", Scripted)
    monkeypatch.setattr(Scripted, "script", deque(script), raising=False)
    reports: list[tuple[RawDelivery, BatchReport | None]] = []
    monkeypatch.setattr(Scripted, "reports", reports, raising=False)
    monkeypatch.setattr(Scripted, "doubts", doubts)
    with closing(AuditingFollower(PrefixIndex(), life)) as follower:
        follower.audit.add(WORKER)
        for one in lookups:
            follower.audit.expect(WORKER, one)
        follower.follow([])
        wait_until(lambda: sound(follower) and len(reports) == len(script), "everything to be delivered")
    assert [delivery for delivery, *_ in reports] == list(script)
    follower.audit.finish()
    return follower.audit.counts


def sound(follower: AuditingFollower) -> bool:
    """Raises what ended it."""
    follower.check()
    return True


def counts(found: AuditCounts) -> tuple[int, int, int]:
    return found.checked, found.disagreements, found.unproven


FIRST: list[RawDelivery] = [raw(0, 0, [stored(0)], 0), raw(0, 1, [stored(1)], 0)]
LOOKUPS = [expected(0, 0, 0), expected(0, 1, 4), expected(0, 2, 8)]


def test_lookups_are_compared_where_they_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counts(outcome(FIRST, LOOKUPS, monkeypatch)) == (3, 0, 0)
    wrong = [expected(0, 0, 0), expected(0, 1, 8), expected(0, 2, 8)]
    assert counts(outcome(FIRST, wrong, monkeypatch)) == (3, 1, 0)


def test_a_life_is_known_by_its_timestamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The subscriber counts 5 where the engine counts 1: it does not matter."""
    script = [*FIRST, Reset(*WORKER, 5, "restarted"), raw(1, 0, [stored(0)], 5), raw(1, 1, [stored(1)], 5)]
    lookups = [*LOOKUPS, expected(1, 0, 0), expected(1, 1, 4), expected(1, 2, 8)]
    assert counts(outcome(script, lookups, monkeypatch)) == (6, 0, 0)


def test_what_a_life_had_left_to_say_is_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was killed before its last batches were sent; a life of which nothing came at all leaves its lookups so, too."""
    script = [*FIRST, Reset(*WORKER, 1, "restarted"), raw(1, 0, [stored(0)], 1)]
    lookups = [*LOOKUPS, expected(0, 3, 12), expected(0, 7, 12), expected(1, 0, 0), expected(1, 1, 4)]
    assert counts(outcome(script, lookups, monkeypatch)) == (5, 0, 2)


def test_a_reset_for_nothing_makes_nothing_wrong_when_all_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine lives on: its batches have timestamps of the same life, and come again by replay."""
    script = [*FIRST, Reset(*WORKER, 1, "it seemed so"), *(raw(0, number, [stored(number)], 1) for number in range(4))]
    lookups = [*LOOKUPS, expected(0, 3, 12), expected(0, 4, 16)]
    assert counts(outcome(script, lookups, monkeypatch)) == (5, 0, 0)


def test_a_reset_for_nothing_is_unproven_where_the_stream_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before is not sent again, so the index knows less than the engine has; the stream says so."""
    script: list[RawDelivery] = [Reset(*WORKER, 1, "it seemed so"), Gap(*WORKER, 0, 1, 1), raw(0, 2, [stored(5)], 1)]
    found = outcome(script, [expected(0, 2, 8), expected(0, 3, 8)], monkeypatch, frozenset({DegradedReason.LOST}))
    assert (found.checked, found.unproven) == (0, 2)


# --- over sockets


@contextmanager
def following() -> Iterator[tuple[Sockets, AuditingFollower]]:
    settings = FleetSettings(engines=1, blocks=10, block_size=4)
    with Sockets(settings) as sockets, closing(AuditingFollower(PrefixIndex(), sockets.incarnation)) as follower:
        follower.audit.add(WORKER)
        sockets.open(WORKER)
        follower.follow([sockets.addresses[WORKER].source])
        yield sockets, follower


def test_trust_and_lookups_follow_a_stream_through_its_lives() -> None:
    """A lookup is compared at the latest a moment after what came before it, without a batch behind it."""
    with following() as (sockets, follower):
        for number in range(3):
            wait_until(lambda: sockets.subscribers() == 1, "the subscriber to be connected")
            follower.audit.expect(WORKER, expected(number, 0, 0))
            for seq in range(2):
                sockets.publish(WORKER, KVEventBatch(time.time(), [stored(seq)], 0))
                follower.audit.expect(WORKER, expected(number, seq + 1, 4 * seq + 4))
            wait_until(lambda: sound(follower) and follower.audit.counts.checked == 3 * number + 3, "its three lookups")  # noqa: B023 - over before the next
            wait_until(lambda: follower.trust[WORKER] == "EXACT", "the stream to be EXACT")
            if number < 2:
                sockets.close(WORKER)
                wait_until(lambda: follower.trust[WORKER] != "EXACT", "the end of the life to be noticed")
                sockets.open(WORKER)
        assert counts(follower.audit.counts) == (9, 0, 0)
        assert [status.counters.resets for status in follower.statuses()] == [2]


def test_a_stream_that_cannot_be_followed_raises_at_once() -> None:
    with closing(AuditingFollower(PrefixIndex(), life)) as follower, pytest.raises(ConfigError):
        follower.follow([Source("nowhere", name="engine-0")])


def test_nothing_is_exact_before_it_is_followed_and_closing_twice_is_nothing() -> None:
    follower = AuditingFollower(PrefixIndex(), life)
    assert not follower.exact(WORKER)
    follower.check()
    follower.close()
    follower.close()
