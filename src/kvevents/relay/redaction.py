"""Stores without their prompts: what is said of the tokens, and nothing that was made of them but keys."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Final, TypeAlias

import msgspec

from kvevents.events import AllBlocksCleared, BlockStored, KVEvent
from kvevents.wire.respelling import scope_of

KeyOf: TypeAlias = Callable[[int], int | None]
"""The key that a resident hash stands for; None where it is not known."""
Key: TypeAlias = Callable[[int], int]

_PROMPTS: Final = ("extra_keys", "lookahead_token_ids", "cache_salt", "session_id", "unrecognised")
"""Fields besides the tokens that say something of a prompt, or of who sent it."""


class Redactor:
    """Takes the tokens out of stores. `key` says what to put in their place: see `hashed` and `dropped`."""

    def __init__(self, key: Key) -> None:
        self.salted = False
        """Whether a prompt had a salt, which its first block alone tells."""
        self._key = key

    def __call__(self, events: list[KVEvent]) -> list[KVEvent]:
        """The same events, with keys in the place of tokens."""
        return [self._redacted(event) if isinstance(event, BlockStored) else _bare(event) for event in events]

    def _redacted(self, event: BlockStored) -> BlockStored:
        self.salted = self.salted or _is_salted(event)
        changes = dict.fromkeys(_PROMPTS)
        # A store without tokens says where blocks are that were told before; so it does afterwards. One whose tokens were taken
        # out by another relay is none of those.
        told = (event.token_ids or event.block_keys) and event.block_hashes
        keys = list(map(self._key, event.block_hashes)) if told else None
        return msgspec.structs.replace(event, token_ids=[], block_keys=keys, **changes)


def hashed(key_of: KeyOf) -> Redactor:
    """Keys that prompts still match: those under which the index of the unredacted stream has the blocks.

    A block that waits there for its parent has none yet, and gets one that no prompt has.
    """

    def key(block_hash: int) -> int:
        known = key_of(block_hash)
        return opaque(block_hash) if known is None else known

    return Redactor(key)


def dropped() -> Redactor:
    """Numbers that say nothing of the tokens: who knows a block's hash finds it, no prompt does."""
    return Redactor(opaque)


def opaque(block_hash: int) -> int:
    """A key that is made of the engine's hash alone."""
    return int.from_bytes(blake2b(block_hash.to_bytes(8, "big"), digest_size=8, person=b"kvevents").digest(), "big")


def _is_salted(event: BlockStored) -> bool:
    first = next(iter(event.extra_keys or ()), None) or ()
    return event.cache_salt is not None or any(isinstance(key, str) and key != event.lora_name for key in first)


def _bare(event: KVEvent) -> KVEvent:
    if event.unrecognised is None:
        return event
    # What a clear is meant for is read as unrecognised; without it more would be cleared.
    scope = scope_of(event) if isinstance(event, AllBlocksCleared) else {}
    return msgspec.structs.replace(event, unrecognised=scope or None)
