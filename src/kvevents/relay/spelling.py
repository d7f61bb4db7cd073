"""How a relay spells what it says itself: as the consumers of its stream are used to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from kvevents.events import AllBlocksCleared, EventBatch, KVEvent, KVEventBatch
from kvevents.wire import DEFAULT_WIRE_LIMITS, decode_batch, encode_batch
from kvevents.wire.dialects import Dialect, dialect_for
from kvevents.wire.shape import dialect_of

UNKNOWN: Final = ""
LOOKS: Final = 64
"""First batches of an upstream that are looked at: a signed hash is told from an unsigned one by half of them."""
MAX_PAYLOAD: Final = DEFAULT_WIRE_LIMITS.max_payload_bytes
"""What consumers read."""

_FORMS: Final[dict[str, Dialect | None]] = {
    UNKNOWN: None,
    "map": None,
    "map signed": dialect_for("sglang"),
    "map batch": dialect_for("vllm", "main@0181ea3173e5"),
    "array": dialect_for("vllm", "0.22"),
    "array signed": dialect_for("sglang", "0.5.9"),
}
"""For each form the row that has room for all fields of the others. Consumers of older releases pass over what they do not
know, in arrays behind the last element."""


class Spelling:
    """One for a stream; `encode` may be called from any thread.

    Of a stream that is sent on as it came nobody says how it is spelled: its payloads show. One that is written anew has the
    `dialect` it is written in, or that of no release in particular.
    """

    def __init__(self, dialect: Dialect | None, *, known: bool) -> None:
        self.form = UNKNOWN
        """What was seen, for another process to begin with."""
        self._known: Final = known
        self._row = dialect
        self._looked = 0
        self._newest = b""

    def assume(self, form: str) -> None:
        """Begin with what an earlier process has seen."""
        if not self._known and form in _FORMS:
            self._take(form)

    def note(self, payloads: Sequence[bytes]) -> None:
        """Payloads of the upstream, as they go out."""
        if self._known:
            return
        self._newest = payloads[-1]
        for payload in payloads[: LOOKS - self._looked]:
            self._looked += 1
            self._look(payload)

    def renew(self) -> None:
        """Another life of the upstream may be of another release."""
        self._looked = 0

    def encode(self, batch: EventBatch) -> bytes:
        """A batch of the relay's own. Raises `EncodeError`."""
        return encode_batch(batch, self._row)

    def payloads(self, batch: EventBatch) -> list[bytes]:
        """The same as several batches where one would be too large for consumers. Raises `EncodeError`."""
        return payloads_of(batch, self._row)

    def look(self) -> None:
        """Look at the newest payload as well."""
        newest, self._newest = self._newest, b""
        if newest:
            self._look(newest)

    def _look(self, payload: bytes) -> None:
        events = decode_batch(payload).batch.events
        row = dialect_of(payload)
        if events and row is not None:
            self._take(_form(row, signed=row.signed and any(map(_has_hashes, events)), before=self.form))

    def _take(self, form: str) -> None:
        self.form, self._row = form, _FORMS[form]


def payloads_of(batch: EventBatch, dialect: Dialect | None) -> list[bytes]:
    """A batch in as many payloads as consumers need to read them; one event alone may still be too large.

    Raises `EncodeError`.
    """
    payload = encode_batch(batch, dialect)
    events: list[Any] = batch.events
    if len(events) < 2 or (len(payload) <= MAX_PAYLOAD and len(events) <= DEFAULT_WIRE_LIMITS.max_events):
        return [payload]
    middle = len(events) // 2
    halves = (KVEventBatch(batch.ts, part, batch.data_parallel_rank) for part in (events[:middle], events[middle:]))
    return [each for half in halves for each in payloads_of(half, dialect)]


def _form(row: Dialect, *, signed: bool, before: str) -> str:
    if row.batch == "map":
        return "map batch"
    # Hashes that could be either leave it at what was seen before.
    kept = before.startswith(row.events) and before.endswith("signed")
    return f"{row.events} signed" if signed or kept else row.events


def _has_hashes(event: KVEvent) -> bool:
    return not isinstance(event, AllBlocksCleared) and bool(event.block_hashes)
