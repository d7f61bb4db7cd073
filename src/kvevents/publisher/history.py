"""History that has left the replay buffer, collapsed into what is still live."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, Literal, Protocol, TypeAlias

from kvevents.publisher.kept import Numbered
from kvevents.wire import DEFAULT_WIRE_LIMITS

Lost: TypeAlias = Literal["batches", "payloads", "digests"]
"""Batches that nobody will see, payloads that nobody can read, or hashes that would not be the same ones as numbers."""
Told: TypeAlias = tuple[Any, ...]
"""An event as `_native.Compactor.events` tells it."""


class _Compactor(Protocol):
    """`_native.Compactor`, which must not be imported here: who has no wheel publishes all the same."""

    def fold(self, payload: bytes, own: bool = False) -> None: ...
    def fold_many(self, batches: list[Numbered]) -> None: ...
    def events(self) -> list[Told] | None: ...
    def payloads(self, limit: int, ts: float) -> list[bytes] | None: ...
    def miss(self) -> None: ...
    def lose(self, reason: str) -> None: ...
    def clear(self) -> None: ...
    @property
    def live(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def lost(self) -> str | None: ...
    @property
    def partial(self) -> bool: ...


class History:
    """Payloads of one stream, oldest first, of which only what is still live is kept.

    It can be told again (`kvevents.publisher.parts` spells it): a clear, then stores that rebuild every chain, so that whoever
    applies them knows what one knows who saw every batch. What nobody can key by its tokens is not told: blocks of groups of an
    unknown kind, and stores whose lengths do not agree.
    """

    def __init__(self, compactor: _Compactor) -> None:
        self._compactor = compactor

    @classmethod
    def create(cls) -> History | None:
        """An empty one, or None where the native module is not installed."""
        try:
            native = importlib.import_module("kvevents._native")
        except ImportError:
            return None
        return cls(native.Compactor(astuple(DEFAULT_WIRE_LIMITS)[:6]))

    def fold(self, payload: bytes) -> None:
        """Take in the next payload, as it was sent."""
        self._compactor.fold(payload)

    def fold_many(self, batches: list[Numbered]) -> None:
        """The same for the payloads of several in a row, other threads running meanwhile where that takes long."""
        self._compactor.fold_many(batches)

    def restore(self, payloads: Sequence[bytes], *, partial: bool = False) -> None:
        """Take in what `payloads` gave in another life of the process. `lost` where it is not that."""
        for payload in payloads:
            self._compactor.fold(payload, own=True)
        if partial:
            self.miss()

    def told(self) -> list[Told] | None:
        """Events that tell it, in a moment: None where that is `lost`, or no order of events can say it.

        The latter takes equal hashes under different parents, stored again and again; it passes as they are removed.
        """
        return None if self.lost else self._compactor.events()

    def payloads(self, limit: int, ts: float) -> list[bytes] | None:
        """The same for `restore`, in payloads of at most `limit` bytes where a block is no larger, other threads running."""
        return None if self.lost else self._compactor.payloads(limit, ts)

    def miss(self) -> None:
        """A batch that nobody will see would have come here: what is told from now on is `partial`."""
        self._compactor.miss()

    def lose(self, reason: Lost) -> None:
        """Nothing is told until the stream is cleared: what was folded is not all there was."""
        self._compactor.lose(reason)

    def clear(self) -> None:
        """Forget everything."""
        self._compactor.clear()

    @property
    def lost(self) -> str | None:
        """What there was too much of, or one of `Lost`; None if nothing."""
        return self._compactor.lost

    @property
    def partial(self) -> bool:
        """Whether something was missed since the stream was cleared last."""
        return self._compactor.partial

    @property
    def live(self) -> int:
        """Blocks with at least one copy."""
        return self._compactor.live

    @property
    def bytes(self) -> int:
        """Heap memory, about."""
        return self._compactor.bytes

    def __repr__(self) -> str:
        state = f"lost: {self.lost}" if self.lost else f"{self.live} blocks"
        return f"<History {state}, {self.bytes} bytes>"
