"""History that has left the replay buffer, collapsed into one batch."""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.wire import DEFAULT_WIRE_LIMITS, decode_batch
from kvevents.wire.layouts import native_layouts
from kvevents.wire.respelling import respelled

Lost: TypeAlias = Literal["batches", "payloads", "digests"]
"""Batches that nobody will see, payloads that nobody can read, or hashes that would not be the same ones as numbers."""
Told: TypeAlias = tuple[Any, ...]
"""An event as `_native.Compactor.events` tells it."""

_decode: Final = msgspec.msgpack.decode


class _Compactor(Protocol):
    """`_native.Compactor`, which must not be imported here: who has no wheel publishes all the same."""

    def fold(self, payload: bytes, respelled: bool = False) -> bool: ...
    def fold_many(self, payloads: list[bytes]) -> int: ...
    def events(self) -> list[Told] | None: ...
    def lose(self, reason: str) -> None: ...
    def clear(self) -> None: ...
    @property
    def live(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def lost(self) -> str | None: ...


class History:
    """Payloads of one stream, oldest first, of which only what is still live is kept.

    `snapshot` says it again as one batch: a clear, then stores that rebuild every chain, so that whoever applies it knows what
    one knows who saw every batch. What nobody can key by its tokens is not in it: blocks of groups of an unknown kind, and
    stores whose lengths do not agree.
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
        return cls(native.Compactor(native_layouts(), astuple(DEFAULT_WIRE_LIMITS)[:6]))

    def fold(self, payload: bytes) -> None:
        """Take in the next payload, as it was sent."""
        if not self._compactor.fold(payload):
            # As an index reads what its native scanner is not certain of.
            events = decode_batch(payload).batch.events
            if any(map(_has_digests, events)):
                self.lose("digests")
            elif not self._compactor.fold(respelled(events), respelled=True):
                self.lose("payloads")

    def fold_many(self, payloads: Sequence[bytes]) -> None:
        """The same for several in a row, other threads running meanwhile."""
        done = 0
        while done < len(payloads):
            done += self._compactor.fold_many(list(payloads[done:]))
            for payload in payloads[done : done + 1]:
                self.fold(payload)
                done += 1

    def told(self) -> list[Told] | None:
        """What `snapshot` spells, in a moment: None where that is `lost`, or no order of events can say it.

        The latter takes equal hashes under different parents, stored again and again; it passes as they are removed.
        """
        return None if self.lost else self._compactor.events()

    @staticmethod
    def snapshot(told: list[Told], ts: float, rank: int | None = None) -> KVEventBatch:
        """One batch that stands for all that was folded when it was `told`."""
        return KVEventBatch(ts, [AllBlocksCleared(), *(_SPELLINGS[event[0]](*event[1:]) for event in told)], rank)

    def lose(self, reason: Lost) -> None:
        """There is no snapshot until the stream is cleared: what was folded is not all there was."""
        self._compactor.lose(reason)

    def clear(self) -> None:
        """Forget everything."""
        self._compactor.clear()

    @property
    def lost(self) -> str | None:
        """What there was too much of, or one of `Lost`; None if nothing."""
        return self._compactor.lost

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


def _has_digests(event: KVEvent) -> bool:
    return any(getattr(event, name, None) is not None for name in ("block_digests", "parent_block_digest"))


# --- as events --------------------------------------------------------------------------------------------------------------


_STORED: Final = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "pairs",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
    "ownership",
    "cache_salt",
)
_REMOVED: Final = ("block_hashes", "medium", "group_idx", "locality", "ownership")


def _stored(*values: Any) -> BlockStored:
    fields = dict(zip(_STORED, values, strict=True))
    numbers = array("I", fields["token_ids"]).tolist()
    fields["token_ids"] = list(zip(numbers[::2], numbers[1::2], strict=True)) if fields.pop("pairs") else numbers
    if fields["extra_keys"] is not None:
        fields["extra_keys"] = _decode(fields["extra_keys"])
    return BlockStored(**fields)


def _removed(*values: Any) -> BlockRemoved:
    return BlockRemoved(**dict(zip(_REMOVED, values, strict=True)))


_SPELLINGS: Final[dict[str, Callable[..., KVEvent]]] = {"stored": _stored, "removed": _removed}
