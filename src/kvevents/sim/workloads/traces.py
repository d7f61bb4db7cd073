"""Traces in files: read as a stream, in Mooncake's format or our own, and written in our own."""

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
"""Longest line that is read: prompts of three million token ids."""


class _Reader(Protocol):
    def request(self, line: bytes, number: int) -> Request: ...


_FORMATS: Final[Mapping[str, Callable[[], _Reader]]] = {"hash_ids": MooncakeReader, "at": PlainReader}
"""By the key that only lines of this format have."""
_KEYS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER: Final = msgspec.json.Encoder()


def read_trace(path: StrPath, *, limit: int | None = None) -> Iterator[Request]:
    """Read the first `limit` requests of a trace, or all, one at a time.

    Lines are in Mooncake's format or in our own, told apart by their keys; a name that ends in `.gz` is compressed. Times must
    not decrease. Of Mooncake's lines sessions are inferred (`kvevents.sim.workloads.sessions`). Iterating raises
    `WorkloadError` where a file cannot be read or a line is not right. Raises `ConfigError` for a negative limit.
    """
    if limit is not None and limit < 0:
        raise ConfigError(f"limit is {limit}; it is 0 or more, or None for all")
    return islice(_requests(Path(path)), limit)


def write_trace(path: StrPath, requests: Iterable[Request]) -> int:
    """Write requests in our own format, in the order of their times; returns how many.

    The same requests give the same bytes. Raises `WorkloadError` where the file cannot be written or a request has no place in
    the format.
    """
    path, number, last = Path(path), 0, 0.0
    with _writing(path) as file:
        for number, request in enumerate(requests, 1):
            if not last <= request.at < float("inf"):
                raise WorkloadError(
                    f"cannot write {path}: request {number} is at {request.at}; it needs a finite time, not before {last}"
                )
            last = request.at
            file.write(_ENCODER.encode(plain_row(request)) + b"\n")
    return number


def write_rows(path: StrPath, rows: Iterable[MooncakeRow]) -> None:
    """Write rows in Mooncake's format. Raises `WorkloadError` where the file cannot be written."""
    with _writing(Path(path)) as file:
        file.writelines(_ENCODER.encode(row) + b"\n" for row in rows)


def _requests(path: Path) -> Iterator[Request]:
    readers: dict[str, _Reader] = {}
    last = 0.0
    for number, line in _lines(path):
        try:
            keys = _KEYS.decode(line)
            request = _reader(keys, readers).request(line, number)
            last = _in_order(request.at, last)
        except (msgspec.DecodeError, ValueError) as error:
            expected = "expected a JSON object with the key hash_ids (Mooncake's format) or at (our own)"
            raise WorkloadError(f"{path}, line {number}: {error}; {expected}") from error
        yield request


def _in_order(at: float, last: float) -> float:
    if at < last:
        raise ValueError(f"its time is {at} s, before {last} s of the line before; sort the lines by time")
    return at


def _reader(keys: Mapping[str, object], readers: dict[str, _Reader]) -> _Reader:
    for key, kind in _FORMATS.items():
        if key in keys:
            if key not in readers:
                readers[key] = kind()
            return readers[key]
    raise ValueError(f"it has neither of the keys {' and '.join(_FORMATS)}, by which formats are told apart")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise WorkloadError(f"{path}, line {number}: longer than {MAX_LINE_BYTES} bytes; is this a trace?")
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
            # Without a name and a time, so that the same requests give the same bytes.
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed, io.BufferedWriter(packed, 1 << 16) as lines:
                yield lines
    except OSError as error:
        raise WorkloadError(f"cannot write {path}: {error.strerror}; free some space or name another file") from error
