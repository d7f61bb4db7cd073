"""A subscriber of the plane's log, and messages with records for it."""

from __future__ import annotations

from kvevents.plane.log_subscriber import LogSubscriber
from kvevents.plane.partition_state import PartitionState
from kvevents.plane.records import (
    VERSION,
    Page,
    ReceivedMessage,
    Record,
    encode_page,
)


def subscriber(partitions: int = 1) -> LogSubscriber:
    found = LogSubscriber(lambda: 0.0, lambda _: None)
    for partition in range(partitions):
        found.add_partition(partition, PartitionState(), {})
    return found


def make_message(position: int, *records: Record, pending: int = 0) -> ReceivedMessage:
    return ReceivedMessage(position, encode_page(Page(VERSION, "bridge", 0.0, list(records))), pending)
