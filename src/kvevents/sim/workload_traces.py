"""Reads trace files, line by line, in Mooncake's format or in the format of kvevents, and writes the format of kvevents.

Mooncake's format has the lengths of prompts and the pieces that the prompts share, but no text. A line is
`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`, with one id for every 512 tokens of the
prompt. An id identifies a piece and all pieces before it; the last piece can have fewer tokens (github.com/kvcache-ai/Mooncake,
FAST'25). Answers are always new text, because a trace does not say whether a later prompt repeats an answer.

The format of kvevents can describe any requests. Each line is a JSON object:
`{"at": 1.5, "tokens": [791, 6864], "output_tokens": 120, "session": "u7", "lora": "adapter-a", "salt": "tenant-1"}`. Instead of
`tokens` and `output_tokens`, a line can have `prompt` and `output`, which are lists of pieces. A piece is `{"tokens": [...]}`
or `[number, length]`: `length` token ids that are generated from the number.
"""

from __future__ import annotations

import gzip
import io
import zlib
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, Annotated, Final

import msgspec

from kvevents.errors import ConfigError, WorkloadError, reason_of
from kvevents.recording.files import StrPath
from kvevents.sim.requests import Drawn, Request, Text

MAX_CONTINUATIONS: Final = 4
"""Maximum number of different continuations of one conversation: its next turn, and regenerated or edited versions of it."""
MAX_STORED_PROMPTS: Final = 100_000
"""Maximum number of prompts whose last piece is stored, about 300 bytes each. The oldest prompt is evicted first."""


class Sessions:
    """Infers the sessions of requests from a trace that does not contain sessions.

    The next prompt of a conversation begins with all whole pieces of an earlier prompt. So each prompt's last whole piece is
    stored with the prompt's session. A request belongs to the session of the deepest stored piece of its prompt. If no piece is
    stored, the request begins a new session. Two kinds of pieces are ignored, because many conversations share such pieces: the
    first piece of a prompt, and a piece that was followed by more than `MAX_CONTINUATIONS` different pieces.

    Known errors: a prompt of at most one whole piece always begins a session. Up to `MAX_CONTINUATIONS` users whose prompts
    continue exactly at the end of another user's first prompt become one session with that user.
    """

    def __init__(self, max_ends: int = MAX_STORED_PROMPTS) -> None:
        self._max_ends = max_ends
        self._begun = 0
        self._ends: dict[Hashable, tuple[str, set[Hashable]]] = {}

    def find(self, pieces: Sequence[Hashable], whole: int) -> str:
        """Return the session of a prompt that consists of `pieces`. The first `whole` pieces are complete.

        The value of a piece identifies the piece and all pieces before it.
        """
        session = self._find_session(pieces, whole)
        if session is None:
            self._begun += 1
            session = f"session-{self._begun}"
        if whole > 1:
            end = pieces[whole - 1]
            _, followers = self._ends.pop(end, (session, set()))
            self._ends[end] = session, followers
            if len(self._ends) > self._max_ends:
                del self._ends[next(iter(self._ends))]
        return session

    def _find_session(self, pieces: Sequence[Hashable], whole: int) -> str | None:
        for place in range(whole - 1, 0, -1):
            known = self._ends.get(pieces[place])
            if known is None:
                continue
            session, followers = known
            if place + 1 < len(pieces) and len(followers) <= MAX_CONTINUATIONS:
                followers.add(pieces[place + 1])
            return session if len(followers) <= MAX_CONTINUATIONS else None
        return None


PIECE_TOKENS: Final = 512
FIRST_ANSWER: Final = 1 << 63
"""First number of the pieces that are generated for answers, of which a trace has only the length."""

_Positive = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]


class MooncakeRow(msgspec.Struct, frozen=True, gc=False):
    """One line of a trace in Mooncake's format. Fields that are not listed here are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds from the beginning of the trace."""
    input_length: _Positive
    output_length: _Positive
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]]


MOONCAKE_DECODER: Final = msgspec.json.Decoder(MooncakeRow)


def mooncake_request(sessions: Sessions, line: bytes, number: int) -> Request:
    """Return the request of line `number`, with a session that `sessions` infers. Raises `ValueError`."""
    row = MOONCAKE_DECODER.decode(line)
    ids, length = row.hash_ids, row.input_length
    pieces, rest = divmod(length, PIECE_TOKENS)
    needed = pieces + (rest > 0)
    if len(ids) != needed:
        expected = f"{needed} hash_ids, one for every {PIECE_TOKENS} tokens"
        raise ValueError(f"input_length {length} needs {expected}, but has {len(ids)}")
    drawn = [Drawn(one, PIECE_TOKENS) for one in ids[:pieces]]
    if rest:
        drawn.append(Drawn(ids[-1], rest))
    answer = Text((Drawn(FIRST_ANSWER + number, row.output_length),))
    return Request(row.timestamp / 1000, Text(drawn), answer, sessions.find(ids, pieces))


_TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
_Length = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_TokenIds = Annotated[list[_TokenId], msgspec.Meta(min_length=1)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]


class TokenPiece(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """A piece with its token ids."""

    tokens: _TokenIds


_Pieces = Annotated[list[tuple[Annotated[int, msgspec.Meta(ge=0)], _Length] | TokenPiece], msgspec.Meta(min_length=1)]


class PlainRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """One line of a trace in the format of kvevents: `prompt` or `tokens`, and `output` or `output_tokens`, but not both."""

    at: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds from the beginning of the trace."""
    prompt: _Pieces | None = None
    tokens: _TokenIds | None = None
    output: _Pieces | None = None
    output_tokens: _Length | None = None
    """Number of tokens in an answer that is new text."""
    session: _Name | None = None
    lora: _Name | None = None
    salt: _Name | None = None

    def __post_init__(self) -> None:
        for one, other in (("prompt", "tokens"), ("output", "output_tokens")):
            if (getattr(self, one) is None) == (getattr(self, other) is None):
                raise ValueError(f"expected exactly one of the keys {one} and {other}")


PLAIN_DECODER: Final = msgspec.json.Decoder(PlainRow)


def plain_request(line: bytes, number: int) -> Request:
    """Return the request of line `number`. Raises `ValueError`."""
    row = PLAIN_DECODER.decode(line)
    prompt = Text.from_tokens(row.tokens) if row.tokens is not None else _text(row.prompt or ())
    output = _text(row.output or ()) if row.output_tokens is None else Text((Drawn(FIRST_ANSWER + number, row.output_tokens),))
    return Request(row.at, prompt, output, row.session, row.lora, row.salt)


def plain_row(request: Request) -> PlainRow:
    """Return a trace line that describes a request."""
    return PlainRow(
        at=request.at,
        prompt=_pieces(request.prompt),
        output=_pieces(request.output),
        session=request.session,
        lora=request.lora,
        salt=request.salt,
    )


def _text(pieces: Sequence[tuple[int, int] | TokenPiece]) -> Text:
    for piece in pieces:
        if not isinstance(piece, TokenPiece) and piece[0] >= 1 << 64:
            raise ValueError(f"invalid piece number {piece[0]}: expected at most 2**64 - 1")
    return Text(array("I", piece.tokens) if isinstance(piece, TokenPiece) else piece for piece in pieces)


def _pieces(text: Text) -> list[tuple[int, int] | TokenPiece]:
    return [(piece.number, piece.length) if isinstance(piece, Drawn) else TokenPiece(piece.tolist()) for piece in text.pieces]


MAX_LINE_BYTES: Final = 32 * 1024 * 1024
"""Maximum length of a line in bytes. A line of this length has room for a prompt of three million token ids."""


_KEYS_DECODER: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ENCODER: Final = msgspec.json.Encoder()


def read_trace(path: StrPath, *, limit: int | None = None, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Request]:
    """Read the first `limit` requests of a trace one at a time; if `limit` is None, read all.

    Lines are in Mooncake's format or in the format of kvevents; their keys show which. A file whose name ends in `.gz` is
    compressed. Times must not decrease. Sessions of Mooncake's traces are inferred. Iterating raises `WorkloadError` if the
    file cannot be read or a line is invalid. Raises `ConfigError` for a negative limit.
    """
    if limit is not None and limit < 0:
        raise ConfigError(f"invalid limit {limit}: expected at least 0, or None for all requests")
    return islice(_read_requests(Path(path), max_line_bytes), limit)


def write_trace(path: StrPath, requests: Iterable[Request]) -> int:
    """Write requests in the format of kvevents, in the order of their times, and return their number.

    Equal requests give equal bytes. Raises `WorkloadError` if the file cannot be written or the format cannot express a
    request.
    """
    path, number, last = Path(path), 0, 0.0
    with _open_for_writing(path) as file:
        for number, request in enumerate(requests, 1):
            if not last <= request.at < float("inf"):
                reason = f"request {number} has the time {request.at}: expected a finite time from {last} on"
                raise WorkloadError(f"cannot write {path}: {reason}")
            last = request.at
            file.write(_ENCODER.encode(plain_row(request)) + b"\n")
    return number


def _read_requests(path: Path, max_line_bytes: int) -> Iterator[Request]:
    # Maps a JSON key that only lines of one format have to the function that reads a line of that format.
    readers: dict[str, Callable[[bytes, int], Request]] = {
        "hash_ids": partial(mooncake_request, Sessions()),
        "at": plain_request,
    }
    last = 0.0
    for number, line in _read_lines(path, max_line_bytes):
        try:
            request = _parse_request(line, number, readers, last)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            expected = "expected a JSON object with the key hash_ids (Mooncake's format) or at (the format of kvevents)"
            raise WorkloadError(f"{path}, line {number}: {error}; {expected}") from error
        last = request.at
        yield request


def _parse_request(line: bytes, number: int, readers: Mapping[str, Callable[[bytes, int], Request]], last: float) -> Request:
    keys = _KEYS_DECODER.decode(line)
    read = next((reader for key, reader in readers.items() if key in keys), None)
    if read is None:
        raise ValueError(f"the format is unknown, because the line has neither of the keys {' and '.join(readers)}")
    request = read(line, number)
    if request.at < last:
        raise ValueError(f"its time is {request.at} s, but the previous line's time is {last} s: sort the lines by time")
    return request


def _read_lines(path: Path, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield each line that is not blank, and its number in the file; the first is 1."""
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            while line := file.readline(max_line_bytes + 1):
                number += 1
                if len(line) > max_line_bytes:
                    raise WorkloadError(f"{path}, line {number}: longer than {max_line_bytes} bytes; expected a trace")
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        where = f"{path}, after line {number}" if number else str(path)
        raise WorkloadError(f"cannot read {where}: {reason_of(error)}; check the file, or fetch it again") from error


@contextmanager
def _open_for_writing(path: Path) -> Iterator[IO[bytes]]:
    try:
        with path.open("wb") as file:
            if path.suffix != ".gz":
                yield file
                return
            # The gzip header has no file name and no time, so that equal requests give equal bytes.
            with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed, io.BufferedWriter(packed, 1 << 16) as lines:
                yield lines
    except OSError as error:
        raise WorkloadError(f"cannot write {path}: {error.strerror}; free some space or name another file") from error
