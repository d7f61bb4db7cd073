"""Requests and responses, no more than the endpoints need."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from kvevents.index import extract_token_array
from kvevents.service.config import Limits
from kvevents.service.errors import RefusedError, ServiceError, TooMuchError
from kvevents.service.http.thread_pools import Run, run_inline
from kvevents.service.schemas import Problem
from kvevents.service.scope_fields import check_unknown

T = TypeVar("T")

JSON: Final = b"application/json"
PROBLEM: Final = b"application/problem+json"
"""Of errors (RFC 9457), whatever a request accepts."""
MSGPACK: Final = b"application/msgpack"
RAW: Final = b"application/octet-stream"
MAX_PARAMETERS: Final = 32
MAX_ERROR: Final = 800
"""Characters of an error's sentence, which may repeat what was sent, and is there twice."""
ESCAPED: Final = re.compile(rb"\\u00[567]")
"""A letter or an underscore that is escaped, as no encoder does: it may be in the name of a field that is there twice."""

_encode = msgspec.json.Encoder().encode
_encode_msgpack = msgspec.msgpack.Encoder().encode


class Headers:
    """What is asked of a request's headers, whose names are in lower case; of several with one name the first one counts."""

    __slots__ = ("accept", "announced", "authorization", "fetch_mode", "fetch_site", "host", "kind", "origin", "peer")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        fields = dict(reversed(list(headers)))
        self.authorization: Final = fields.get(b"authorization")
        self.accept: Final = fields.get(b"accept")
        self.kind: Final = fields.get(b"content-type", b"").partition(b";")[0].strip().lower()
        """Media type of the body, without parameters; empty where none is given."""
        self.host: Final = fields.get(b"host")
        self.origin: Final = fields.get(b"origin")
        self.fetch_site: Final = fields.get(b"sec-fetch-site")
        self.fetch_mode: Final = fields.get(b"sec-fetch-mode")
        self.announced: Final = fields.get(b"kvevents-announced")
        """Length of a body that the data plane has not received yet."""
        self.peer: Final = fields.get(b"kvevents-peer", b"an unknown address").decode("latin-1")
        """The client's address and port for the log, as the data plane knows them."""


class Request:
    """One request, its body complete."""

    __slots__ = ("_parameters", "body", "caller", "headers", "ignored", "method", "path", "peer", "query", "run", "wanted")

    def __init__(
        self, method: str, path: str, query: bytes, headers: Headers, body: bytes, *, caller: str = "", peer: str = ""
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.body = body
        self.headers = headers
        self.caller = caller
        """Name of the caller's token, and below where the request came from: for the audit log."""
        self.peer = peer
        self.ignored: tuple[str, ...] = ()
        """Unknown fields of the body that were left out."""
        self.wanted: Mapping[str, str] = {}
        """Parameters of the query string, all of which the endpoint has, under their names of `/v1`."""
        self.run: Run = run_inline
        """How steps that may take long are called: in a thread if the body is large."""
        self._parameters: dict[str, str] | None = None

    @property
    def kind(self) -> bytes:
        """Media type of the body."""
        return self.headers.kind

    @property
    def parameters(self) -> Mapping[str, str]:
        """Of the query string. Raises `RefusedError`."""
        if self._parameters is None:
            self._parameters = _parameters(self.query)
        return self._parameters


def _parameters(query: bytes) -> dict[str, str]:
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_PARAMETERS, errors="strict")
    except (UnicodeDecodeError, ValueError) as error:
        raise RefusedError(
            f"the query string cannot be read: {error}", "bad-query-string", "percent-encode it as UTF-8"
        ) from error
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in found:
            raise RefusedError(f"parameter {name!r} is given twice", "bad-parameter", "give it once")
        found[name] = value
    return found


class Response:
    """An answer, complete."""

    __slots__ = ("body", "headers", "kind", "status")

    def __init__(
        self, body: bytes = b"", *, status: int = 200, kind: bytes = JSON, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        self.status = status
        self.body = body
        self.kind = kind
        self.headers = headers


class StreamingResponse:
    """An answer that is sent piece by piece; `release` is called at its end, whatever ends it."""

    __slots__ = ("kind", "pieces", "release")

    def __init__(self, pieces: AsyncIterator[bytes], kind: bytes, release: Callable[[], None] = lambda: None) -> None:
        self.pieces = pieces
        self.kind = kind
        self.release = release


def answer(value: Any, request: Request | None = None, *, status: int = 200) -> Response:
    """A value as JSON, or as msgpack for those who accept that alone."""
    if request is not None and request.headers.accept == MSGPACK:
        return Response(_encode_msgpack(value), status=status, kind=MSGPACK)
    return Response(_encode(value), status=status)


def encoded(value: Any, request: Request) -> msgspec.Raw:
    """A value as a part of the answer to a request."""
    return msgspec.Raw(_encode_msgpack(value) if request.headers.accept == MSGPACK else _encode(value))


def problem(error: ServiceError, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Response:
    """An error as clients see it."""
    problem = Problem.of(error.code, error.reason, _shortened(error.sentence), _shortened(error.hint))
    return Response(_encode(problem), status=error.code, kind=PROBLEM, headers=headers)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}..."


class Body(msgspec.Struct, frozen=True):
    """How the bodies of one endpoint are read."""

    json: Any
    msgpack: Any
    known: frozenset[str] | None = None
    """Fields of a body whose other fields are left out if they are not like one of these; None to refuse other fields."""

    @classmethod
    def of(cls, kind: Any, *, tolerant: bool = False) -> Body:
        """Decoders for one type, which forbids unknown fields; with `tolerant` those of other clients are ignored."""
        known = frozenset(kind.__struct_fields__) if tolerant else None
        return cls(msgspec.json.Decoder(kind), msgspec.msgpack.Decoder(kind), known)

    def read(self, request: Request, limits: Limits, *, apart: int = 0) -> Any:
        """The body as a checked value; `apart` are bytes of it that do not count towards its limit. Raises `ServiceError`."""
        _check_size(len(request.body) - apart, limits)
        kind = request.kind
        if kind in {MSGPACK, b"application/x-msgpack"}:
            decoder = self.msgpack
        elif kind == JSON or kind.endswith(b"+json"):
            decoder = self.json
        else:
            # Browsers send forms, text and bodies without a type across origins without asking first.
            raise ServiceError(
                f"unsupported content type {kind.decode('latin-1')!r}",
                "unsupported-media-type",
                "send Content-Type: application/json or application/msgpack",
                status=415,
            )
        return self._decode(request, decoder, request.body)

    def read_tokens(self, request: Request, name: str, limits: Limits) -> tuple[Any, Any]:
        """The body, and apart from it its token ids under `name`, in a buffer where that can be. Raises `ServiceError`."""
        lifted = extract_token_array(request.body, name) if request.kind == JSON else None
        if lifted is not None and ESCAPED.search(lifted[0]) is None:
            _check_size(len(lifted[0]), limits)
            return self._decode(request, self.json, lifted[0]), lifted[1]
        value = self.read(request, limits)
        return value, getattr(value, name)

    def _decode(self, request: Request, decoder: Any, body: bytes) -> Any:
        if self.known is None:
            return _decode(decoder, body)
        try:
            return decoder.decode(body)
        except (ValueError, RecursionError):  # a body with unknown fields is rare; others are refused below
            known = self._without_unknown(request, decoder, body)
            return _decode(decoder, body if known is None else known)

    def _without_unknown(self, request: Request, decoder: Any, body: bytes) -> bytes | None:
        """The body without the fields that are not known; None if it has none, or cannot be read."""
        codec: Any = msgspec.json if decoder is self.json else msgspec.msgpack
        try:
            fields = codec.decode(body, type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
            return None
        request.ignored = tuple(name for name in fields if name not in (self.known or ()))
        check_unknown(request.ignored)
        known = {name: value for name, value in fields.items() if name not in request.ignored}
        return codec.encode(known) if request.ignored else None


def _check_size(size: int, limits: Limits) -> None:
    if size > limits.max_json_bytes:
        raise TooMuchError(
            f"the body has {size} bytes beside the token ids of a JSON prompt",
            "too-large",
            f"limits.max_json_bytes allows {limits.max_json_bytes}; send long prompts as JSON, or raw to /v1/match",
        )


def _decode(decoder: Any, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ServiceError(f"the body has the wrong shape: {error}", "bad-shape", "see /openapi.json", status=422) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(f"the body is malformed: {error}", "malformed-body", "send one JSON object") from error
