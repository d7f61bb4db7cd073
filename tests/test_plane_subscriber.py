"""What comes out of a plane's lanes: deliveries, and how far they are to be trusted."""

from __future__ import annotations

from kvevents.plane.ledger import Ledger
from kvevents.plane.reading import Pushed
from kvevents.plane.records import VERSION, Batched, Beat, Join, Leave, Page, Record, Trusting, encode_page
from kvevents.plane.subscriber import MOST_BEHIND, LogSubscriber
from kvevents.stream import Trust


def subscriber(lanes: int = 1) -> LogSubscriber:
    return LogSubscriber({lane: Ledger() for lane in range(lanes)}, {}, lambda: 0.0, lambda _: None)


def pushed(position: int, *records: Record, pending: int = 0) -> Pushed:
    return Pushed(position, encode_page(Page(VERSION, "bridge", 0.0, list(records))), pending)


def test_it_is_complete_only_when_what_was_handed_out_has_been_applied() -> None:
    """Who asks for more has applied what came before; until then an index lacks the last pages."""
    found = subscriber()
    assert not found.is_complete
    found.put(0, [pushed(1, Join("engine", 0, b"")), pushed(2, Batched("engine", 0, 0, 0, False, b"x"))])
    found.tell(0, 0, "")
    assert not found.is_complete
    assert len(found.receive_many(timeout=0.0)) == 1
    assert not found.is_complete
    assert found.receive_many(timeout=0.0) == []
    assert found.is_complete


def test_it_is_not_complete_while_the_servers_have_more() -> None:
    found = subscriber(lanes=2)
    found.put(0, [pushed(1, pending=3)])
    found.receive_many(timeout=0.0)
    found.receive_many(timeout=0.0)
    found.tell(1, 0, "")
    assert not found.is_complete
    found.put(0, [pushed(2)])
    found.receive_many(timeout=0.0)
    found.receive_many(timeout=0.0)
    assert found.is_complete


def test_a_lane_that_is_always_a_little_behind_can_be_trusted() -> None:
    """While much is written some pages are always on their way; more than some are a log that is being read."""
    found = subscriber()
    records = (Join("engine", 0, b""), Beat("bridge", 1.0, 0.0), Trusting("engine", 0, "bridge", "EXACT", "", {}))
    found.put(0, [pushed(1, *records, pending=MOST_BEHIND)])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.EXACT
    found.put(0, [pushed(2, pending=MOST_BEHIND + 1)])
    found.receive_many(timeout=0.0)
    assert found.trust("engine") == Trust.REPLAYING


def test_members_are_replaced_as_a_whole() -> None:
    """Who looks at them from another thread sees those of one moment, and knows by identity whether they are others."""
    found = subscriber()
    before = found.cards
    found.put(0, [pushed(1, Join("engine", 0, b"card"), Join("other", 1, b""))])
    found.receive_many(timeout=0.0)
    joined = found.cards
    found.put(0, [pushed(2, Beat("bridge", 1.0, 0.0)), pushed(3, Leave("other", 1, "gone"))])
    assert found.queued_bytes > 0
    found.receive_many(timeout=0.0)
    assert (before, joined, found.cards) == ({}, {("engine", 0): b"card", ("other", 1): b""}, {("engine", 0): b"card"})
    assert found.queued_bytes == 0
