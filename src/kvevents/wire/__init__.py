"""The wire format: frames, dialects of engine releases, decoding and encoding of batches."""

from kvevents.wire.checked_msgpack import DEFAULT_WIRE_LIMITS, MAX_SEQ, Rejected, WireLimits
from kvevents.wire.decode import Decoded, decode_batch
from kvevents.wire.dialects import Dialect, dialect_for, dialects, resolve_dialect
from kvevents.wire.encode import encode_batch
from kvevents.wire.framing import (
    END_SEQ,
    SEQ_BYTES,
    Live,
    Malformed,
    ReplayBatch,
    ReplayEnd,
    ReplayReply,
    ReplayRequest,
    encode_seq,
    live_frames,
    parse_live,
    parse_replay_reply,
    parse_replay_request,
    replay_batch_frames,
    replay_end_frames,
    replay_request_frames,
)

__all__ = [
    "DEFAULT_WIRE_LIMITS",
    "END_SEQ",
    "MAX_SEQ",
    "SEQ_BYTES",
    "Decoded",
    "Dialect",
    "Live",
    "Malformed",
    "Rejected",
    "ReplayBatch",
    "ReplayEnd",
    "ReplayReply",
    "ReplayRequest",
    "WireLimits",
    "decode_batch",
    "dialect_for",
    "dialects",
    "encode_batch",
    "encode_seq",
    "live_frames",
    "parse_live",
    "parse_replay_reply",
    "parse_replay_request",
    "replay_batch_frames",
    "replay_end_frames",
    "replay_request_frames",
    "resolve_dialect",
]
