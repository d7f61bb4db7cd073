"""Reads and writes the files of recordings.

A line is `{"socket", "run", "endpoint", "t", "frames"}`, with frames in base64. A note, for example about the beginning of a
run, is a line with `meta` instead of `endpoint`, and without frames. A file whose name ends in `.gz` is compressed. `kvevents
record` writes recordings; `kvevents play` and `kvevents.testing.TapePlayer` play them.

A recorder that is killed leaves an incomplete line at the end. Readers yield all complete lines and report the incomplete line.
Any other damage raises a `RecordingError` that names the file and the line.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple, TypeAlias, cast

import msgspec

from kvevents.closeable import Closeable
from kvevents.errors import ClosedError, RecordingError, reason_of
from kvevents.wire import Live, parse_live

MAX_LINE_BYTES: Final = 128 * 1024 * 1024
"""Maximum length of a line in bytes. A payload of 64 MiB is 86 MiB in base64. Without the limit, a file that is not a recording
might be read into memory as one line."""

StrPath: TypeAlias = str | PathLike[str]


class RecordedFrame(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One multipart message of a socket, or a note such as the one that begins a run.

    Fields are declared in the order in which they are written.
    """

    socket: Literal["pub", "replay", "replay-request", "meta"]
    """`replay`: a DEALER socket received the message. `replay-request`: the DEALER sent the message. Neither message has an
    identity frame."""
    run: str
    """Name of the run of an engine. Sequence numbers and hashes can be compared only within one run."""
    endpoint: str | None = None
    t: float | None = None
    """Time at which the frame was recorded, by the recorder's clock, in seconds since the epoch."""
    frames: tuple[bytes, ...]
    meta: dict[str, Any] | None = None


class LiveBatch(NamedTuple):
    """One batch of a PUB socket."""

    topic: bytes
    seq: int
    payload: bytes
    t: float | None = None
    """Time at which the batch was recorded, in seconds since the epoch, or None if unknown."""


class RecordedEndpoint(NamedTuple):
    """The PUB socket of one engine in a recording."""

    run: str
    endpoint: str | None


_DECODER: Final = msgspec.json.Decoder(RecordedFrame)
_ENCODER: Final = msgspec.json.Encoder()
_LINE_START: Final = b'{"socket"'
_INCOMPLETE_MESSAGE: Final = "the last line is incomplete, as a killed recorder leaves it"


class RecordingReader(Iterator[RecordedFrame]):
    """Yields the frames of one recording, in the order in which they were recorded."""

    def __init__(self, path: StrPath, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        # The generator owns the file and has no reference to the reader, so dropping an unfinished reader closes the file.
        self._truncations: list[str] = []
        self._frames = _read_frames(Path(path), self._truncations, max_line_bytes)

    def __next__(self) -> RecordedFrame:
        return next(self._frames)

    @property
    def truncation(self) -> str | None:
        """A message if the reader reached the end and the last line was incomplete; else None."""
        return next(iter(self._truncations), None)


def read_recording(path: StrPath, max_line_bytes: int = MAX_LINE_BYTES) -> RecordingReader:
    """Read a recording, one frame at a time.

    If the last line is incomplete, it is ignored, and the reader's `truncation` reports it. Iteration raises `RecordingError`,
    which names file and line, if the file cannot be opened or is damaged, or a line is longer than `max_line_bytes`.
    """
    return RecordingReader(path, max_line_bytes)


def live_batches(path: StrPath, run: str | None = None, endpoint: str | None = None) -> Iterator[LiveBatch]:
    """Yield the batches of PUB sockets, of one run or all runs, and of one endpoint or all endpoints. Skip other messages.

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
    frames = (frame for frame in read_recording(path) if frame.socket == "pub")
    return list(dict.fromkeys(RecordedEndpoint(frame.run, frame.endpoint) for frame in frames))


def _read_frames(path: Path, truncations: list[str], max_line_bytes: int) -> Iterator[RecordedFrame]:
    number = 0
    try:
        with _open(path, "rb") as file:
            while line := file.readline(max_line_bytes + 1):
                number += 1
                if len(line) > max_line_bytes:
                    raise RecordingError(f"{path}, line {number}: longer than {max_line_bytes} bytes; expected a recording")
                if not line.strip():
                    continue
                try:
                    yield _DECODER.decode(line)
                except (msgspec.DecodeError, ValueError, RecursionError) as error:
                    if line.endswith(b"\n") or not _LINE_START.startswith(line[: len(_LINE_START)]):
                        raise RecordingError(f"{path}, line {number}: not a frame of a recording: {error}") from error
                    truncations.append(f"{path}, line {number}: {_INCOMPLETE_MESSAGE}")
    except EOFError:  # the file ends within a gzip member
        truncations.append(f"{path}, line {number + 1}: {_INCOMPLETE_MESSAGE}")
    except (OSError, zlib.error) as error:
        if isinstance(error, gzip.BadGzipFile) and _ends_with_one_byte_of_a_member(path):
            truncations.append(f"{path}, line {number + 1}: {_INCOMPLETE_MESSAGE}")
            return
        location = f"{path}, after line {number}" if number else str(path)
        raise RecordingError(f"cannot read {location}: {reason_of(error)}") from error


def _open(path: Path, mode: Literal["rb", "wb"]) -> BinaryIO:
    return cast("BinaryIO", gzip.open(path, mode, compresslevel=6)) if path.suffix == ".gz" else path.open(mode)


def _ends_with_one_byte_of_a_member(path: Path) -> bool:
    """Return whether the file consists of complete gzip members and then only the first byte of another member."""
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


class RecordingWriter(Closeable):
    """Writes frames to a new recording, as a context manager. The frames are in the file after `flush` or `close`.

    A full disk, or a file that exists and is not empty, raises `RecordingError`. After a failed write, every later write fails
    too, so that no missing frame stays undetected.
    """

    def __init__(self, path: StrPath) -> None:
        self.path: Final = Path(path)
        self.written = 0
        """Number of frames that were passed to `write`."""
        self.flushed = 0
        """Number of frames that are known to be in the file."""
        self._failure: OSError | None = None
        try:
            if self.path.exists() and self.path.stat().st_size > 0:
                raise RecordingError(f"cannot write {self.path}: the file exists; choose another name, or remove the file")
            self._file = _open(self.path, "wb")
        except OSError as error:
            raise RecordingError(f"cannot write {self.path}: {error.strerror}") from error

    def __repr__(self) -> str:
        state = "closed" if self._file.closed else "failed" if self._failure else "open"
        return f"<RecordingWriter {self.path} {state}, {self.written} frames, {self.flushed} flushed>"

    def write(self, frame: RecordedFrame) -> None:
        """Append one frame. Raise `RecordingError` if the file cannot be written, `ClosedError` after `close`."""
        if self._file.closed:
            raise ClosedError(f"the recording {self.path} is closed")
        if self._failure is not None:
            raise self._error(self._failure) from self._failure
        with self._note_failure():
            self._file.write(_ENCODER.encode(frame) + b"\n")
        self.written += 1

    def flush(self) -> None:
        """Pass all frames that were written to the operating system. Raise `RecordingError` if that fails."""
        if self._failure is not None or self._file.closed:
            return
        with self._note_failure():
            self._file.flush()
        self.flushed = self.written

    def close(self) -> None:
        """Flush and close the file. Idempotent. Raise `RecordingError`, after closing, if frames could not be written."""
        try:
            self.flush()
            if self._failure is None:
                with self._note_failure():
                    self._file.close()
        finally:
            with suppress(OSError):  # `write` or `flush` has already raised the failure
                self._file.close()

    @contextmanager
    def _note_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failure = error
            raise self._error(error) from error

    def _error(self, error: OSError) -> RecordingError:
        unflushed = self.written - self.flushed
        return RecordingError(
            f"cannot write {self.path}: {error.strerror}; {self.flushed} frames are in the file, up to {unflushed} more are not"
            "; free some space and record to another file"
        )
