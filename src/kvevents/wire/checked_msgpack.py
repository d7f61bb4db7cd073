"""Reads msgpack from peers: limits of the input, records of rejected input, and undecoded values.

The functions read what the first bytes of a value declare, and split containers without reading their contents. No function
allocates memory by a declared length, recurses to a depth that a peer chooses, or builds a dict with keys other than strings.
msgpack permits arrays of integers as keys. A peer can choose arrays that all have the same hash, and to build a dict of such
keys takes quadratic time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec import Struct


class WireLimits(Struct, frozen=True):
    """Limits on one payload. A part that exceeds a limit is rejected with a reason; nothing is raised.

    Counts are read from the declared lengths, before anything is allocated.
    """

    max_payload_bytes: int = 32 * 1024 * 1024
    """Maximum size of a payload in bytes. A batch that stores one prompt of a million tokens has about 5 MiB. When decoded, a
    payload that consists of token ids takes about 13 times its size in memory."""
    max_events: int = 1_000_000
    """Maximum number of events in one batch. A reset by single removals can have 100,000 events."""
    max_hashes: int = 1_000_000
    """Maximum number of block hashes in one event: 16 million tokens at the smallest common block size."""
    max_fields: int = 256
    """Maximum number of fields of an event, or of elements of a batch. Engines send up to 16 fields. A decoded unknown field
    takes 100 times its size in memory."""
    max_free_form_bytes: int = 4 * 1024 * 1024
    """Maximum number of bytes in the parts of a batch that have no fixed form: `extra_keys` and unknown fields. Empty lists
    take 140 times their size while they are decoded. Extra keys for a million tokens with a LoRA have about 2 MiB."""
    max_nesting: int = 8
    """Maximum depth of containers; the event itself is level 1. Engines reach depth 4 (with multimodal `extra_keys`)."""
    max_rejected: int = 1_000
    """Maximum number of rejected events in a batch. If more events are rejected, the whole batch is rejected."""


DEFAULT_WIRE_LIMITS: Final = WireLimits()

_BASE_STEPS: Final = 4_000
_BYTES_PER_STEP: Final = 12
"""Decoding may take `_BASE_STEPS`, and one more step for each 12 bytes. A step takes about a microsecond, so a payload of 1 MB
takes at most 90 ms. Payloads of engines take a tenth of the maximum time."""

MAX_FAST_BYTES: Final = 1024 * 1024
"""Maximum number of bytes of a payload for the fast decoder, which is one native call and allocates without checking lengths: 1
MiB of empty lists becomes 70 MiB. Larger payloads go to the tolerant decoder, which checks every length."""
MAX_FAST_LIST_BYTES: Final = 256 * 1024
"""Maximum size in bytes of a payload with lists of lists for the fast decoder, which takes 70 ms for 256 KiB of such lists."""
MAX_NONRECURSIVE_BYTES: Final = 1024 * 1024
"""Maximum number of bytes of a container that is nested too deeply for msgspec and is split in Python (0.2 us per byte)."""

MAX_SEQ: Final = 1 << 48
"""Sequence numbers of at least 2**48 are malformed. A stream of 1,000 batches a second reaches 2**48 in 8,900 years. Without
the limit, one corrupt frame (2**63) would make every later number of the stream count as old."""


MAX_RAW_BYTES: Final = 256
"""Maximum number of bytes of the rejected input that a record holds, for diagnosis."""
_MAX_DETAIL_CHARACTERS: Final = 256
"""Maximum number of characters of `Rejected.detail`. The limit is needed because a peer can choose parts of the text."""


class Rejected(msgspec.Struct, frozen=True):
    """Input that was rejected, and why. `reason` is one of a few fixed words, for counting; `detail` is for people."""

    reason: str
    """One of: oversized, malformed, not-a-batch, too-many-events, too-many-hashes, too-many-fields, too-deep, too-complex,
    too-many-rejected, unknown-tag, bad-field, bad-timestamp, bad-rank."""
    detail: str
    index: int | None = None
    """Position of the event in its batch; None for the batch itself, its timestamp or its rank."""
    raw: bytes = b""
    """The first bytes of the rejected input."""
    count: int = 1
    """Number of rejections that this record represents."""

    @property
    def loses_events(self) -> bool:
        """Whether this rejection loses events. A batch with an invalid timestamp or rank keeps all its events."""
        return self.index is not None or self.reason not in {"bad-timestamp", "bad-rank"}


class DecodeRejectedError(Exception):
    """The exception for rejected input inside `kvevents.wire`; `decode_batch` returns such input as `Rejected`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason

    def to_record(self, raw: bytes | memoryview | msgspec.Raw, index: int | None = None) -> Rejected:
        """Return the record of this rejection."""
        return Rejected(self.reason, str(self)[:_MAX_DETAIL_CHARACTERS], index, bytes(memoryview(raw)[:MAX_RAW_BYTES]))


class BatchRejectedError(DecodeRejectedError):
    """The exception inside `kvevents.wire` for a batch that is rejected as a whole because of its events."""


class DecodeBudget:
    """Limits the cost of one batch: the bytes of its fields of free form, and the steps of reading it."""

    def __init__(self, max_bytes: int, payload_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes_left = max_bytes
        self._steps_left = _BASE_STEPS + payload_bytes // _BYTES_PER_STEP

    def take_steps(self, count: int) -> None:
        """Count steps. Raise `BatchRejectedError` if the batch then exceeds its limit of steps."""
        self._steps_left -= count
        if self._steps_left < 0:
            raise BatchRejectedError("too-complex", "the batch takes more steps to read than its size allows")

    def take_bytes(self, name: str, size: int) -> None:
        """Count `size` bytes of the field `name`. Raise `DecodeRejectedError` if the batch has fewer bytes left."""
        if size > self._bytes_left:
            sentence = f"{name} has {size} bytes; the limit max_free_form_bytes of a batch is {self._max_bytes}"
            raise DecodeRejectedError("oversized", sentence)
        self._bytes_left -= size


MSGPACK_ERRORS: Final = (ValueError, RecursionError, OverflowError)
"""The types of all exceptions that msgspec raises for the bytes of a peer. msgspec's own errors derive from `ValueError`, as do
the errors for text that is not UTF-8 and for times after the year 9999."""
NIL: Final = msgspec.Raw(b"\xc0")
_NIL_BYTE: Final = 0xC0
_LENGTH_BYTES: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}

_decode_raw_scalar: Final = msgspec.msgpack.Decoder(bool | int | float | str | None).decode
_decode_any: Final = msgspec.msgpack.Decoder().decode
_decode_list: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_map: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_decode_scalars: Final = msgspec.msgpack.Decoder(list[bool | int | float | str | None]).decode


def first_byte(raw: msgspec.Raw) -> int:
    """Return the first byte, which determines the type; if `raw` is empty, return the byte of nil."""
    view = memoryview(raw)
    return view[0] if view else _NIL_BYTE


def is_nil(raw: msgspec.Raw) -> bool:
    """Whether a value is nil or empty."""
    return first_byte(raw) == _NIL_BYTE


def is_array(head: int) -> bool:
    """Whether a value that starts with the byte `head` is an array."""
    return head & 0xF0 == 0x90 or 0xDC <= head <= 0xDD


def is_map(head: int) -> bool:
    """Whether a value that starts with the byte `head` is a map."""
    return head & 0xF0 == 0x80 or 0xDE <= head <= 0xDF


def is_bin(head: int) -> bool:
    """Whether a value that starts with the byte `head` is a bin."""
    return 0xC4 <= head <= 0xC6


def decode_scalar(raw: msgspec.Raw, subject: str) -> bool | int | float | str | None:
    """Decode a value that is neither a container nor a bin. Raise `DecodeRejectedError`, which calls the value `subject`."""
    try:
        value: bool | int | float | str | None = _decode_raw_scalar(raw)
    except MSGPACK_ERRORS as error:
        raise rejection_of(error, subject) from error
    return value


def rejection_of(error: Exception, subject: str) -> DecodeRejectedError:
    """Convert an error that msgspec raised when it read `subject`."""
    if isinstance(error, RecursionError):
        return DecodeRejectedError("too-deep", f"{subject} is nested deeper than the limit max_nesting")
    is_undecodable = isinstance(error, msgspec.DecodeError | UnicodeDecodeError)
    reason = "malformed" if is_undecodable and not isinstance(error, msgspec.ValidationError) else "bad-field"
    return DecodeRejectedError(reason, f"{subject}: {error}")


def length_bytes(head: int) -> int:
    """Return the size of the length field after the first byte of an array or a map."""
    return _LENGTH_BYTES.get(head, 0)


def declared_length(raw: memoryview) -> int:
    """Return the number of elements that an array declares, or of pairs that a map declares; 0 for any other value."""
    head = raw[0] if raw else _NIL_BYTE
    return head & 0x0F if head & 0xE0 == 0x80 else int.from_bytes(raw[1 : 1 + length_bytes(head)], "big")


def array_items(raw: bytes | memoryview | msgspec.Raw, subject: str, limit: int, too_many: str) -> list[msgspec.Raw]:
    """Return the raw elements of an array; more than `limit` raise `DecodeRejectedError` with the reason `too_many`."""
    view = memoryview(raw)
    _check_length(view, subject, limit, too_many)
    try:
        return _decode_list(view)
    except RecursionError as error:
        if len(view) > MAX_NONRECURSIVE_BYTES or not is_array(view[0]):
            raise rejection_of(error, subject) from error
        return _split_nonrecursive(view, subject)
    except MSGPACK_ERRORS as error:
        raise rejection_of(error, subject) from error


def map_items(raw: bytes | memoryview | msgspec.Raw, subject: str, limit: int) -> dict[str, msgspec.Raw]:
    """Return the raw values of a map by name; if a name occurs twice, its last value counts. Raise `DecodeRejectedError`."""
    view = memoryview(raw)
    _check_length(view, subject, limit, "too-many-fields")
    try:
        return _decode_map(view)
    except RecursionError as error:
        if len(view) > MAX_NONRECURSIVE_BYTES or not is_map(view[0]):
            raise rejection_of(error, subject) from error
        parts = iter(_split_nonrecursive(view, subject))
        return {_decode_name(part, subject): next(parts) for part in parts}
    except MSGPACK_ERRORS as error:
        raise rejection_of(error, subject) from error


def _check_length(view: memoryview, subject: str, limit: int, reason: str) -> None:
    count = declared_length(view)
    if count > limit:
        raise DecodeRejectedError(reason, f"{subject} has {count} elements; the limit is {limit}")


def _decode_name(raw: msgspec.Raw, subject: str) -> str:
    name = decode_scalar(raw, subject)
    if not isinstance(name, str):
        raise DecodeRejectedError("bad-field", f"{subject} has a key that is not a string")
    return name


def to_python(raw: msgspec.Raw, subject: str, depth: int, take_steps: Callable[[int], None]) -> Any:
    """Decode a value of free form with at most `depth` levels of containers. Raise `DecodeRejectedError`.

    `take_steps` is called for each value whose decoding takes steps.
    """
    view = memoryview(raw)
    take_steps(2)
    try:
        if not is_array(view[0]) and not is_map(view[0]):
            return _decode_any(view)
        if depth <= 0:
            raise DecodeRejectedError("too-deep", f"{subject} is nested deeper than the limit max_nesting")
        if is_map(view[0]):
            return {name: to_python(value, subject, depth - 1, take_steps) for name, value in _decode_map(view).items()}
        try:
            return _decode_scalars(view)
        except msgspec.ValidationError:
            take_steps(declared_length(view) // 8)
            return [to_python(item, subject, depth - 1, take_steps) for item in _decode_list(view)]
    except MSGPACK_ERRORS as error:
        raise rejection_of(error, subject) from error


# --- splitting without recursion -------------------------------------------------------------------------------------------


def _layout_by_first_byte() -> list[tuple[int, int, int]]:
    """Return for each first byte: number of bytes to skip, width of the length field, number of values per unit of length."""
    layout = [(0, 0, 0)] * 256  # small integers, nil and booleans
    layout[0x80:0xA0] = [(0, 0, 2 * length) for length in range(16)] + [(0, 0, length) for length in range(16)]  # maps, arrays
    layout[0xA0:0xC0] = [(length, 0, 0) for length in range(32)]  # strings
    layout[0xC4:0xC7] = layout[0xD9:0xDC] = [(0, width, 0) for width in (1, 2, 4)]  # bins and strings
    layout[0xC7:0xCA] = [(1, width, 0) for width in (1, 2, 4)]  # extensions
    layout[0xCA:0xD4] = [(size, 0, 0) for size in (4, 8, 1, 2, 4, 8, 1, 2, 4, 8)]  # floats, unsigned and signed integers
    layout[0xD4:0xD9] = [(1 + (1 << power), 0, 0) for power in range(5)]  # extensions of a fixed size
    layout[0xDC:0xE0] = [(0, 2, 1), (0, 4, 1), (0, 2, 2), (0, 4, 2)]  # arrays, maps
    return layout


_LAYOUT: Final = _layout_by_first_byte()


def skip_value(data: bytes, position: int) -> int:
    """Return where the value that starts at `position` ends.

    Raise `IndexError` if the value continues after the end of `data`, unless only its last string is truncated.
    """
    values_left = 1
    while values_left:
        skip, width, inside = _LAYOUT[data[position]]
        position += 1
        values_left -= 1
        if not width:
            position += skip
            values_left += inside
            continue
        length = int.from_bytes(data[position : position + width], "big")
        position += width + skip
        if inside:
            values_left += inside * length
        else:
            position += length
    return position


def _split_nonrecursive(view: memoryview, subject: str) -> list[msgspec.Raw]:
    """Return the elements of an array, or the keys and values of a map, however deeply nested they are."""
    data = bytes(view)
    count = declared_length(view) * (2 if is_map(data[0]) else 1)
    position, parts = 1 + length_bytes(data[0]), []
    try:
        for _ in range(count):
            end = skip_value(data, position)
            parts.append(msgspec.Raw(view[position:end]))
            position = end
    except IndexError as error:
        raise DecodeRejectedError("malformed", f"{subject} is truncated") from error
    return parts
