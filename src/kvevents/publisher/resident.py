"""What a publisher's stream has left resident, for heartbeats."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, Final

from kvevents.errors import MissingDependencyError
from kvevents.events import Heartbeat
from kvevents.stream import RawBatch
from kvevents.wire import DEFAULT_WIRE_LIMITS, decode_batch
from kvevents.wire.respelling import respelled

if TYPE_CHECKING:
    from kvevents.publisher.kept import Numbered

_NAME: Final = "own"
_INDEX_LIMITS: Final = {"max_fences": 0, "max_speculated": 0}
"""Others are those of `kvevents.index.IndexLimits`, whose defaults the native index has too, since what they cost counts."""
_EMPTY: Final = f"{0:032x}"
_APPLIED, _CLEARED = "applied", "cleared"
_OUTCOMES: Final = (_APPLIED, _CLEARED, "duplicate", "void")
"""What the native index says of a batch; its own words there are for `kvevents.index`."""


class Resident:
    """Mirrors a stream as a consumer's index does, and tells its digest.

    `mirror` is a kind of `_native.NativeIndex`, which must not be imported here: who has no wheel publishes all the same.
    """

    def __init__(self, mirror: Any) -> None:
        self._mirror = mirror
        self._last = -1
        self._missing: int | None = None
        """The newest number that was never sent, since the stream was cleared last."""

    @classmethod
    def create(cls) -> Resident:
        """Of a stream that has not begun. Raises `MissingDependencyError` without the native module."""
        try:
            native = importlib.import_module("kvevents._native")
        except ImportError as error:
            raise MissingDependencyError(
                "heartbeat needs the compiled module kvevents._native; install a wheel of kvevents, or leave the setting out"
            ) from error
        # An index that keeps nothing of what it finds in a payload, such as the publisher's own heartbeats.
        mirror: Any = type("Mirror", (native.NativeIndex,), {"_found": lambda _self, outcome, *_found: outcome})
        limits = astuple(DEFAULT_WIRE_LIMITS)[:6]
        return cls(mirror(limits, None, _INDEX_LIMITS, _OUTCOMES))

    def apply(self, batches: Sequence[Numbered]) -> None:
        """Take in what was sent, as it was sent, other threads running meanwhile."""
        raw = [RawBatch(_NAME, 0, 0, seq, False, payload) for seq, payload in batches]
        done = 0
        while done < len(raw):
            outcomes = self._mirror._apply_many(raw[done:])  # noqa: SLF001 - the native module's, as in kvevents.index
            if done + len(outcomes) < len(raw):
                outcomes.append(self._read(raw[done + len(outcomes)]))
            for each, outcome in zip(raw[done:], outcomes, strict=False):
                self._note(each.seq, outcome)
            done += len(outcomes)

    def _read(self, batch: RawBatch) -> Any:
        """A payload that the native decoder leaves alone, as `kvevents.index` reads it."""
        payload = respelled(decode_batch(batch.payload).batch.events)
        return self._mirror._apply(_NAME, 0, 0, batch.seq, payload)  # noqa: SLF001 - the native module's

    def _note(self, seq: int, outcome: Any) -> None:
        if seq != self._last + 1:
            self._missing = seq - 1
        if outcome == _CLEARED:
            self._missing = None
        self._last = seq

    def digest(self) -> str:
        """`kvevents.index.PrefixIndex.digest` of whoever applied the same."""
        found = self._mirror._digest(_NAME, 0)  # noqa: SLF001 - the native module's
        return _EMPTY if found is None else f"{found:032x}"

    def heartbeat(self, number: int, every: float, incarnation: int) -> Heartbeat:
        """What a batch with this number, next to be sent, can say of all before it."""
        missing = number - 1 if number != self._last + 1 else self._missing
        if missing is None:
            return Heartbeat(self.digest(), every, incarnation=incarnation)
        reason = f"number {missing} was never sent: it was dropped, or could not be encoded"
        return Heartbeat(self.digest(), every, "DEGRADED", reason, incarnation)
