"""Payloads read, changed and written anew: for another dialect, without tokens, or because several upstreams share a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias

import msgspec

from kvevents.errors import EncodeError
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Heartbeat, KVEvent, KVEventBatch
from kvevents.relay.merging import MAX_RESIDENT, PLACE, Residents
from kvevents.relay.redaction import Redactor
from kvevents.relay.spelling import MAX_PAYLOAD, payloads_of
from kvevents.stream import RawBatch
from kvevents.wire import Rejected, decode_batch
from kvevents.wire.dialects import Dialect
from kvevents.wire.respelling import scope_of

Change: TypeAlias = Callable[[list[KVEvent]], list[KVEvent]]


class Rewritten(NamedTuple):
    """A payload as it goes out, and what reading it has shown."""

    payloads: list[bytes]
    """Empty where nothing is left to tell; more than one where consumers would not read it as one."""
    cleared: bool
    heartbeat: Heartbeat | None
    rejected: tuple[Rejected, ...]
    """What could not be read; and what could not be told, of which consumers must see that something is missing."""


class Rewriter:
    """For one upstream. With `residents` it shares the stream with others, with a `redactor` tokens are taken out."""

    def __init__(self, dialect: Dialect | None, residents: Residents | None = None, redactor: Redactor | None = None) -> None:
        self.residents: Final = residents
        self._dialect: Final = dialect
        self._scopes: Final = _scopes(dialect, shared=residents is not None)
        self._changes: Final[list[Change]] = []
        if redactor is None:
            self._changes.append(self._namespaced)
        if residents is not None:
            self._changes.append(residents.settle)
        if redactor is not None:
            self._changes.append(redactor)

    def __call__(self, delivery: RawBatch) -> Rewritten:
        """A batch of the upstream as it goes out."""
        found = decode_batch(delivery.payload)
        batch, rejected = found.batch, list(found.rejected)
        heartbeat = last_heartbeat(batch.events)
        events = without_heartbeats(batch.events)
        cleared = any(type(event) is AllBlocksCleared and event.unrecognised is None for event in events)
        events = [self._wider(event, rejected) for event in events]
        for change in self._changes:
            events = change(events)
        if self.residents is not None and len(self.residents) > MAX_RESIDENT:
            events += self.residents.cleared()
            rejected.append(Rejected("more", f"an upstream with more than {MAX_RESIDENT} blocks: they are forgotten"))
        payloads: list[bytes] = []
        if events or heartbeat is None:
            rank = delivery.rank if batch.data_parallel_rank is None else batch.data_parallel_rank
            payloads = self._spelled(KVEventBatch(batch.ts, events, rank), rejected)
        return Rewritten(payloads, cleared, heartbeat, tuple(rejected))

    def forget(self) -> list[KVEvent]:
        """Events that take back all that the upstream has told."""
        return [AllBlocksCleared()] if self.residents is None else self.residents.cleared()

    def _wider(self, event: KVEvent, rejected: list[Rejected]) -> KVEvent:
        """A clear of a tier or group that consumers cannot be told of clears everything: nobody is credited falsely then."""
        if isinstance(event, AllBlocksCleared) and not self._scopes.issuperset(scope_of(event)):
            rejected.append(Rejected("bad-field", f"a clear of {scope_of(event)} cannot be told in {self._dialect}"))
            return AllBlocksCleared()
        return event

    def _namespaced(self, events: list[KVEvent]) -> list[KVEvent]:
        """Without stores that would be taken for those of plain prompts, since the dialect cannot tell the difference."""
        if self._dialect is None:
            return [_with_salt(event) for event in events]
        said = self._dialect.stored
        return [event for event in events if not isinstance(event, BlockStored) or _names(event).issubset(said)]

    def _spelled(self, batch: KVEventBatch, rejected: list[Rejected]) -> list[bytes]:
        try:
            payloads = payloads_of(batch, self._dialect)
        except EncodeError:
            return self._spelled(self._spellable(batch, rejected), rejected)
        kept = [payload for payload in payloads if len(payload) <= MAX_PAYLOAD]
        if len(kept) < len(payloads):
            rejected.append(Rejected("oversized", "an event is too large to be written anew"))
        return kept

    def _spellable(self, batch: KVEventBatch, rejected: list[Rejected]) -> KVEventBatch:
        """What of a batch the dialect has words for."""
        kept: list[KVEvent] = []
        for at, event in enumerate(batch.events):
            try:
                payloads_of(KVEventBatch(batch.ts, [event]), self._dialect)
            except EncodeError as error:
                rejected.append(Rejected("bad-field", str(error), at))
            else:
                kept.append(event)
        return KVEventBatch(batch.ts, kept, batch.data_parallel_rank)


def last_heartbeat(events: list[KVEvent]) -> Heartbeat | None:
    """The newest of those in a batch."""
    return next((found for event in reversed(events) if (found := _heartbeat(event)) is not None), None)


def without_heartbeats(events: list[KVEvent]) -> list[KVEvent]:
    """A sender's heartbeats are its own: in the stream of a relay they would speak of another stream."""
    kept = (event for event in events if _heartbeat(event) is None or _blocks(event))
    return [event if _heartbeat(event) is None else msgspec.structs.replace(event, heartbeat=None) for event in kept]


def _names(event: BlockStored) -> set[str]:
    """Fields without which a store's tokens are another prompt's."""
    names = {"cache_salt"} if event.cache_salt else set()
    if event.extra_keys and any(event.extra_keys):
        names.add("extra_keys")
    # What has a number as well is told apart by that, in all dialects.
    return names | ({"lora_name"} if event.lora_name and event.lora_id is None else set())


def _with_salt(event: KVEvent) -> KVEvent:
    """A salt is no field of the layout in which events with unrecognised fields go out, and must be one of those then."""
    if not isinstance(event, BlockStored) or event.cache_salt is None:
        return event
    fields = {**(event.unrecognised or {}), "cache_salt": event.cache_salt}
    return msgspec.structs.replace(event, cache_salt=None, unrecognised=fields)


def places(dialect: Dialect | None) -> frozenset[str]:
    """What a dialect can say of where a block is."""
    return PLACE if dialect is None else PLACE.intersection(dialect.removed)


def _scopes(dialect: Dialect | None, *, shared: bool) -> frozenset[str]:
    """What a clear may be limited by: in a shared stream it goes out as removals, otherwise as a map with more fields."""
    return places(dialect) if shared or dialect is None or dialect.events == "map" else frozenset()


def _heartbeat(event: KVEvent) -> Heartbeat | None:
    return event.heartbeat if isinstance(event, BlockRemoved) else None


def _blocks(event: KVEvent) -> list[int]:
    return [] if isinstance(event, AllBlocksCleared) else event.block_hashes
