"""How the relay encodes batches of its own: in the dialect of its stream, and in payloads that consumers accept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, EventBatch, Heartbeat, KVEvent, KVEventBatch
from kvevents.stream import BatchReport
from kvevents.wire import DEFAULT_WIRE_LIMITS, decode_batch, encode_batch
from kvevents.wire.dialects import Dialect, detect_dialect, dialect_for

UNKNOWN: Final = ""
SAMPLED_PAYLOADS: Final = 64
"""First payloads of an upstream that are examined. Half of all unsigned 64-bit hashes prove that hashes are unsigned."""

_FORMS: Final[dict[str, Dialect | None]] = {
    UNKNOWN: None,
    "map": None,
    "map signed": dialect_for("sglang"),
    "map batch": dialect_for("vllm", "main@0181ea3173e5"),
    "array": dialect_for("vllm", "0.22"),
    "array signed": dialect_for("sglang", "0.5.9"),
}
"""For each form, the dialect that has all fields of the others. Consumers of older releases skip fields that they do not know;
in arrays these follow the last known element."""


class DialectEncoder:
    """Encodes the relay's own batches for one stream. `encode` is thread-safe.

    A stream whose payloads are forwarded as received has no configured dialect: the encoder detects its form from the payloads.
    With `fixed` it uses `dialect`, or the default encoding if that is None, and detects nothing.
    """

    def __init__(
        self, dialect: Dialect | None, *, fixed: bool, max_payload: int = DEFAULT_WIRE_LIMITS.max_payload_bytes
    ) -> None:
        self.form = UNKNOWN
        """The detected form, a key of `_FORMS`. A checkpoint stores it for the next process."""
        self.max_payload: Final = max_payload
        """Bytes of the largest payload that consumers accept."""
        self._fixed: Final = fixed
        self._dialect = dialect
        self._examined = 0
        self._newest = b""

    def restore(self, form: str) -> None:
        """Use the form that an earlier process detected."""
        if not self._fixed and form in _FORMS:
            self._use(form)

    def observe(self, payloads: Sequence[bytes]) -> None:
        """Detect the form from payloads that are about to be sent. Only the first ones are examined."""
        if self._fixed:
            return
        self._newest = payloads[-1]
        for payload in payloads[: SAMPLED_PAYLOADS - self._examined]:
            self._examined += 1
            self._examine(payload)

    def observe_newest(self) -> None:
        """Examine the newest observed payload, even if enough were examined before."""
        newest, self._newest = self._newest, b""
        if newest:
            self._examine(newest)

    def restart_detection(self) -> None:
        """Examine payloads again: the next incarnation of the upstream can be of another release."""
        self._examined = 0

    def encode(self, batch: EventBatch) -> bytes:
        """Encode a batch as one payload. Raises `EncodeError`."""
        return encode_batch(batch, self._dialect)

    def encode_parts(self, batch: EventBatch) -> list[bytes]:
        """Encode a batch as several payloads if one would exceed `max_payload`. Raises `EncodeError`."""
        return encode_parts(batch, self._dialect, self.max_payload)

    def _examine(self, payload: bytes) -> None:
        events = decode_batch(payload).batch.events
        dialect = detect_dialect(payload)
        if events and dialect is not None:
            self._use(_form_of(dialect, signed=dialect.has_signed_hashes and any(map(_has_hashes, events)), before=self.form))

    def _use(self, form: str) -> None:
        self.form, self._dialect = form, _FORMS[form]


def encode_parts(
    batch: EventBatch, dialect: Dialect | None, max_payload: int = DEFAULT_WIRE_LIMITS.max_payload_bytes
) -> list[bytes]:
    """Encode a batch in as many payloads as consumers need. A payload of a single event can still exceed `max_payload`.

    Raises `EncodeError`.
    """
    payload = encode_batch(batch, dialect)
    events: list[Any] = batch.events
    if len(events) < 2 or (len(payload) <= max_payload and len(events) <= DEFAULT_WIRE_LIMITS.max_events):
        return [payload]
    middle = len(events) // 2
    halves = (KVEventBatch(batch.ts, part, batch.data_parallel_rank) for part in (events[:middle], events[middle:]))
    return [each for half in halves for each in encode_parts(half, dialect, max_payload)]


def last_heartbeat(events: list[KVEvent]) -> Heartbeat | None:
    """Return the last heartbeat of a batch, or None if it has none."""
    return next((found for event in reversed(events) if (found := _heartbeat_of(event)) is not None), None)


def without_heartbeats(events: list[KVEvent]) -> list[KVEvent]:
    """Remove heartbeats from events. A heartbeat describes its sender's stream, so the relay must not forward it."""
    kept = (event for event in events if _heartbeat_of(event) is None or _has_hashes(event))
    return [event if _heartbeat_of(event) is None else msgspec.structs.replace(event, heartbeat=None) for event in kept]


def loses_events(report: BatchReport) -> bool:
    """Return whether events of a batch could not be decoded."""
    return any(each.loses_events for each in report.rejected)


def _form_of(dialect: Dialect, *, signed: bool, before: str) -> str:
    if dialect.batch_form == "map":
        return "map batch"
    # Hashes below 2**63 do not show whether they are signed: the form detected before is kept.
    kept = before.startswith(dialect.event_form) and before.endswith("signed")
    return f"{dialect.event_form} signed" if signed or kept else dialect.event_form


def _has_hashes(event: KVEvent) -> bool:
    return not isinstance(event, AllBlocksCleared) and bool(event.block_hashes)


def _heartbeat_of(event: KVEvent) -> Heartbeat | None:
    return event.heartbeat if isinstance(event, BlockRemoved) else None
