"""How files of a journal are spelled: a header, then frames, each checked with what precedes it.

::

    header   magic 8, version u16, length u16, kind u8, zero u8, flags u16, ordinal u64, incarnation u64, first u64,
             previous u32, boot id 16, nonce 8, CRC-32 of all this u32
    frame    length of the body u32, kind u8, zeros 3, CRC-32 of these 8 bytes u32, CRC-32 of the body u32, body

All little-endian. Each CRC goes on from the one before it (a frame's from that of the frame before, the first one's from the
header's), so a frame that is missing, moved or of another file is found as surely as one with a flipped bit. A segment's header
repeats the last CRC of the segment before, so a file that lost its end is found too.

Where the newest segment ends is told by a file of its own, `end`, and not by its size, since a segment may be written over one
that is not needed any more, and then stale bytes follow::

    end      ordinal of the segment u64, bytes of it that were acknowledged u64, CRC-32 of these u32

It is written when a frame has been, and before it is acknowledged. So whatever is before that end must hold, and be there, or
it was damaged. Behind it a kill leaves a frame that holds, where it came between the two writes, or the beginning of one and
then stale bytes: the first that does not hold was never acknowledged, and is cut off. A stale frame that happens to begin where
a new one would does not hold, as its CRC goes on from another header's, with a nonce of its own. Where `end` does not hold, or
is of a segment before, because the kill came first, nothing but the header is known to be acknowledged.

`end` is not fsynced: a loss of power may leave an older one. That is known by the boot id, whatever the policy, and begins a
new incarnation.

All segments but the newest end where their files do, and are cut there before the next one is begun.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Sequence
from typing import BinaryIO, Final, NamedTuple
from zlib import crc32

from kvevents.relay.journal.limits import MAX_FRAME_BYTES

# As zlib's, much faster, and of pieces. Not imported by name: only the index may need it, and who has none has no relay.
crc32_of: Final[Callable[[Sequence[bytes], int], int]] = importlib.import_module("kvevents._native").crc32_of

MAGIC: Final = b"kvejrnl\n"
VERSION: Final = 1

SEGMENT: Final = 0
SNAPSHOT: Final = 1
KINDS: Final = {SEGMENT: "segment", SNAPSHOT: "snapshot"}
"""Of files, and how their names end."""

BEGINS: Final = 1
"""Flag of a segment that opens a life: nothing belongs before it."""
DETACHED: Final = 2
"""Flag of a segment that goes on behind a snapshot, but not behind the segment before it."""

_HEADER: Final = struct.Struct("<8sHHBxHQQQI16s8s")
_CRC: Final = struct.Struct("<I")
_ACKNOWLEDGED: Final = struct.Struct("<QQ")
_HEAD: Final = struct.Struct("<IB3x")
_CHECKS: Final = struct.Struct("<II")
HEADER_BYTES: Final = _HEADER.size + _CRC.size
HEAD_BYTES: Final = _HEAD.size + _CHECKS.size


class Header(NamedTuple):
    """How a file begins."""

    kind: int
    flags: int
    ordinal: int
    """Of the file, as in its name; of segments and snapshots together, in the order in which they were begun."""
    incarnation: int
    """Of the relay."""
    first: int
    """Number of the next batch when it was begun; of a snapshot, the number behind the last that it stands for."""
    previous: int
    """Last CRC of the segment before."""
    boot: bytes
    nonce: bytes

    def pack(self) -> tuple[bytes, int]:
        """Its bytes, and the CRC with which the first frame goes on."""
        data = _HEADER.pack(MAGIC, VERSION, HEADER_BYTES, *self)
        check = crc32(data)
        return data + _CRC.pack(check), check

    @classmethod
    def read(cls, file: BinaryIO) -> tuple[Header, int] | Torn | Damaged | Newer:
        """From the beginning of a file; with the CRC with which the first frame goes on."""
        try:
            data = file.read(HEADER_BYTES)
        except OSError as error:
            return Damaged(str(error))
        if len(data) < HEADER_BYTES:
            return Torn(len(data))
        _, version, _, *values = _HEADER.unpack_from(data)
        if data[: len(MAGIC)] == MAGIC and version > VERSION and _holds_whatever(data, file):
            return Newer(version)
        (check,) = _CRC.unpack_from(data, _HEADER.size)
        if not data.startswith(MAGIC) or version != VERSION or crc32(data[: _HEADER.size]) != check:
            return Damaged("its header does not hold")
        return cls(*values), check


class Torn(NamedTuple):
    """A header of which only the beginning was written."""

    size: int


class Damaged(NamedTuple):
    """A header that is none."""

    reason: str


class Newer(NamedTuple):
    """A header of a later release."""

    version: int


class Acknowledged(NamedTuple):
    """How much of which segment: what the file `end` holds."""

    ordinal: int
    end: int

    @staticmethod
    def pack(ordinal: int, end: int) -> bytes:
        """As bytes, of one that need not be made for it: each frame is followed by them."""
        data = _ACKNOWLEDGED.pack(ordinal, end)
        return data + _CRC.pack(crc32(data))

    @classmethod
    def unpack(cls, data: bytes) -> Acknowledged:
        """From such bytes; of none where they do not hold."""
        body, check = data[: _ACKNOWLEDGED.size], data[_ACKNOWLEDGED.size :]
        return cls(*_ACKNOWLEDGED.unpack(body)) if check == _CRC.pack(crc32(body)) else NOTHING


NOTHING: Final = Acknowledged(-1, 0)


def _holds_whatever(data: bytes, file: BinaryIO) -> bool:
    """Whether a header of another version is whole: its length stands where ours does, and its CRC at its end."""
    (length,) = struct.unpack_from("<H", data, len(MAGIC) + 2)
    data = (data + file.read(max(0, length - len(data))))[:length]
    return len(data) == length > _CRC.size and data.endswith(_CRC.pack(crc32(data[: -_CRC.size])))


def head_of(kind: int, body: Sequence[bytes], chain: int) -> tuple[bytes, int]:
    """The head of a frame behind one that ended with `chain`, and what this one ends with."""
    head = _HEAD.pack(sum(map(len, body)), kind)
    first = crc32(head, chain)
    second = crc32_of(body, first)
    return head + _CHECKS.pack(first, second), second


class Frames:
    """Iterates over the frames of a file, behind its header, as (kind, body); ends with the first that does not hold.

    What it found is in `torn` and `damage` then; `end` and `chain` are of the last frame that holds. What is short before
    `acknowledged` is damage; what does not hold behind that is none where the file may be `reused`.
    """

    def __init__(self, file: BinaryIO, chain: int, acknowledged: int = 0, *, reused: bool = False) -> None:
        self._file = file
        self._acknowledged = acknowledged
        self._reused = reused
        self.end = HEADER_BYTES
        self.chain = chain
        self.torn = 0
        """Bytes that a killed writer left of a frame; none of one whose head it did not finish in a reused file."""
        self.damage: str | None = None
        self._before = (self.end, chain)

    def refuse(self, reason: str) -> None:
        """The frame that came last is damage too."""
        self.end, self.chain = self._before
        self.damage = reason

    def __iter__(self) -> Frames:
        return self

    def __next__(self) -> tuple[int, bytes]:
        try:
            found = None if self.damage else self._next()
        except OSError as error:
            self.damage = f"it cannot be read: {error.strerror or error}"
            found = None
        if found is None:
            raise StopIteration
        return found

    def _next(self) -> tuple[int, bytes] | None:
        head = self._file.read(HEAD_BYTES)
        if len(head) < HEAD_BYTES:
            self._short(len(head))
            return None
        length, kind = _HEAD.unpack_from(head)
        first, second = _CHECKS.unpack_from(head, _HEAD.size)
        if crc32(head[: _HEAD.size], self.chain) != first or length > MAX_FRAME_BYTES:
            self._broken(f"the head of the frame at byte {self.end} does not hold", 0)
            return None
        body = self._file.read(length)
        if len(body) < length:
            self._short(HEAD_BYTES + len(body))
            return None
        if crc32_of((body,), first) != second:
            self._broken(f"the frame at byte {self.end} does not hold", HEAD_BYTES + length)
            return None
        self._before = (self.end, self.chain)
        self.end += HEAD_BYTES + length
        self.chain = second
        return kind, body

    def _short(self, size: int) -> None:
        if self.end < self._acknowledged:
            self.damage = f"it ends at byte {self.end + size}, and was written up to {self._acknowledged}"
        else:
            self.torn = size

    def _broken(self, what: str, size: int) -> None:
        if self._reused and self.end >= self._acknowledged:
            self.torn = size
        else:
            self.damage = what
