"""A subscriber of the plane's log, and messages with records for it."""

from __future__ import annotations

from typing import Any

from kvevents_plane.log_subscriber import LogSubscriber
from kvevents_plane.partition_state import PartitionState
from kvevents_plane.records import (
    VERSION,
    Page,
    ReceivedMessage,
    Record,
    encode_page,
)


def subscriber(partitions: int = 1) -> LogSubscriber:
    """Return a subscriber that has read its partitions to their ends."""
    found = LogSubscriber(lambda: 0.0, lambda _: None)
    for partition in range(partitions):
        add_partition(found, partition, PartitionState())
    return found


def add_partition(found: LogSubscriber, partition: int, state: PartitionState, reasons: Any = None) -> None:
    """Add a partition that has no page after `state`."""
    found.add_partition(partition, state, reasons or {})
    found.report_progress(partition, 0, "")


def make_message(position: int, *records: Record, pending: int = 0) -> ReceivedMessage:
    return ReceivedMessage(position, encode_page(Page(VERSION, "bridge", list(records))), pending)
