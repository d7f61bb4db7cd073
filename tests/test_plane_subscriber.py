"""What comes out of a plane's lanes: deliveries, and how far they are to be trusted."""

from __future__ import annotations

from kvevents.plane.ledger import Ledger
from kvevents.plane.reading import Pushed
from kvevents.plane.records import VERSION, Batched, Join, Page, Record, encode_page
from kvevents.plane.subscriber import LogSubscriber


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
