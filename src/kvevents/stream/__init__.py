"""One stream, sans I/O: frames in, ordered deliveries and trust out."""

from kvevents.stream.deliverer import BatchReport, StreamCounters, inspect_events
from kvevents.stream.deliveries import (
    Batch,
    BatchT,
    Checkpoint,
    Delivery,
    Gap,
    RawBatch,
    RawDelivery,
    Reset,
    Source,
    StreamPosition,
    printable,
)
from kvevents.stream.identity import Fingerprint, payload_digest
from kvevents.stream.replay_fetch import FetchRequest
from kvevents.stream.sequencer import PendingBytes
from kvevents.stream.settings import DEFAULT_STREAM_LIMITS, StreamLimits
from kvevents.stream.stream import Stream
from kvevents.stream.transitions import TRANSITIONS, State
from kvevents.stream.trust import (
    PERSISTENT_REASONS,
    REASONS_ENDED_BY_CLEAR,
    DegradedReason,
    Trust,
    TrustLedger,
    TrustState,
    trust_order,
)

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
    "PendingBytes",
    "RawBatch",
    "RawDelivery",
    "Reset",
    "Source",
    "State",
    "Stream",
    "StreamCounters",
    "StreamLimits",
    "StreamPosition",
    "Trust",
    "TrustLedger",
    "TrustState",
    "inspect_events",
    "payload_digest",
    "printable",
    "trust_order",
]
