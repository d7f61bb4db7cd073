"""One stream, sans I/O: frames in, ordered deliveries and trust out."""

from kvevents.stream.checkpoint import Checkpoint, Fingerprint, StreamPosition
from kvevents.stream.deliveries import Batch, BatchT, Delivery, Gap, RawBatch, RawDelivery, Reset
from kvevents.stream.limits import DEFAULT_STREAM_LIMITS, StreamLimits
from kvevents.stream.machine import Stream
from kvevents.stream.report import BatchReport, inspect_events
from kvevents.stream.source import Source
from kvevents.stream.state import TRANSITIONS, FetchRequest, Phase, StreamCounters, payload_digest
from kvevents.stream.trust import PERSISTENT_REASONS, REASONS_ENDED_BY_CLEAR, DegradedReason, Trust, TrustLedger, trust_order

__all__ = [
    "DEFAULT_STREAM_LIMITS",
    "PERSISTENT_REASONS",
    "REASONS_ENDED_BY_CLEAR",
    "TRANSITIONS",
    "Batch",
    "BatchReport",
    "BatchT",
    "Checkpoint",
    "DegradedReason",
    "Delivery",
    "FetchRequest",
    "Fingerprint",
    "Gap",
    "Phase",
    "RawBatch",
    "RawDelivery",
    "Reset",
    "Source",
    "Stream",
    "StreamCounters",
    "StreamLimits",
    "StreamPosition",
    "Trust",
    "TrustLedger",
    "inspect_events",
    "payload_digest",
    "trust_order",
]
