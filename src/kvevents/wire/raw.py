"""Undecoded msgpack: what its first bytes declare, and how to cut it into parts without reading them.

Nothing here allocates by what a peer declares, recurses by what a peer nests, or makes dict keys of anything but strings.
Arrays of integers, which msgpack permits as keys, can be picked to share one hash, and a map of them takes quadratic time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvevents.wire.limits import SKIM_BYTES
from kvevents.wire.rejected import RefusedError

REFUSED: Final = (ValueError, RecursionError, OverflowError)
"""Everything that msgspec raises for the bytes of a peer. Its own errors are a `ValueError`, as are those for text that is not
UTF-8 and for times after the year 9999."""
NIL: Final = msgspec.Raw(b"\xc0")

_decode_scalar: Final = msgspec.msgpack.Decoder(bool | int | float | str | None).decode
_decode_any: Final = msgspec.msgpack.Decoder().decode
_decode_list: Final = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_map: Final = msgspec.msgpack.Decoder(dict[str, msgspec.Raw]).decode
_decode_scalars: Final = msgspec.msgpack.Decoder(list[bool | int | float | str | None]).decode


def head_of(raw: msgspec.Raw) -> int:
    """The first byte, which tells the type; that of nil for no bytes at all."""
    view = memoryview(raw)
    return view[0] if view else 0xC0


def scalar(raw: msgspec.Raw, what: str) -> bool | int | float | str | None:
    """A value that is no container and no bin. Raises `RefusedError`."""
    try:
        found: bool | int | float | str | None = _decode_scalar(raw)
    except REFUSED as error:
        raise refusal_of(error, what) from error
    return found


def refusal_of(error: Exception, what: str) -> RefusedError:
    """Why msgspec refused `what`, in our words."""
    if isinstance(error, RecursionError):
        return RefusedError("too-deep", f"{what} is nested deeper than the limit max_nesting")
    is_malformed = isinstance(error, msgspec.DecodeError | UnicodeDecodeError) and not isinstance(
        error, msgspec.ValidationError
    )
    reason = "malformed" if is_malformed else "bad-field"
    return RefusedError(reason, f"{what}: {error}")


def is_array(head: int) -> bool:
    """Whether a value that starts with the byte `head` is an array."""
    return head & 0xF0 == 0x90 or 0xDC <= head <= 0xDD


def is_map(head: int) -> bool:
    """Whether a value that starts with the byte `head` is a map."""
    return head & 0xF0 == 0x80 or 0xDE <= head <= 0xDF


def is_bin(head: int) -> bool:
    """Whether a value that starts with the byte `head` is a bin."""
    return 0xC4 <= head <= 0xC6


def declared(raw: memoryview) -> int:
    """Elements that an array, or pairs that a map declares to hold; 0 of anything else."""
    head = raw[0] if raw else 0xC0
    if head & 0xE0 == 0x80:
        return head & 0x0F
    if 0xDC <= head <= 0xDF:
        return int.from_bytes(raw[1 : 3 if head in (0xDC, 0xDE) else 5], "big")
    return 0


def elements(raw: bytes | memoryview | msgspec.Raw, what: str, limit: int, too_many: str) -> list[msgspec.Raw]:
    """The elements of an array, undecoded. Raises `RefusedError`, with the reason `too_many` above `limit`."""
    view = memoryview(raw)
    _bound(view, what, limit, too_many)
    try:
        return _decode_list(view)
    except RecursionError as error:
        if len(view) > SKIM_BYTES or not is_array(view[0]):
            raise refusal_of(error, what) from error
        return _skimmed(view, what)
    except REFUSED as error:
        raise refusal_of(error, what) from error


def pairs(raw: bytes | memoryview | msgspec.Raw, what: str, limit: int) -> dict[str, msgspec.Raw]:
    """The values of a map by their names, undecoded; of equal names the last. Raises `RefusedError`."""
    view = memoryview(raw)
    _bound(view, what, limit, "too-many-fields")
    try:
        return _decode_map(view)
    except RecursionError as error:
        if len(view) > SKIM_BYTES or not is_map(view[0]):
            raise refusal_of(error, what) from error
        parts = iter(_skimmed(view, what))
        return {_name(part, what): next(parts) for part in parts}
    except REFUSED as error:
        raise refusal_of(error, what) from error


def _bound(view: memoryview, what: str, limit: int, reason: str) -> None:
    count = declared(view)
    if count > limit:
        raise RefusedError(reason, f"{what} has {count} elements; the limit is {limit}")


def _name(raw: msgspec.Raw, what: str) -> str:
    name = scalar(raw, what)
    if not isinstance(name, str):
        raise RefusedError("bad-field", f"{what} has a key that is no string")
    return name


def plain(raw: msgspec.Raw, what: str, depth: int, enter: Callable[[str], None]) -> Any:
    """A value of free form as Python has it, with at most `depth` levels of containers. Raises `RefusedError`.

    `enter` is told `what` for each container.
    """
    view = memoryview(raw)
    try:
        if not is_array(view[0]) and not is_map(view[0]):
            return _decode_any(view)
        if depth <= 0:
            raise RefusedError("too-deep", f"{what} is nested deeper than the limit max_nesting")
        enter(what)
        if is_map(view[0]):
            return {name: plain(value, what, depth - 1, enter) for name, value in _decode_map(view).items()}
        return _list(view, what, depth, enter)
    except REFUSED as error:
        raise refusal_of(error, what) from error


def _list(view: memoryview, what: str, depth: int, enter: Callable[[str], None]) -> list[Any]:
    try:
        return _decode_scalars(view)
    except msgspec.ValidationError:
        return [plain(item, what, depth - 1, enter) for item in _decode_list(view)]


# --- without recursion -----------------------------------------------------------------------------------------------------


def _head_sizes() -> list[tuple[int, int, int]]:
    """By first byte: bytes to skip, bytes of a length field behind it, values inside per unit of length or in all."""
    sizes = [(0, 0, 0)] * 256
    for low in range(16):
        sizes[0x80 + low] = (0, 0, 2 * low)
        sizes[0x90 + low] = (0, 0, low)
    for low in range(32):
        sizes[0xA0 + low] = (low, 0, 0)
    fixed = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    fixed |= {0xD4 + power: 1 + (1 << power) for power in range(5)}
    sized = {0xC4: (0, 1), 0xC5: (0, 2), 0xC6: (0, 4), 0xC7: (1, 1), 0xC8: (1, 2), 0xC9: (1, 4), 0xD9: (0, 1), 0xDA: (0, 2)}
    sized |= {0xDB: (0, 4)}
    for head, size in fixed.items():
        sizes[head] = (size, 0, 0)
    for head, (more, width) in sized.items():
        sizes[head] = (more, width, 0)
    for head, width, inside in ((0xDC, 2, 1), (0xDD, 4, 1), (0xDE, 2, 2), (0xDF, 4, 2)):
        sizes[head] = (0, width, inside)
    return sizes


_SIZES: Final = _head_sizes()


def end_of(data: bytes, at: int) -> int:
    """Where the value that starts at `at` ends. IndexError past the end of `data`, unless only its last string is cut."""
    pending = 1
    while pending:
        skip, width, inside = _SIZES[data[at]]
        at += 1
        pending -= 1
        if not width:
            at += skip
            pending += inside
            continue
        length = int.from_bytes(data[at : at + width], "big")
        at += width + skip
        if inside:
            pending += inside * length
        else:
            at += length
    return at


def _skimmed(view: memoryview, what: str) -> list[msgspec.Raw]:
    """Elements of an array, or keys and values of a map, however deep they are nested."""
    data = bytes(view)
    width = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}.get(data[0], 0)
    count = declared(view) * (2 if is_map(data[0]) else 1)
    at, parts = 1 + width, []
    try:
        for _ in range(count):
            end = end_of(data, at)
            parts.append(msgspec.Raw(view[at:end]))
            at = end
    except IndexError as error:
        raise RefusedError("malformed", f"{what} is truncated") from error
    return parts
