"""How each engine release encodes its batches: one table with one row per change on the wire.

A release between two rows uses the older row. To add an engine release, add a row with `_next`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kvevents.errors import UnknownDialectError
from kvevents.wire.checked_msgpack import (
    DEFAULT_WIRE_LIMITS,
    MSGPACK_ERRORS,
    NIL,
    DecodeRejectedError,
    array_items,
    decode_scalar,
    first_byte,
    is_array,
    is_map,
    map_items,
)

Form = Literal["array", "map"]


class Dialect(Struct, frozen=True, eq=False):
    """The wire format of one engine from release `since` on. Rows are compared by identity."""

    engine: str
    since: str
    stored_fields: tuple[str, ...]
    """Fields of BlockStored in wire order, by their names in `kvevents.events`."""
    removed_fields: tuple[str, ...]
    """Fields of BlockRemoved in wire order."""
    batch_form: Form = "array"
    has_rank: bool = True
    """Whether a batch carries the data-parallel rank."""
    event_form: Form = "array"
    optional_fields: frozenset[str] = frozenset()
    """Fields that map events leave out when the fields are nil."""
    has_signed_hashes: bool = False
    """Whether 64-bit hashes are sent as signed integers."""
    has_replay_topic: bool = False
    """Whether replay replies repeat the topic."""
    is_lossless: bool = False
    """Whether an event with a field that the release lacks is sent in the layout of `kvevents.events`."""

    @property
    def name(self) -> str:
        """Label for metrics and messages, such as `vllm-0.24.0`."""
        return f"{self.engine}-{self.since}"

    def __str__(self) -> str:
        return self.name


_BASE_FIELDS: Final = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")

# vLLM, vllm/distributed/kv_events.py
_V0_9_0: Final = Dialect(
    "vllm", "0.9.0", stored_fields=_BASE_FIELDS, removed_fields=("block_hashes",), has_rank=False, has_signed_hashes=True
)
_DIALECTS: Final = [_V0_9_0]


def _next(row: Dialect, since: str, *stored: str, removed: str | None = None, **changes: Any) -> Dialect:
    """Add and return the row of a later release, which adds the fields `stored` to stores and the field `removed` to removals.

    Added fields are left out of map events when they are nil.
    """
    changes.setdefault("optional_fields", row.optional_fields | {*stored} if row.event_form == "map" else frozenset())
    removed_fields = row.removed_fields if removed is None else (*row.removed_fields, removed)
    dialect = replace(row, since=since, stored_fields=(*row.stored_fields, *stored), removed_fields=removed_fields, **changes)
    _DIALECTS.append(dialect)
    return dialect


_V0_9_1: Final = _next(_V0_9_0, "0.9.1", has_rank=True)
_V0_10_2: Final = _next(_V0_9_1, "0.10.2", "medium", removed="medium", has_signed_hashes=False)
_V0_14: Final = _next(_V0_10_2, "0.14.0", "lora_name")
_V0_17: Final = _next(_V0_14, "0.17.0", "extra_keys")
_V0_20: Final = _next(_V0_17, "0.20.0", "group_idx", removed="group_idx")
_V0_22: Final = _next(_V0_20, "0.22.0", "kv_cache_spec_kind", "kv_cache_spec_sliding_window")
_OPTIONAL_FIELDS: Final = frozenset({"extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"})
# An unreleased commit between 0.23 and 0.24 sent the batch itself as a map, and nightly images contain this commit.
_V_MAP_BATCH: Final = _next(_V0_22, "main@0181ea3173e5", batch_form="map", event_form="map", optional_fields=_OPTIONAL_FIELDS)
_V0_24: Final = _next(_V_MAP_BATCH, "0.24.0", batch_form="array")
_V0_26: Final = _next(_V0_24, "0.26.0", "locality", removed="locality", has_replay_topic=True)
_V0_29: Final = _next(_V0_26, "0.29.0", "ownership", removed="ownership")
_V0_30: Final = _next(_V0_29, "0.30.0", "session_id")
_V0_33: Final = _next(_V0_30, "0.33.0", "lookahead_token_ids")

# SGLang, python/sglang/srt/disaggregation/kv_events.py
_S0_4_6: Final = _next(_V0_9_0, "0.4.6.post5", engine="sglang")
_S0_4_7: Final = _next(_S0_4_6, "0.4.7", has_rank=True)
_S0_5_9: Final = _next(_S0_4_7, "0.5.9", "medium", removed="medium")
_SALT_NAMES: Final = ("cache_salt", "session_id")
_S0_5_20: Final = _next(_S0_5_9, "0.5.20", *_SALT_NAMES, event_form="map", optional_fields=frozenset({"medium", *_SALT_NAMES}))
_S0_5_22: Final = _next(_S0_5_20, "0.5.22", "lora_name", has_replay_topic=True)

NEWEST_VLLM: Final = _V0_33
"""The layout of the structs in `kvevents.events`."""
DECLARED_DIALECT: Final = replace(
    _V0_33, stored_fields=(*_V0_33.stored_fields, "cache_salt"), optional_fields=_V0_33.optional_fields | {"cache_salt"}
)
"""The dialect that sends events as maps, with all fields of `kvevents.events` that any engine has."""
DEFAULT_DIALECT: Final = replace(_V0_22, is_lossless=True)
"""The dialect of a publisher if no release is named: the newest array form of vLLM, and replies without a topic. The decision
record 0025 lists the programs that read arrays."""
DEFAULT_SGLANG_DIALECT: Final = replace(_S0_5_9, is_lossless=True)
"""The dialect of `kvevents.compat.sglang` if no release is named: the newest array form of SGLang."""
ARRAY_STORED: Final = _V0_22.stored_fields
"""The longest array form of BlockStored. Every shorter form, including SGLang's, is a prefix of the longest form."""
ARRAY_REMOVED: Final = (*_V0_22.removed_fields, "heartbeat")
"""The longest array form of BlockRemoved, followed by the field that only kvevents sends."""
ARRAY_CLEARED: Final = ("medium", "group_idx")
"""Fields that limit a clear to a medium and a group. Only kvevents sends these fields in array events."""

# No release sends `BlockInactive` yet: https://github.com/vllm-project/vllm/pull/50732.
NEUTRAL_KINDS: Final = frozenset({"BlockInactive"})
"""Kinds of events that do not change which blocks are resident. Decoders skip neutral events, and the stream stays trusted.
An event of any other unknown kind might change blocks, so it is rejected, and the stream becomes DEGRADED."""

# A single letter after a hyphen begins the suffix of an image, as in `v0.5.20-b200`, and does not mark a pre-release.
# The pattern has no possessive quantifier: after one, Python 3.11.2 (Debian 12) ends a group at the wrong place.
_RELEASE_PATTERN: Final = re.compile(
    r"v?(\d{1,9}(?:\.\d{1,9})*)(?!\.?\d)(?:(?:[._]?(a|b)|[._-]?(alpha|beta|rc|dev|post))[._]?(\d{0,9})(?![a-z\d]))?",
    re.IGNORECASE,
)
_PHASE_ORDER: Final = {"dev": -4, "a": -3, "alpha": -3, "b": -2, "beta": -2, "rc": -1, "": 0, "post": 1}


def dialects() -> tuple[Dialect, ...]:
    """Return every row of the table, with the releases of each engine in order."""
    return tuple(_DIALECTS)


def _release_key(release: str) -> tuple[tuple[int, ...], int, int] | None:
    """Return the sort key of a release in the order of PEP 440. Text after the first pre- or post-release mark is ignored."""
    match = _RELEASE_PATTERN.match(release)
    if match is None:
        return None
    numbers = [int(part) for part in match[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), _PHASE_ORDER[(match[2] or match[3] or "").lower()], int(match[4] or 0)


@lru_cache(maxsize=256)
def dialect_for(engine: str, release: str = "latest") -> Dialect:
    """Return the dialect that `release` of `engine` uses.

    `engine` is `vllm` or `sglang`, `release` a version such as `0.5.17`, `v0.11.1+cu128` or `latest`. A release newer than the
    newest row uses the newest row.

    Raise `UnknownDialectError` for another engine, an unreadable release, or a release older than the first row.
    """
    rows = [row for row in _DIALECTS if row.engine == engine.lower()]
    if not rows:
        engines = ", ".join(sorted({row.engine for row in _DIALECTS}))
        raise UnknownDialectError(f"unknown engine {engine!r}; known engines: {engines}")
    if release == "latest":
        return rows[-1]
    matches = [row for row in rows if release.split(" ", maxsplit=1)[0] == row.since]
    if matches:
        return matches[0]
    target = _release_key(release)
    if target is None:
        raise UnknownDialectError(f"cannot read release {release!r} of {engine}; expected a version such as {rows[-1].since}")
    newest: Dialect | None = None
    for row in rows:
        since = _release_key(row.since)
        if since is not None and since <= target:
            newest = row
    if newest is None:
        raise UnknownDialectError(f"{engine} {release} is older than {rows[0].since}, the first release with KV events")
    return newest


def resolve_dialect(value: Dialect | str | None) -> Dialect | None:
    """Return the dialect of a name such as `vllm-0.24` or `sglang-latest`. Return a `Dialect` or None unchanged.

    Raises `UnknownDialectError` for an unknown engine or release.
    """
    if value is None or isinstance(value, Dialect):
        return value
    engine, _, release = value.partition("-")
    return dialect_for(engine, release or "latest")


# --- detection -------------------------------------------------------------------------------------------------------------

_HASH_FIELDS: Final = ("block_hashes", "parent_block_hash")
_decode_hashes: Final = msgspec.msgpack.Decoder(int | bytes | list[int | bytes] | None).decode


class _EventShape(NamedTuple):
    """The properties of an event that differ between releases."""

    form: Form
    tag: str
    names: tuple[str, ...]
    """Keys of a map in their order, which differs between SGLang and vLLM; empty for an array."""
    width: int
    """Number of elements of an array after the tag; 0 for a map."""
    has_negative_hash: bool
    """Whether a hash is below 0."""
    has_high_hash: bool
    """Whether a hash is 2**63 or above."""
    has_wide_header: bool = False
    """Whether a map of fewer than 16 pairs has the header of a larger map. msgspec chooses the header by the number of fields
    that the struct declares. BlockStored of vLLM 0.33 is the first layout with 16 fields, so it is recognised regardless of
    omitted fields."""


def detect_dialect(payload: bytes) -> Dialect | None:
    """Return the first row of the table of dialects that matches all of `payload`; None if no row matches."""
    limits = DEFAULT_WIRE_LIMITS
    try:
        if payload and is_map(payload[0]):
            fields = map_items(payload, "the batch", limits.max_fields)
            rows = [row for row in _DIALECTS if row.batch_form == "map"]
            events = fields["events"] if fields.keys() >= {"ts", "events"} else NIL
        else:
            parts = array_items(payload, "the batch", limits.max_fields, "not-a-batch")
            rows = [row for row in _DIALECTS if row.batch_form == "array" and len(parts) == 2 + row.has_rank]
            events = parts[1] if len(parts) > 1 else NIL
        shapes: set[_EventShape] = set()
        for raw in array_items(events, "the list of events", limits.max_events, "too-many-events"):
            shape = _event_shape(raw)
            if shape in shapes:
                continue
            shapes.add(shape)
            rows = [row for row in rows if _matches(row, shape)]
            if not rows:
                return None
    except (DecodeRejectedError, *MSGPACK_ERRORS):
        return None
    return rows[0] if rows else None


def _event_shape(raw: msgspec.Raw) -> _EventShape:
    limit = DEFAULT_WIRE_LIMITS.max_fields
    if is_array(first_byte(raw)):
        items = array_items(raw, "the event", limit, "too-many-fields")
        # In every release the hashes are the first field, and the parent of a store is the second.
        tag, hashes = _decode_tag(items[0] if items else NIL), items[1:3] if len(items) > 5 else items[1:2]
        return _EventShape("array", tag, (), len(items) - 1, *_hash_signs(hashes))
    fields = map_items(raw, "the event", limit)
    tag = _decode_tag(fields.pop("type", NIL))
    fields.pop("heartbeat", None)
    signs = _hash_signs([fields.get(name, NIL) for name in _HASH_FIELDS])
    return _EventShape("map", tag, tuple(fields), 0, *signs, has_wide_header=first_byte(raw) == 0xDE and len(fields) < 15)


def _decode_tag(raw: msgspec.Raw) -> str:
    value = decode_scalar(raw, "the event type")
    return value if isinstance(value, str) else ""


def _hash_signs(raws: list[msgspec.Raw]) -> tuple[bool, bool]:
    """Return whether any hash is negative and whether any is 2**63 or above."""
    values: list[Any] = []
    for raw in raws:
        hashes = _decode_hashes(raw)
        values += hashes if isinstance(hashes, list) else [hashes]
    numbers = [value for value in values if type(value) is int]
    return min(numbers, default=0) < 0, max(numbers, default=0) >= 1 << 63


def _matches(row: Dialect, event: _EventShape) -> bool:
    """Return whether `row` could have sent this event, by its form, its fields and the sign of its hashes."""
    if event.tag in NEUTRAL_KINDS:
        return row.event_form == event.form  # no known release sends a neutral kind
    names = {"BlockStored": row.stored_fields, "BlockRemoved": row.removed_fields, "AllBlocksCleared": ()}.get(event.tag)
    has_foreign_hash = event.has_high_hash if row.has_signed_hashes else event.has_negative_hash
    if names is None or row.event_form != event.form or has_foreign_hash:
        return False
    if event.form == "array":
        return event.width == len(names)
    if event.has_wide_header and len(names) < 15:
        return False
    present = frozenset(event.names)
    return event.names == tuple(name for name in names if name in present or name not in row.optional_fields)
