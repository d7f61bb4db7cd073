"""One event's fields on their way into its type: each is read alone, with its own type and within its own limit."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import msgspec

from kvevents.events import ExtraKey, Heartbeat
from kvevents.wire.limits import MAX_FREE_CONTAINERS, WireLimits
from kvevents.wire.raw import NIL, REFUSED, declared, head_of, plain, refusal_of
from kvevents.wire.rejected import RefusedError

_MASK: Final = (1 << 64) - 1
_DIGEST_BYTES_MIN: Final = 8

_OURS: Final = ("unrecognised", "block_digests", "parent_block_digest")
"""Names of our events that are no engine's."""

_Decoder = msgspec.msgpack.Decoder
_INTEGER: Final = _Decoder(int | None)
_TEXT: Final = _Decoder(str | None)
_INTEGERS: Final = _Decoder(list[int])
_HASH: Final = _Decoder(int | bytes | None)
_HASHES: Final = _Decoder(list[int | bytes])
_TOKENS: Final = _Decoder(list[int | str | tuple[int, int]])
_HEARTBEAT: Final = _Decoder(Heartbeat)
_LOOKAHEAD: Final = _Decoder(list[list[int]])
_EXTRA_KEYS: Final = _Decoder(list[tuple[ExtraKey, ...] | None])


class FreeForm:
    """How much of free form one batch may still have."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit
        self._containers = MAX_FREE_CONTAINERS

    def take(self, name: str, size: int) -> None:
        """Count `size` bytes of the field `name`. Raises `RefusedError`."""
        if size > self._left:
            raise RefusedError("oversized", f"{name} has {size} bytes; the limit max_free_bytes of a batch is {self._limit}")
        self._left -= size

    def enter(self, name: str) -> None:
        """Count a list or a map in the field `name`. Raises `RefusedError`."""
        if not self._containers:
            raise RefusedError(
                "oversized", f"{name} has more lists and maps than the {MAX_FREE_CONTAINERS} that a batch may have"
            )
        self._containers -= 1


class FieldReader:
    """Raw fields by name. Each method takes one out; `rest`, called last, returns what nobody took.

    All of them raise `RefusedError` when the field is not what it should be.
    """

    def __init__(self, fields: dict[str, msgspec.Raw], limits: WireLimits, free: FreeForm) -> None:
        self._fields = fields
        self._limits = limits
        self._free = free

    def integer(self, name: str) -> int | None:
        return self._read(name, _INTEGER) if name in self._fields else None

    def text(self, name: str) -> str | None:
        return self._read(name, _TEXT) if name in self._fields else None

    def hashes(self) -> tuple[list[int], list[bytes] | None]:
        """Canonical hashes, and the digests they were made of when all were digests."""
        name = "block_hashes"
        self._bound(name)
        try:
            values: list[Any] = _INTEGERS.decode(self._fields.get(name, NIL))
        except REFUSED:
            values = self._read(name, _HASHES)
        else:
            del self._fields[name]
        digests = values if values and all(type(value) is bytes for value in values) else None
        return [_canonical(name, value) for value in values], digests

    def parent(self) -> tuple[int | None, bytes | None]:
        value = self._read("parent_block_hash", _HASH)
        if value is None:
            return None, None
        return _canonical("parent_block_hash", value), value if type(value) is bytes else None

    def tokens(self) -> list[int | tuple[int, int]]:
        """Token ids: integers, under EAGLE pairs of them (SGLang), or decimal strings (TensorRT-LLM)."""
        try:
            values: list[Any] = _INTEGERS.decode(self._fields.get("token_ids", NIL))
        except REFUSED:
            return [_token(value) for value in self._read("token_ids", _TOKENS)]
        del self._fields["token_ids"]
        return values

    def extra_keys(self) -> list[tuple[Any, ...] | None] | None:
        name = "extra_keys"
        raw = self._optional(name)
        if raw is None:
            return None
        self._bound(name)
        self._free.take(name, len(memoryview(raw)))
        try:
            found: list[tuple[Any, ...] | None] = _EXTRA_KEYS.decode(raw)
        except REFUSED:
            found = self._free_extra_keys(raw)
        del self._fields[name]
        return found

    def _free_extra_keys(self, raw: msgspec.Raw) -> list[tuple[Any, ...] | None]:
        values = plain(raw, "extra_keys", self._limits.max_nesting - 1, self._free.enter)
        if not isinstance(values, list) or not all(value is None or isinstance(value, list) for value in values):
            raise RefusedError("bad-field", "extra_keys is not a list of lists or nil")
        return [None if value is None else tuple(value) for value in values]

    def lookahead(self) -> list[list[int]] | None:
        name = "lookahead_token_ids"
        if self._optional(name) is None:
            return None
        self._bound(name)
        found: list[list[int]] = self._read(name, _LOOKAHEAD)
        return found

    def keys(self) -> list[int] | None:
        """Keys in the place of tokens, modulo 2**64."""
        if self._optional("block_keys") is None:
            return None
        self._bound("block_keys")
        return [key & _MASK for key in self._read("block_keys", _INTEGERS)]

    def heartbeat(self) -> Heartbeat | None:
        """A heartbeat of ours; what is none stays where it was, as nothing that is known."""
        raw = self._optional("heartbeat")
        if raw is None:
            return None
        with suppress(*REFUSED):
            found = _HEARTBEAT.decode(raw)
            del self._fields["heartbeat"]
            return found
        return None

    def rest(self) -> dict[str, Any] | None:
        """What no method took, read as far as the limits allow."""
        for name in _OURS:
            # Nil says nothing, and the fast path does not see it.
            self._optional(name)
        for name, raw in self._fields.items():
            self._free.take(name[:64], len(memoryview(raw)))
        depth = self._limits.max_nesting - 1
        return {name: plain(raw, name[:64], depth, self._free.enter) for name, raw in self._fields.items()} or None

    def _read(self, name: str, decoder: _Decoder[Any]) -> Any:
        try:
            return decoder.decode(self._fields.pop(name, NIL))
        except REFUSED as error:
            raise refusal_of(error, name) from error

    def _optional(self, name: str) -> msgspec.Raw | None:
        """The field unless it is missing or nil."""
        raw = self._fields.get(name, NIL)
        if head_of(raw) != 0xC0:
            return raw
        self._fields.pop(name, None)
        return None

    def _bound(self, name: str) -> None:
        """Fields with one entry per block have no more entries than an event may have hashes."""
        count, limit = declared(memoryview(self._fields.get(name, NIL))), self._limits.max_hashes
        if count > limit:
            raise RefusedError("too-many-hashes", f"{name} has {count} entries; the limit max_hashes is {limit}")


def _canonical(name: str, value: int | bytes) -> int:
    if type(value) is int:
        return value & _MASK
    if len(value) < _DIGEST_BYTES_MIN:  # type: ignore[arg-type]
        raise RefusedError("bad-field", f"{name} holds a digest of less than {_DIGEST_BYTES_MIN} bytes")
    return int.from_bytes(value[-8:], "big")  # type: ignore[index]


def _token(value: int | str | tuple[int, int]) -> int | tuple[int, int]:
    if not isinstance(value, str):
        return value
    # Without the bound on its length a string of digits takes quadratic time, or raises.
    if value.isascii() and value.isdigit() and len(value) <= 20 and int(value) <= _MASK:
        return int(value)
    raise RefusedError("bad-field", "token_ids holds a string that is no token id")
