"""What a journal records, and how that is spelled inside of a frame.

The body of a burst is columns rather than rows, so that one call packs all of its batches.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, pairwise
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec

from kvevents.errors import UsageError
from kvevents.relay.journal.limits import MAX_BURST, MAX_FRAME_BYTES, MAX_MARK_BYTES, TAIL_BURST, TAIL_BURST_BYTES

BURST: Final = 1
MARK: Final = 2
HOLE: Final = 3
RESET: Final = 4
STANDING: Final = 5
CLOSED: Final = 6
PART: Final = 7
END: Final = 8

Positions: TypeAlias = dict[int, tuple[int, int]]
"""By ordinal of an upstream: its incarnation, and the number of its newest batch in that; -1 before the first."""
Mark: TypeAlias = Mapping[str, Any]
Columns: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int], Sequence[bytes]]
"""Of a burst: numbers, ordinals of upstreams, their incarnations, their numbers, payloads."""


class Relayed(NamedTuple):
    """A batch as it is sent under the relay's own number, and which batch of which upstream it is."""

    number: int
    """From 0, without gaps but for holes."""
    upstream: int
    """Its ordinal, below 65,536."""
    incarnation: int
    """Of the upstream."""
    seq: int
    """The upstream's number."""
    payload: bytes


class Hole(NamedTuple):
    """Numbers that no batch has: consumers see them as lost."""

    first: int
    last: int


class UpstreamReset(NamedTuple):
    """An upstream began a new life, when `after` was the newest number; -1 before the first."""

    after: int
    upstream: int
    incarnation: int


Record: TypeAlias = Relayed | Hole | UpstreamReset
Frame: TypeAlias = tuple[int, Sequence[bytes]]
"""Its kind, and the pieces of its body."""


class Standing(msgspec.Struct, frozen=True):
    """What a segment takes over from those before it, so that they can go."""

    mark: dict[str, Any] | None
    positions: Positions


class End(NamedTuple):
    """The last frame of a snapshot: without it, it is none."""

    number: int
    partial: bool
    parts: int


class Burst(NamedTuple):
    """A burst without its payloads, column by column."""

    first: int
    upstreams: tuple[int, ...]
    incarnations: tuple[int, ...]
    seqs: tuple[int, ...]
    lengths: tuple[int, ...]
    begin: int
    """Where its payloads begin."""

    @property
    def last(self) -> int:
        """Its highest number."""
        return self.first + len(self.lengths) - 1


_BURST: Final = struct.Struct("<QI")
MAX_PAYLOADS_BYTES: Final = MAX_FRAME_BYTES - _BURST.size - MAX_BURST * struct.calcsize("<HQQI")
"""Of all payloads of a burst."""
_HOLE: Final = struct.Struct("<QQ")
_RESET: Final = struct.Struct("<qHQ")
_END: Final = struct.Struct("<q?I")
END_BYTES: Final = _END.size
_encode: Final = msgspec.msgpack.encode
_STANDING: Final = msgspec.msgpack.Decoder(Standing)
_MARK: Final = msgspec.msgpack.Decoder(dict[str, Any])


@lru_cache(maxsize=MAX_BURST)
def _columns(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}H{count}Q{count}Q{count}I")


def pack_burst(columns: Columns, first: int) -> tuple[bytes, ...]:
    """Of 1 to `MAX_BURST` batches numbered from `first`, in pieces: payloads are not copied.

    Raises `struct.error` for a number that has no room.
    """
    _, upstreams, incarnations, seqs, payloads = columns
    count = len(payloads)
    table = _columns(count).pack(*upstreams, *incarnations, *seqs, *map(len, payloads))
    return (_BURST.pack(first, count) + table, *payloads)


def unpack_burst(body: bytes) -> Burst:
    """The columns of a burst. Raises `ValueError` where they do not make up the body."""
    first, count = _BURST.unpack_from(body)
    columns = _columns(count)
    values = columns.unpack_from(body, _BURST.size)
    lengths, begin = values[3 * count :], _BURST.size + columns.size
    if begin + sum(lengths) != len(body):
        raise ValueError("the lengths of its payloads are not that of the burst")
    return Burst(first, values[:count], values[count : 2 * count], values[2 * count : 3 * count], lengths, begin)


def relayed(body: bytes, above: int) -> Iterator[Relayed]:
    """The batches of a burst that are numbered above `above`."""
    burst = unpack_burst(body)
    bounds = pairwise(accumulate(chain((burst.begin,), burst.lengths)))
    rows = zip(burst.upstreams, burst.incarnations, burst.seqs, bounds, strict=True)
    for number, (upstream, incarnation, seq, (begin, end)) in enumerate(rows, burst.first):
        if number > above:
            yield Relayed(number, upstream, incarnation, seq, body[begin:end])


def pack_hole(hole: Hole) -> bytes:
    """As the body of a frame."""
    return _HOLE.pack(*hole)


def unpack_hole(body: bytes) -> Hole:
    """What `pack_hole` made."""
    return Hole(*_HOLE.unpack(body))


def pack_reset(reset: UpstreamReset) -> bytes:
    """As the body of a frame."""
    return _RESET.pack(*reset)


def unpack_reset(body: bytes) -> UpstreamReset:
    """What `pack_reset` made."""
    return UpstreamReset(*_RESET.unpack(body))


def pack_end(end: End) -> bytes:
    """As the body of a frame."""
    return _END.pack(*end)


def unpack_end(body: bytes) -> End:
    """What `pack_end` made."""
    return End(*_END.unpack(body))


def pack_mark(mark: Mark) -> bytes:
    """As the body of a frame. Raises `UsageError` for one that is too large, or cannot be encoded."""
    try:
        body = _encode(dict(mark))
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"a mark holds what msgpack has no bytes for: {error}") from error
    if len(body) > MAX_MARK_BYTES:
        raise UsageError(f"a mark takes {len(body)} bytes, and may take {MAX_MARK_BYTES}; keep what is large elsewhere")
    return body


def unpack_mark(body: bytes) -> dict[str, Any]:
    """What `pack_mark` made."""
    return _MARK.decode(body)


def pack_standing(standing: Standing) -> bytes:
    """As the body of a frame."""
    return _encode(standing)


def unpack_standing(body: bytes) -> Standing:
    """What `pack_standing` made."""
    return _STANDING.decode(body)


def frames_of(records: Iterable[Record]) -> Iterator[Frame]:
    """Records as frames, batches in bursts."""
    run: list[Relayed] = []
    size = 0
    for record in records:
        single = _SINGLE.get(type(record))
        if run and (single or len(run) == TAIL_BURST or size > TAIL_BURST_BYTES):
            yield _burst_of(run)
            run, size = [], 0
        if single:
            yield single(record)
        else:
            run.append(cast("Relayed", record))
            size += len(run[-1][4])
    if run:
        yield _burst_of(run)


def _burst_of(run: list[Relayed]) -> Frame:
    return BURST, pack_burst(cast("Columns", tuple(zip(*run, strict=True))), run[0][0])


_SINGLE: Final[dict[type, Callable[[Any], Frame]]] = {
    Hole: lambda hole: (HOLE, (pack_hole(hole),)),
    UpstreamReset: lambda reset: (RESET, (pack_reset(reset),)),
}
