"""A subscriber of the plane, and records pushed to it."""

from __future__ import annotations

from kvevents.plane.ledger import Ledger
from kvevents.plane.reading import Pushed
from kvevents.plane.records import (
    VERSION,
    Page,
    Record,
    encode_page,
)
from kvevents.plane.subscriber import LogSubscriber


def subscriber(partitions: int = 1) -> LogSubscriber:
    found = LogSubscriber(lambda: 0.0, lambda _: None)
    for partition in range(partitions):
        found.add_partition(partition, Ledger(), {})
    return found


def pushed(position: int, *records: Record, pending: int = 0) -> Pushed:
    return Pushed(position, encode_page(Page(VERSION, "bridge", 0.0, list(records))), pending)
