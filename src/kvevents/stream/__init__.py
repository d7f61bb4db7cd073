"""One stream, sans I/O: frames in, ordered deliveries and trust out."""

from kvevents.stream.checkpoint import Checkpoint, Fingerprint
from kvevents.stream.deliveries import Batch, Delivery, Gap, RawBatch, RawDelivery, Reset
from kvevents.stream.findings import Findings, findings_of
from kvevents.stream.limits import DEFAULT_STREAM_LIMITS, StreamLimits
from kvevents.stream.machine import Stream
from kvevents.stream.source import Source
from kvevents.stream.state import TRANSITIONS, Ask, Phase, StreamCounters
from kvevents.stream.trust import Doubt, Trust

__all__ = [
    "DEFAULT_STREAM_LIMITS",
    "TRANSITIONS",
    "Ask",
    "Batch",
    "Checkpoint",
    "Delivery",
    "Doubt",
    "Findings",
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
    "Trust",
    "findings_of",
]
