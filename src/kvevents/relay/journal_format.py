"""The format of a journal's files: a header, then frames. The CRC of a frame covers everything before the frame, too.

::

    header  magic 8, version u16, length u16, kind u8, zero u8, generation u64, incarnation u64, first u64, boot id 16,
            CRC-32 of all this u32
    state   u8, then committed u64, CRC-32 of committed u32
    frame   length of the body u32, CRC-32 of length and body u32, body: a record as MessagePack

All integers are little-endian. Each CRC continues from the CRC of the previous frame, or of the header. So a missing, moved or
foreign frame is detected like a flipped bit.

Only *state* and *committed* are ever overwritten. `committed` is the number of valid bytes. The committed size is written after
the frames, and before the frames are acknowledged. If fewer bytes exist or any is invalid, the file is damaged. Further bytes
belong to a write that was not acknowledged, and are ignored. The state says whether `committed` covers everything that was
sent:

- OPEN while the log is written,
- CLOSED after an orderly end,
- CONTINUED if a later log exists,
- BROKEN, or any other value, if the disk failed to record the newest batches that were sent.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO, Final, NamedTuple, TypeAlias
from zlib import crc32

import msgspec

from kvevents.relay.journal_disk import TEMPORARY_SUFFIX, UNKNOWN_BOOT_ID, Disk, Folder

MAGIC: Final = b"kvejrnl\n"
VERSION: Final = 2
LOG: Final = 0
SNAPSHOT: Final = 1
SUFFIXES: Final = {LOG: "log", SNAPSHOT: "snapshot"}
"""Maps each kind of file to the suffix of its name."""
OPEN_STATE: Final = b"\x55"
CLOSED_STATE: Final = b"\xaa"
CONTINUED_STATE: Final = b"\x33"
BROKEN_STATE: Final = b"\x00"

_PROLOGUE: Final = struct.Struct("<8sHH")
_HEADER: Final = struct.Struct("<8sHHBxQQQ16s")
_CRC: Final = struct.Struct("<I")
_COMMITTED: Final = struct.Struct("<Q")
_FRAME: Final = struct.Struct("<II")
_LENGTH: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size
STATE_OFFSET: Final = HEADER_BYTES
COMMITTED_OFFSET: Final = STATE_OFFSET + 1
FRAMES_OFFSET: Final = COMMITTED_OFFSET + _COMMITTED.size + _CRC.size

Positions: TypeAlias = dict[int, tuple[int, int]]
"""Maps the ordinal of an upstream to its incarnation and its newest sequence number (-1 before the first batch)."""


class ForwardedBatch(NamedTuple):
    """A batch with the relay's number, and the identity of the upstream batch from which the relay made it."""

    number: int
    upstream: int
    """Ordinal of the upstream."""
    incarnation: int
    """Incarnation of the upstream."""
    seq: int
    """The upstream's sequence number."""
    payload: bytes


class Origin(NamedTuple):
    """Identifies the upstream batch from which the relay made batches with other bytes."""

    incarnation: int
    seq: int
    digest: bytes
    """SHA-256 of the upstream batch's payload."""


class SkippedNumbers(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Sequence numbers without a batch, from `first` to `last`. Consumers count them as lost."""

    first: int
    last: int


class Batches(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Batches with consecutive numbers from `first` on, as columns: each list has one entry for each batch."""

    first: int
    upstreams: list[int]
    """Ordinals of the upstreams."""
    incarnations: list[int]
    """Incarnations of the upstreams."""
    seqs: list[int]
    """The upstreams' sequence numbers."""
    payloads: list[bytes]

    def positions(self) -> Positions:
        """Return, for each upstream, the position of its newest batch in this record."""
        return dict(zip(self.upstreams, zip(self.incarnations, self.seqs, strict=True), strict=True))

    def rows(self) -> Iterator[ForwardedBatch]:
        """Return the batches one by one."""
        numbers = range(self.first, self.first + len(self.payloads))
        return map(ForwardedBatch, numbers, self.upstreams, self.incarnations, self.seqs, self.payloads)


class UpstreamReset(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """An upstream began a new incarnation."""

    upstream: int
    incarnation: int


class CheckpointSet(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The relay's newest checkpoint, encoded by the relay. The record replaces the previous checkpoint."""

    checkpoint: bytes


class OriginSet(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The origin of the batches that follow in the journal. The record replaces the previous origin of the same upstream."""

    upstream: int
    origin: Origin


class SnapshotPart(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A piece of the state in a snapshot."""

    payload: bytes


class SnapshotHead(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Head of a snapshot, whose state is the one after batch `number`; -1 if the snapshot has no state."""

    number: int
    is_partial: bool
    """Whether the state might lack live blocks."""


class EndState(msgspec.Struct, array_like=True, tag=8):
    """The state after all batches; the last record of a snapshot."""

    next_number: int
    checkpoint: bytes | None
    positions: Positions
    origins: dict[int, Origin]


JournalRecord: TypeAlias = (
    SkippedNumbers | Batches | UpstreamReset | CheckpointSet | OriginSet | SnapshotPart | SnapshotHead | EndState
)


_decode: Final = msgspec.msgpack.Decoder(JournalRecord).decode
_encode: Final = msgspec.msgpack.Encoder().encode


class DamagedError(Exception):
    """The content of a file differs from the content that was written. The message describes the damage."""


class Header(NamedTuple):
    """The header and the state at the beginning of a file."""

    kind: int
    """`LOG` or `SNAPSHOT`."""
    generation: int
    """Number of the file. A snapshot has the number of the log that continues it."""
    incarnation: int
    """Incarnation of the relay."""
    first: int
    """Number of the next batch when the file was begun."""
    boot_id: bytes = UNKNOWN_BOOT_ID
    """Id of the machine's boot during which the file was begun."""
    crc: int = 0
    """CRC-32 of the header, from which the CRC of the first frame continues."""
    state: bytes = BROKEN_STATE
    committed: int = 0
    version: int = VERSION

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"{self.generation:016}.{SUFFIXES[self.kind]}"


class FileWriter:
    """Writes a file from its beginning. Frames are valid only after `commit`. Raises `OSError`."""

    def __init__(self, disk: Disk, folder: Folder, name: str, header: Header) -> None:
        self._disk, self._folder, self._name = disk, folder, name
        data = _HEADER.pack(MAGIC, VERSION, HEADER_BYTES, *header[:4], disk.boot_id())
        self._check = crc32(data)
        self.header: Final = header
        self.size = FRAMES_OFFSET
        self.fd: Final = disk.create(name, folder.fd)
        try:
            disk.write(self.fd, (data, _CRC.pack(self._check), header.state, _encode_committed(FRAMES_OFFSET)))
        except BaseException:
            self.discard()
            raise

    def append(self, record: JournalRecord) -> None:
        """Write one frame."""
        body = _encode(record)
        length = _LENGTH.pack(len(body))
        self._check = crc32(body, crc32(length, self._check))
        self._disk.write(self.fd, (length, _CRC.pack(self._check), body))
        self.size += _FRAME.size + len(body)

    def commit(self) -> None:
        """Commit all appended frames: write the new value of `committed`."""
        self._disk.overwrite(self.fd, COMMITTED_OFFSET, _encode_committed(self.size))

    def set_state(self, state: bytes) -> None:
        """Overwrite the state."""
        self._disk.overwrite(self.fd, STATE_OFFSET, state)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # the file's content was committed before, or is not needed
            os.close(self.fd)

    def discard(self) -> None:
        """Close the file, and remove it unless it was renamed."""
        self.close()
        with suppress(OSError):
            self._disk.remove(self._name, self._folder.fd)


def _encode_committed(size: int) -> bytes:
    data = _COMMITTED.pack(size)
    return data + _CRC.pack(crc32(data))


def read_header(file: BinaryIO) -> Header:
    """Read the header of a file; if the file is of a later release, read only the version. Raises `DamagedError`."""
    data = file.read(FRAMES_OFFSET)
    if len(data) < FRAMES_OFFSET or not data.startswith(MAGIC):
        raise DamagedError("the file's header is missing")
    _, version, length = _PROLOGUE.unpack_from(data)
    header = (data + file.read(max(0, length - len(data))))[:length]
    if len(header) < max(length, _PROLOGUE.size + _CRC.size) or _CRC.pack(crc32(header[: -_CRC.size])) != header[-_CRC.size :]:
        raise DamagedError("the file's header is invalid")
    if version > VERSION:
        return Header(LOG, 0, 0, 0, version=version)
    if version != VERSION or length != HEADER_BYTES:
        raise DamagedError(f"it has version {version}")
    _, _, _, kind, generation, incarnation, first, boot = _HEADER.unpack_from(data)
    committed = data[COMMITTED_OFFSET:]
    (size,) = _COMMITTED.unpack_from(committed)
    if committed != _encode_committed(size):
        raise DamagedError("its length is invalid")
    if kind not in SUFFIXES:
        raise DamagedError("its kind is unknown")
    check, state = crc32(data[: _HEADER.size]), data[STATE_OFFSET:COMMITTED_OFFSET]
    return Header(kind, generation, incarnation, first, boot, check, state, size)


def read_records(file: BinaryIO, header: Header) -> Iterator[JournalRecord]:
    """Read all committed records in order. Raises `DamagedError` at the first invalid record."""
    if os.fstat(file.fileno()).st_size < header.committed:
        raise DamagedError("the end of the file is missing")
    file.seek(FRAMES_OFFSET)
    at, check = FRAMES_OFFSET, header.crc
    while at < header.committed:
        head = file.read(_FRAME.size)
        length = _LENGTH.unpack_from(head.ljust(_FRAME.size, b"\0"))[0]
        at += _FRAME.size + length
        if len(head) < _FRAME.size or at > header.committed:
            raise DamagedError("a frame is longer than the file")
        body = file.read(length)
        check = crc32(body, crc32(head[: _LENGTH.size], check))
        if len(body) < length or head[_LENGTH.size :] != _CRC.pack(check):
            raise DamagedError("a frame does not match its checksum")
        try:
            yield _decode(body)
        except msgspec.MsgspecError as error:
            raise DamagedError(f"a frame is not a valid record: {error}") from error


def tail_records(
    rows: Iterable[tuple[int, bytes]], first: int, end: int, upstream: int, *, max_batches: int, max_bytes: int
) -> Iterator[JournalRecord]:
    """Return numbered payloads as records of all numbers from `first` to `end` - 1.

    Numbers without a payload become `SkippedNumbers`. A `Batches` record holds at most `max_batches` payloads, and at most
    `max_bytes` bytes unless a single payload is larger.
    """
    run: list[bytes] = []
    size = 0
    for number, payload in rows:
        if number > first + len(run) or len(run) == max_batches or size + len(payload) > max_bytes:
            if run:
                yield _make_batches(first, run, upstream)
            first, run, size = first + len(run), [], 0
            if number > first:
                yield SkippedNumbers(first, number - 1)
                first = number
        run.append(payload)
        size += len(payload)
    if run:
        yield _make_batches(first, run, upstream)
    if first + len(run) < end:
        yield SkippedNumbers(first + len(run), end - 1)


def _make_batches(first: int, payloads: list[bytes], upstream: int) -> Batches:
    zeros = [0] * len(payloads)
    return Batches(first, [upstream] * len(payloads), zeros, zeros, payloads)


def write_snapshot(
    disk: Disk, folder: Folder, header: Header, records: Sequence[JournalRecord], ended_log: FileWriter | None
) -> int:
    """Write a snapshot, remove the files that it replaces, and return its size. Raises `OSError`.

    `ended_log` is the log that ends where the snapshot ends. It is synced and closed before the snapshot is written.
    """
    if ended_log is not None:
        try:
            disk.sync(ended_log.fd)
        finally:
            ended_log.close()
    snapshot = FileWriter(disk, folder, header.name + TEMPORARY_SUFFIX, header)
    try:
        for record in records:
            snapshot.append(record)
        snapshot.commit()
        disk.sync(snapshot.fd)
        disk.rename(header.name + TEMPORARY_SUFFIX, header.name, folder.fd)
    except BaseException:
        snapshot.discard()
        raise
    snapshot.close()
    disk.sync(folder.fd)
    for name in folder.names():
        generation = generation_of(name)
        if generation is not None and generation < header.generation:
            with suppress(OSError):  # recovery ignores a file that a snapshot has replaced
                disk.remove(name, folder.fd)
    return snapshot.size


def generation_of(name: str) -> int | None:
    """Return the generation of a complete or incomplete file of a journal; None if the file is not a file of a journal."""
    stem, _, kind = name.removesuffix(TEMPORARY_SUFFIX).partition(".")
    return int(stem) if stem.isdecimal() and kind in SUFFIXES.values() else None
