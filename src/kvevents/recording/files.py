"""The files of recordings: read, write and repair them.

A line is `{"socket", "run", "endpoint", "t", "frames"}`, with frames in base64. A `meta` line, which begins a run, has `meta`
instead of `endpoint` and `t`. A file whose name ends in `.gz` is compressed. `kvevents record` writes recordings;
`kvevents play` and `kvevents.testing.TapePlayer` play them.

A recorder that is killed leaves an incomplete line at the end. Readers yield everything before it and report it. Writers remove
it before they append. Damage anywhere else is a `RecordingError` that names the file and the line.
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
"""Maximum length of a line. A payload of 64 MiB is 86 MiB in base64. Without the limit, a file that is not a recording might be
read into memory as one line."""

StrPath: TypeAlias = str | PathLike[str]


class RecordedFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One multipart message of a socket, or a note such as the one that begins a run.

    Fields are declared in the order in which they are written.
    """

    socket: Literal["pub", "replay", "replay-request", "meta"]
    """`replay` was received by a DEALER socket, `replay-request` sent by it, both without the identity frame of the ROUTER."""
    run: str
    """Name of the engine run. Sequence numbers and hashes are comparable only within one run."""
    endpoint: str | None = None
    t: float | None = None
    """Time on the recorder's clock, in seconds since the epoch."""
    frames: tuple[bytes, ...]
    meta: dict[str, Any] | None = None


class LiveBatch(NamedTuple):
    """One batch of a PUB socket."""

    topic: bytes
    seq: int
    payload: bytes
    t: float | None = None
    """Time of the recording, in seconds since the epoch; None if unknown."""


class RecordedEndpoint(NamedTuple):
    """The PUB socket of one engine in a recording."""

    run: str
    endpoint: str | None


_DECODER: Final = msgspec.json.Decoder(RecordedFrame)
_ENCODER: Final = msgspec.json.Encoder()
_LINE_START: Final = b'{"socket"'
_INCOMPLETE: Final = "the last line is incomplete, as a killed recorder leaves it"


class _Tail:
    """The end of a file. The generator that reads the file sets it."""

    truncation: str | None = None
    """A message if the last line is incomplete."""
    lacks_newline = False


class RecordingReader(Iterator[RecordedFrame]):
    """Yields the frames of one recording, in the order in which they were recorded."""

    def __init__(self, path: StrPath, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        # The generator owns the file, so that dropping an unfinished reader closes it. It must not refer to this object.
        self._tail = _Tail()
        self._frames = (frame for _, frame in _read_lines(Path(path), self._tail, max_line_bytes))

    def __next__(self) -> RecordedFrame:
        return next(self._frames)

    @property
    def truncation(self) -> str | None:
        """A message if the end was reached and the last line was incomplete; None otherwise."""
        return self._tail.truncation


def read_recording(path: StrPath, max_line_bytes: int = MAX_LINE_BYTES) -> RecordingReader:
    """Read a recording, one frame at a time.

    If the last line is incomplete, it is ignored, and the reader's `truncation` reports it. Iteration raises `RecordingError`,
    which names file and line, if the file cannot be opened or is damaged, or a line is longer than `max_line_bytes`.
    """
    return RecordingReader(path, max_line_bytes)


def live_batches(path: StrPath, run: str | None = None, endpoint: str | None = None) -> Iterator[LiveBatch]:
    """Yield the batches of PUB sockets, of one run and endpoint or of all, without messages that are not batches.

    Raise `RecordingError` as `read_recording` does.
    """
    for frame in read_recording(path):
        if frame.socket != "pub" or run not in (None, frame.run) or endpoint not in (None, frame.endpoint):
            continue
        live = parse_live(frame.frames)
        if isinstance(live, Live):
            yield LiveBatch(*live, frame.t)


def recorded_endpoints(path: StrPath) -> list[RecordedEndpoint]:
    """Return the runs and PUB endpoints of a recording, in order of appearance."""
    return list(
        dict.fromkeys(RecordedEndpoint(frame.run, frame.endpoint) for frame in read_recording(path) if frame.socket == "pub")
    )


def _read_lines(path: Path, tail: _Tail, max_line_bytes: int) -> Iterator[tuple[bytes, RecordedFrame]]:
    number = 0
    try:
        with _open(path) as file:
            while line := file.readline(max_line_bytes + 1):
                number += 1
                if len(line) > max_line_bytes:
                    raise RecordingError(f"{path}, line {number}: longer than {max_line_bytes} bytes; is this a recording?")
                tail.lacks_newline = not line.endswith(b"\n")
                frame = _decode(line, path, number)
                if frame is None:
                    tail.truncation = f"{path}, line {number}: {_INCOMPLETE}"
                elif frame is not _BLANK:
                    yield line, frame
    except EOFError:  # a gzip member without its end
        tail.truncation = f"{path}, line {number + 1}: {_INCOMPLETE}"
    except (OSError, zlib.error) as error:
        if isinstance(error, gzip.BadGzipFile) and _ends_with_one_byte_of_a_member(path):
            tail.truncation = f"{path}, line {number + 1}: {_INCOMPLETE}"
            return
        location = f"{path}, after line {number}" if number else str(path)
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise RecordingError(f"cannot read {location}: {reason}") from error


_BLANK: Final = RecordedFrame(socket="meta", run="", frames=())


def _decode(line: bytes, path: Path, number: int) -> RecordedFrame | None:
    """Return the frame of one line; `_BLANK` for an empty line, None for an incomplete last line."""
    if not line.strip():
        return _BLANK
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, ValueError) as error:
        if not line.endswith(b"\n") and _starts_as_recording(line):
            return None
        raise RecordingError(f"{path}, line {number}: no frame of a recording: {error}") from error


def _open(path: Path) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _ends_with_one_byte_of_a_member(path: Path) -> bool:
    """Return whether the file is complete gzip members followed by only the first byte of another one."""
    member, start = zlib.decompressobj(wbits=31), b""
    with path.open("rb") as file:
        while data := file.read(1 << 16):
            while data:
                try:
                    member.decompress(data)
                except zlib.error:
                    return False
                start, data = (start + data)[:2], member.unused_data
                if member.eof:
                    member, start = zlib.decompressobj(wbits=31), b""
    return start == b"\x1f"


def _starts_as_recording(line: bytes) -> bool:
    return _LINE_START.startswith(line[: len(_LINE_START)])


class RecordingWriter:
    """Appends frames to a recording. It is a context manager.

    Frames that were passed to `write` are in the file after `flush` or `close`. If the file exists, the recording continues. An
    incomplete last line is removed first, and `repair` reports it. A full disk, or a file that is not a recording, raises
    `RecordingError`. After a failed write every later one fails too, so that a recording has no undetected hole.
    """

    def __init__(self, path: StrPath) -> None:
        self.path: Final = Path(path)
        self.repair: Final = _repair(self.path)
        """A message if an incomplete last line was removed; None otherwise."""
        self.written = 0
        """Frames passed to `write`."""
        self.flushed = 0
        """Frames known to be in the file."""
        self._failure: OSError | None = None
        self._compressor: Any = None
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
        """Append one frame. Raise `RecordingError` if the file cannot be written, `ClosedError` after `close`."""
        if self._file.closed:
            raise ClosedError(f"the recording {self.path} is closed")
        if self._failure is not None:
            raise self._error(self._failure) from self._failure
        line = _ENCODER.encode(frame) + b"\n"
        if self.path.suffix == ".gz":
            # A file that is opened again gets another gzip member. Members are read as one stream.
            self._compressor = self._compressor or zlib.compressobj(wbits=31)
            line = self._compressor.compress(line)
        try:
            self._file.write(line)
        except OSError as error:
            self._failure = error
            raise self._error(error) from error
        self.written += 1

    def flush(self) -> None:
        """Pass everything written so far to the operating system. Raise `RecordingError` if that fails."""
        if self._failure is not None or self._file.closed:
            return
        self._flush(zlib.Z_SYNC_FLUSH)

    def close(self) -> None:
        """Flush and close the file. Idempotent. Raise `RecordingError` if frames could not be written; the file is closed."""
        if self._file.closed:
            return
        try:
            if self._failure is None:
                self._flush(zlib.Z_FINISH)
        finally:
            with suppress(OSError):  # `_failure` has been raised before
                self._file.close()

    def _flush(self, mode: int) -> None:
        try:
            if self._compressor is not None:
                self._file.write(self._compressor.flush(mode))
            self._file.flush()
        except OSError as error:
            self._failure = error
            raise self._error(error) from error
        self.flushed = self.written

    def _error(self, error: OSError) -> RecordingError:
        unflushed = self.written - self.flushed
        return RecordingError(
            f"cannot write {self.path}: {error.strerror}; {self.flushed} frames are in the file, up to {unflushed} more are not"
            "; free some space and record to another file"
        )


def _repair(path: Path) -> str | None:
    """Prepare an existing file for appending. Return a message if an incomplete last line was removed."""
    try:
        if not path.exists() or path.stat().st_size == 0:
            return None
        return _repair_gzip(path) if path.suffix == ".gz" else _repair_plain(path)
    except OSError as error:
        raise RecordingError(f"cannot append to {path}: {error}") from error


def _repair_plain(path: Path) -> str | None:
    with path.open("rb+") as file:
        if not _starts_as_recording(file.read(len(_LINE_START))):
            raise RecordingError(f"cannot append to {path}: it is not a recording; name another file")
        end = _last_newline(file) + 1
        file.seek(end)
        tail = file.read(MAX_LINE_BYTES + 1)
        if not tail:
            return None
        if len(tail) > MAX_LINE_BYTES:
            raise RecordingError(f"{path}, last line: longer than {MAX_LINE_BYTES} bytes; is this a recording?")
        if _decode(tail, path, 0) is not None:  # only its newline is missing
            file.write(b"\n")
            return None
        file.truncate(end)
    return f"{path}: {_INCOMPLETE}; {len(tail)} bytes were removed"


def _last_newline(file: BinaryIO) -> int:
    """Return the offset of the last newline; -1 without one."""
    block = 1 << 16
    end = file.seek(0, os.SEEK_END)
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        offset = file.read(end - start).rfind(b"\n")
        if offset >= 0:
            return start + offset
        end = start
    return -1


def _repair_gzip(path: Path) -> str | None:
    """Copy the complete lines to a new file that replaces this one, because an incomplete gzip member cannot be continued."""
    tail = _Tail()
    for _ in _read_lines(path, tail, MAX_LINE_BYTES):
        pass
    if tail.truncation is None and not tail.lacks_newline:
        return None
    copy = path.with_name(f"{path.name}.repair")
    try:
        with gzip.open(copy, "wb") as file:
            for line, _ in _read_lines(path, _Tail(), MAX_LINE_BYTES):
                file.write(line.rstrip(b"\n") + b"\n")
        copy.replace(path)
    except OSError:
        copy.unlink(missing_ok=True)
        raise
    return f"{path}: {_INCOMPLETE}; it was removed" if tail.truncation else None
