"""Recordings: every ZeroMQ frame of a conversation with an engine, one JSON object a line.

A line is `{"socket", "run", "endpoint", "t", "frames"}`, frames in base64; a `meta` line, which opens a run, has `meta` instead
of `endpoint` and `t`. A file whose name ends in `.gz` is compressed. `kvevents record` writes them, `kvevents play` and
`kvevents.testing.TapePlayer` serve them.

A recorder that was killed leaves half a line at the end. Readers yield everything before it and say so; writers cut it off
before they append. Damage anywhere else is a `RecordingError` that names the file and the line.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Literal, NamedTuple, Self, TypeAlias, cast

import msgspec

from kvevents.errors import ClosedError, RecordingError
from kvevents.wire import Live, parse_live

MAX_LINE_BYTES: Final = 128 * 1024 * 1024
"""Longest line that is read: a payload of 64 MiB, the wire's own limit, is 86 MiB in base64. Without the bound a file that is
not a recording would be read into memory whole."""

StrPath: TypeAlias = str | PathLike[str]


class RecordedFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One multipart message as it crossed a socket, or the note that opens a run.

    Fields are declared in the order in which they are written.
    """

    socket: Literal["pub", "replay", "replay-request", "meta"]
    """`replay` is what a DEALER received, `replay-request` what it sent, both without the ROUTER's identity frame."""
    run: str
    """Name of the engine run; sequence numbers and hashes are comparable within one run only."""
    endpoint: str | None = None
    t: float | None = None
    """Seconds since the epoch, on the recorder's clock."""
    frames: tuple[bytes, ...]
    meta: dict[str, Any] | None = None


class LiveBatch(NamedTuple):
    """One batch of a PUB socket. `t` is when it was recorded, in seconds since the epoch, or None where nobody knows."""

    topic: bytes
    seq: int
    payload: bytes
    t: float | None = None


class Stream(NamedTuple):
    """One engine's PUB socket in a recording."""

    run: str
    endpoint: str | None


_DECODER: Final = msgspec.json.Decoder(RecordedFrame)
_ENCODER: Final = msgspec.json.Encoder()
_OPENING: Final = b'{"socket"'
_TORN: Final = "the last line is incomplete, as a killed recorder leaves it"


class _Ending:
    """How a file ended, filled in by the generator that reads it."""

    torn: str | None = None
    unterminated: bool = False


class RecordingReader(Iterator[RecordedFrame]):
    """Yields the frames of one recording, in the order in which they were recorded."""

    def __init__(self, path: StrPath) -> None:
        # The generator owns the file, so that a reader dropped half-way closes it; it must not refer back to this object.
        self._ending = _Ending()
        self._frames = _frames_of(Path(path), self._ending)

    def __next__(self) -> RecordedFrame:
        return next(self._frames)

    @property
    def torn(self) -> str | None:
        """A sentence once the end was reached and the last line turned out to be incomplete; None otherwise."""
        return self._ending.torn


def read_recording(path: StrPath) -> RecordingReader:
    """Read a recording, a frame at a time.

    An incomplete last line ends the iteration as if it were not there; the reader's `torn` then tells. Iterating raises
    `RecordingError` when the file cannot be opened or is damaged, naming file and line.
    """
    return RecordingReader(path)


def live_batches(path: StrPath, run: str | None = None, endpoint: str | None = None) -> Iterator[LiveBatch]:
    """Yield the batches that PUB sockets sent, of one run and endpoint or of all; messages that are not batches are left out.

    Raises `RecordingError` as `read_recording` does.
    """
    for frame in read_recording(path):
        if frame.socket != "pub" or run not in (None, frame.run) or endpoint not in (None, frame.endpoint):
            continue
        live = parse_live(frame.frames)
        if isinstance(live, Live):
            yield LiveBatch(*live, frame.t)


def recorded_streams(path: StrPath) -> list[Stream]:
    """The runs and PUB endpoints of a recording, in order of appearance."""
    return list(dict.fromkeys(Stream(frame.run, frame.endpoint) for frame in read_recording(path) if frame.socket == "pub"))


def _frames_of(path: Path, ending: _Ending) -> Iterator[RecordedFrame]:
    for _, frame in _lines_of(path, ending):
        yield frame


def _lines_of(path: Path, ending: _Ending) -> Iterator[tuple[bytes, RecordedFrame]]:
    number = 0
    try:
        with _open(path) as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                ending.unterminated = not line.endswith(b"\n")
                frame = _decode(line, path, number)
                if frame is None:
                    ending.torn = f"{path}, line {number}: {_TORN}"
                elif frame is not _BLANK:
                    yield line, frame
    except EOFError:  # a gzip member without its end
        ending.torn = f"{path}, line {number + 1}: {_TORN}"
    except (OSError, zlib.error) as error:
        if isinstance(error, gzip.BadGzipFile) and _ends_with_one_byte_of_a_member(path):
            ending.torn = f"{path}, line {number + 1}: {_TORN}"
            return
        where = f"{path}, after line {number}" if number else str(path)
        raise RecordingError(f"cannot read {where}: {error}") from error


_BLANK: Final = RecordedFrame(socket="meta", run="", frames=())


def _decode(line: bytes, path: Path, number: int) -> RecordedFrame | None:
    """The frame of one line; `_BLANK` for an empty line, None for an incomplete one, which only the last can be."""
    if len(line) > MAX_LINE_BYTES:
        raise RecordingError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes; is this a recording?")
    if not line.strip():
        return _BLANK
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, ValueError) as error:
        if not line.endswith(b"\n") and _opens_a_record(line):
            return None
        raise RecordingError(f"{path}, line {number}: {error}") from error


def _open(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _ends_with_one_byte_of_a_member(path: Path) -> bool:
    """Whether whole gzip members are followed by the first byte of another one, of which no more was written."""
    member, fed = zlib.decompressobj(wbits=31), b""
    with path.open("rb") as file:
        while data := file.read(1 << 16):
            while data:
                try:
                    member.decompress(data)
                except zlib.error:
                    return False
                fed, data = (fed + data)[:2], member.unused_data
                if member.eof:
                    member, fed = zlib.decompressobj(wbits=31), b""
    return fed == b"\x1f"


def _opens_a_record(line: bytes) -> bool:
    head = line[: len(_OPENING)]
    return _OPENING.startswith(head)


class RecordingWriter:
    """Appends frames to a recording; a context manager.

    What `write` was given is in the file after `flush` or `close`. An existing recording is continued: an incomplete last
    line is cut off first, and `mended` says so. A full disk, or a file that is not a recording, raises `RecordingError`; after
    a failed write every later one fails too, so that no hole can hide inside a recording.
    """

    def __init__(self, path: StrPath) -> None:
        self.path: Final = Path(path)
        self.mended: Final = _mend(self.path)
        """A sentence when an incomplete last line was cut off; None otherwise."""
        self.written = 0
        """Frames given to `write`."""
        self.flushed = 0
        """Frames known to be in the file."""
        self._failure: OSError | None = None
        self._pack: Any = None
        try:
            self._file = self.path.open("ab")
        except OSError as error:
            raise RecordingError(f"cannot write {self.path}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._file.closed else "failed" if self._failure else "open"
        return f"<RecordingWriter {self.path} {state}, {self.written} frames, {self.flushed} flushed>"

    def write(self, frame: RecordedFrame) -> None:
        """Append one frame. Raises `RecordingError` when the file cannot take it, `ClosedError` after `close`."""
        if self._file.closed:
            raise ClosedError(f"the recording {self.path} is closed")
        if self._failure is not None:
            raise self._error(self._failure) from self._failure
        self._put(_ENCODER.encode(frame) + b"\n")
        self.written += 1

    def flush(self) -> None:
        """Hand everything written so far to the operating system. Raises `RecordingError` when it cannot be taken."""
        if self._failure is not None or self._file.closed:
            return
        self._finish(zlib.Z_SYNC_FLUSH)

    def close(self) -> None:
        """Flush and close; idempotent. Raises `RecordingError` when frames could not be written, having closed the file."""
        if self._file.closed:
            return
        try:
            if self._failure is None:
                self._finish(zlib.Z_FINISH)
        finally:
            with suppress(OSError):  # told already: what failed is `_failure`
                self._file.close()

    def _put(self, line: bytes) -> None:
        if self.path.suffix == ".gz":
            # A file opened again gets a further gzip member; members read as one stream.
            self._pack = self._pack or zlib.compressobj(wbits=31)
            line = self._pack.compress(line)
        try:
            self._file.write(line)
        except OSError as error:
            self._failure = error
            raise self._error(error) from error

    def _finish(self, mode: int) -> None:
        try:
            if self._pack is not None:
                self._file.write(self._pack.flush(mode))
            self._file.flush()
        except OSError as error:
            self._failure = error
            raise self._error(error) from error
        self.flushed = self.written

    def _error(self, error: OSError) -> RecordingError:
        lost = self.written - self.flushed
        return RecordingError(
            f"cannot write {self.path}: {error.strerror}; {self.flushed} frames are in the file, up to {lost} more are not;"
            " free some space and record to another file"
        )


def _mend(path: Path) -> str | None:
    """Make an existing file fit to be appended to; say what was cut off."""
    try:
        if not path.exists() or path.stat().st_size == 0:
            return None
        return _mend_packed(path) if path.suffix == ".gz" else _mend_plain(path)
    except OSError as error:
        raise RecordingError(f"cannot append to {path}: {error}") from error


def _mend_plain(path: Path) -> str | None:
    with path.open("rb+") as file:
        if not _opens_a_record(file.read(len(_OPENING))):
            raise RecordingError(f"cannot append to {path}: it is not a recording; name another file")
        end = _last_newline(file) + 1
        file.seek(end)
        tail = file.read(MAX_LINE_BYTES + 1)
        if not tail:
            return None
        if _decode(tail, path, 0) is not None:  # complete but for its newline
            file.write(b"\n")
            return None
        file.truncate(end)
    return f"{path}: {_TORN}; {len(tail)} bytes were cut off"


def _last_newline(file: BinaryIO) -> int:
    """Offset of the last newline, -1 without one."""
    block = 1 << 16
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found
        end = start
    return -1


def _mend_packed(path: Path) -> str | None:
    """A gzip member without its end cannot be continued: copy the complete lines into a new file that takes its place."""
    ending = _Ending()
    for _ in _lines_of(path, ending):
        pass
    if ending.torn is None and not ending.unterminated:
        return None
    fresh = path.with_name(f"{path.name}.mending")
    try:
        with gzip.open(fresh, "wb") as file:
            for line, _ in _lines_of(path, _Ending()):
                file.write(line.rstrip(b"\n") + b"\n")
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    return f"{path}: {_TORN}; it was cut off" if ending.torn else None
