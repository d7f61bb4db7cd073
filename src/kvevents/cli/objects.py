"""Deliveries as JSON objects, one a line. `docs/cli.md` documents the keys; they are a promise."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvevents.events import KVEvent
from kvevents.stream import Batch, Gap, Reset, Trust


class RejectedObject(msgspec.Struct, frozen=True):
    """An event, or part of a batch, that could not be read."""

    reason: str
    detail: str
    index: int | None
    count: int


class BatchObject(msgspec.Struct, frozen=True, tag="batch", tag_field="kind"):
    """One batch. Events are maps with their `type`; fields at their default are left out, as vLLM itself does."""

    source: str
    rank: int
    incarnation: int
    seq: int
    ts: float
    replayed: bool
    events: list[KVEvent]
    rejected: list[RejectedObject]


class ResetObject(msgspec.Struct, frozen=True, tag="reset", tag_field="kind"):
    """A new life of the publisher."""

    source: str
    rank: int
    incarnation: int
    reason: str


class GapObject(msgspec.Struct, frozen=True, tag="gap", tag_field="kind"):
    """Batches that are not delivered: lost, or represented by the snapshot that follows."""

    source: str
    rank: int
    incarnation: int
    first: int
    last: int
    compacted: bool


class TrustObject(msgspec.Struct, frozen=True, tag="trust", tag_field="kind"):
    """A change of trust."""

    source: str
    rank: int
    trust: str
    reason: str


def _plain(value: Any) -> Any:
    """What peers put into fields unknown to us may have no JSON of its own."""
    return repr(value)


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_plain)


def encode(delivery: Batch | Reset | Gap) -> bytes:
    """The line of a delivery."""
    if isinstance(delivery, Batch):
        rejected = [RejectedObject(item.reason, item.detail, item.index, item.count) for item in delivery.rejected]
        stream = (delivery.source, delivery.rank, delivery.incarnation)
        found = BatchObject(*stream, delivery.seq, delivery.ts, delivery.replayed, delivery.events, rejected)
        return _ENCODER.encode(found)
    if isinstance(delivery, Reset):
        return _ENCODER.encode(ResetObject(delivery.source, delivery.rank, delivery.incarnation, delivery.reason))
    stream = (delivery.source, delivery.rank, delivery.incarnation)
    return _ENCODER.encode(GapObject(*stream, delivery.first, delivery.last, delivery.compacted))


def encode_trust(source: str, rank: int, trust: Trust) -> bytes:
    """The line of a change of trust."""
    return _ENCODER.encode(TrustObject(source, rank, trust.name, trust.reason))
