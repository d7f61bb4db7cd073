"""Reads trace files in Mooncake's format or in that of kvevents, line by line, and writes the latter."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Final, Protocol

import msgspec

from kvevents.errors import ConfigError, WorkloadError
from kvevents.recording import StrPath
from kvevents.sim.requests import Request
from kvevents.sim.workloads.mooncake import MooncakeReader, MooncakeRow
from kvevents.sim.workloads.schema import PlainReader, plain_row

MAX_LINE_BYTES: Final = 32 * 1024 * 1024
"""Longest line that is read. It has room for a prompt of three million token ids."""


class _Reader(Protocol):
    def request(self, line: bytes, number: int) -> Request: ...


_FORMATS: Final[Mapping[str, Callable[[], _Reader]]] = {"hash_ids": MooncakeReader, "at": PlainReader}
"""Readers by the key that only lines of their format have."""
_KEYS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER: Final = msgspec.json.Encoder()


def read_trace(path: StrPath, *, limit: int | None = None, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Request]:
    """Read the first `limit` requests of a trace, or all, one at a time.

    Lines are in Mooncake's format or in that of kvevents, distinguished by their keys. A name that ends in `.gz` is compressed.
    Times must not decrease. Sessions of Mooncake's traces are inferred. Iterating raises `WorkloadError` if the file cannot be
    read or a line is invalid. Raises `ConfigError` for a negative limit.
    """
    if limit is not None and limit < 0:
        raise ConfigError(f"invalid limit {limit}: expected at least 0, or None for all requests")
    return islice(_requests(Path(path), max_line_bytes), limit)


def write_trace(path: StrPath, requests: Iterable[Request]) -> int:
    """Write requests in the format of kvevents, in the order of their times, and return their number.

    Equal requests give equal bytes. Raises `WorkloadError` if the file cannot be written or the format cannot express a
    request.
    """
    path, number, last = Path(path), 0, 0.0
    with _writing(path) as file:
        for number, request in enumerate(requests, 1):
            if not last <= request.at < float("inf"):
                raise WorkloadError(
                    f"cannot write {path}: request {number} has the time {request.at}: expected a finite time from {last} on"
                )
            last = request.at
            file.write(_ENCODER.encode(plain_row(request)) + b"\n")
    return number


def write_rows(path: StrPath, rows: Iterable[MooncakeRow]) -> None:
    """Write rows in Mooncake's format. Raises `WorkloadError` if the file cannot be written."""
    with _writing(Path(path)) as file:
        file.writelines(_ENCODER.encode(row) + b"\n" for row in rows)


def _requests(path: Path, max_line_bytes: int) -> Iterator[Request]:
    readers: dict[str, _Reader] = {}
    last = 0.0
    for number, line in _lines(path, max_line_bytes):
        try:
            keys = _KEYS.decode(line)
            request = _reader(keys, readers).request(line, number)
            last = _in_order(request.at, last)
        except (msgspec.DecodeError, ValueError) as error:
            expected = "expected a JSON object with the key hash_ids (Mooncake's format) or at (the format of kvevents)"
            raise WorkloadError(f"{path}, line {number}: {error}; {expected}") from error
        yield request


def _in_order(at: float, last: float) -> float:
    if at < last:
        raise ValueError(f"its time {at} s is before {last} s of the previous line: sort the lines by time")
    return at


def _reader(keys: Mapping[str, object], readers: dict[str, _Reader]) -> _Reader:
    for key, kind in _FORMATS.items():
        if key in keys:
            if key not in readers:
                readers[key] = kind()
            return readers[key]
    raise ValueError(f"its format is unknown, since it has neither of the keys {' and '.join(_FORMATS)}")


def _lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            while line := file.readline(max_line_bytes + 1):
                number += 1
                if len(line) > max_line_bytes:
                    raise WorkloadError(f"{path}, line {number}: longer than {max_line_bytes} bytes; is this a trace?")
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        where = f"{path}, after line {number}" if number else str(path)
        reason = getattr(error, "strerror", None) or error
        raise WorkloadError(f"cannot read {where}: {reason}; check the file, or fetch it again") from error


@contextmanager
def _writing(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("wb") as file:
            if path.suffix != ".gz":
                yield file
                return
            # Without file name and time in the header, so that equal requests give equal bytes.
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed, io.BufferedWriter(packed, 1 << 16) as lines:
                yield lines
    except OSError as error:
        raise WorkloadError(f"cannot write {path}: {error.strerror}; free some space or name another file") from error
