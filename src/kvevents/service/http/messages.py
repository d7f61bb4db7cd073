"""Requests, responses, and the decoders of request bodies."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl

import msgspec

from kvevents.client.schemas import Problem
from kvevents.index import extract_token_array
from kvevents.service.errors import RefusedError, ServiceError, TooMuchError
from kvevents.service.http.thread_pools import RunStep, run_inline
from kvevents.service.scope_fields import check_unknown
from kvevents.service.settings import Limits

T = TypeVar("T")

JSON: Final = b"application/json"
PROBLEM: Final = b"application/problem+json"
"""Media type of errors (RFC 9457), regardless of the media types that the request accepts."""
MSGPACK: Final = b"application/msgpack"
RAW: Final = b"application/octet-stream"
MAX_PARAMETERS: Final = 32
MAX_ERROR: Final = 800
"""Characters of an error's sentence. The sentence may quote the request, and the response has it twice."""
ESCAPED: Final = re.compile(rb"\\u00[567]")
"""An escaped letter or underscore. No encoder writes one, and it can hide a field that occurs twice."""

_encode = msgspec.json.Encoder().encode
_encode_msgpack = msgspec.msgpack.Encoder().encode


class Headers:
    """The headers that the endpoints use; of several headers with one name the first one counts."""

    __slots__ = ("accept", "announced", "authorization", "fetch_mode", "fetch_site", "host", "kind", "origin", "peer")

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        fields = dict(reversed(list(headers)))
        self.authorization: Final = fields.get(b"authorization")
        self.accept: Final = fields.get(b"accept")
        self.kind: Final = fields.get(b"content-type", b"").partition(b";")[0].strip().lower()
        """Media type of the body in lower case, without parameters; empty if not given."""
        self.host: Final = fields.get(b"host")
        self.origin: Final = fields.get(b"origin")
        self.fetch_site: Final = fields.get(b"sec-fetch-site")
        self.fetch_mode: Final = fields.get(b"sec-fetch-mode")
        self.announced: Final = fields.get(b"kvevents-announced")
        """Length of a body that the data plane has not received yet; None if the body is here."""
        self.peer: Final = fields.get(b"kvevents-peer", b"an unknown address").decode("latin-1")
        """Address and port of the client, from the data plane; for the log."""


class HttpRequest:
    """A request with its complete body."""

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
        """Name of the caller's token, for the audit log."""
        self.peer = peer
        """Address of the client, for the audit log."""
        self.ignored: tuple[str, ...] = ()
        """Unknown fields of the body that were ignored."""
        self.wanted: Mapping[str, str] = {}
        """Parameters of the query string that the endpoint knows, under their names of `/v1`."""
        self.run: RunStep = run_inline
        """Calls slow steps: in a thread if the body is large, otherwise in the event loop."""
        self._parameters: dict[str, str] | None = None

    @property
    def kind(self) -> bytes:
        """Media type of the body."""
        return self.headers.kind

    @property
    def parameters(self) -> Mapping[str, str]:
        """All parameters of the query string. Raises `RefusedError` if it cannot be parsed."""
        if self._parameters is None:
            self._parameters = _parameters(self.query)
        return self._parameters


def _parameters(query: bytes) -> dict[str, str]:
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_PARAMETERS, errors="strict")
    except (UnicodeDecodeError, ValueError) as error:
        raise RefusedError(f"invalid query string: {error}", "bad-query-string", "percent-encode it as UTF-8") from error
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in found:
            raise RefusedError(f"parameter {name!r} occurs twice", "bad-parameter", "send it once")
        found[name] = value
    return found


class Response:
    """A complete response."""

    __slots__ = ("body", "headers", "kind", "status")

    def __init__(
        self, body: bytes = b"", *, status: int = 200, kind: bytes = JSON, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        self.status = status
        self.body = body
        self.kind = kind
        self.headers = headers


class StreamingResponse:
    """A response that is sent in pieces; `release` is called when it ends or fails."""

    __slots__ = ("kind", "pieces", "release")

    def __init__(self, pieces: AsyncIterator[bytes], kind: bytes, release: Callable[[], None] = lambda: None) -> None:
        self.pieces = pieces
        self.kind = kind
        self.release = release


def answer(value: Any, request: HttpRequest | None = None, *, status: int = 200) -> Response:
    """Return a value as JSON, or as msgpack if the request accepts only that."""
    if request is not None and request.headers.accept == MSGPACK:
        return Response(_encode_msgpack(value), status=status, kind=MSGPACK)
    return Response(_encode(value), status=status)


def encoded(value: Any, request: HttpRequest) -> msgspec.Raw:
    """Encode a value as a part of the response to a request."""
    return msgspec.Raw(_encode_msgpack(value) if request.headers.accept == MSGPACK else _encode(value))


def problem(error: ServiceError, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Response:
    """Return an error as problem details."""
    problem = Problem.of(error.code, error.reason, _shortened(error.sentence), _shortened(error.hint))
    return Response(_encode(problem), status=error.code, kind=PROBLEM, headers=headers)


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_ERROR else f"{text[:MAX_ERROR]}..."


class Body(msgspec.Struct, frozen=True):
    """Decodes the request bodies of one endpoint."""

    json: Any
    msgpack: Any
    known: frozenset[str] | None = None
    """Known fields, if unknown fields are ignored unless they resemble a known one; None if they are rejected."""

    @classmethod
    def of(cls, kind: Any, *, tolerant: bool = False) -> Body:
        """Return decoders for a type that forbids unknown fields; with `tolerant` they ignore fields of other clients."""
        known = frozenset(kind.__struct_fields__) if tolerant else None
        return cls(msgspec.json.Decoder(kind), msgspec.msgpack.Decoder(kind), known)

    def read(self, request: HttpRequest, limits: Limits) -> Any:
        """Decode and check the body. Raises `ServiceError`."""
        _check_size(len(request.body), limits)
        kind = request.kind
        if kind in {MSGPACK, b"application/x-msgpack"}:
            decoder = self.msgpack
        elif kind == JSON or kind.endswith(b"+json"):
            decoder = self.json
        else:
            # Browsers send forms, text and bodies without a type to other origins without a preflight request.
            raise ServiceError(
                f"unsupported content type {kind.decode('latin-1')!r}",
                "unsupported-media-type",
                "send Content-Type: application/json or application/msgpack",
                status=415,
            )
        return self._decode(request, decoder, request.body)

    def read_tokens(self, request: HttpRequest, name: str, limits: Limits) -> tuple[Any, Any]:
        """Decode the body and its token ids in field `name`, which are a buffer if possible. Raises `ServiceError`."""
        lifted = extract_token_array(request.body, name) if request.kind == JSON else None
        if lifted is not None and ESCAPED.search(lifted[0]) is None:
            _check_size(len(lifted[0]), limits)
            return self._decode(request, self.json, lifted[0]), lifted[1]
        value = self.read(request, limits)
        return value, getattr(value, name)

    def _decode(self, request: HttpRequest, decoder: Any, body: bytes) -> Any:
        if self.known is None:
            return _decode(decoder, body)
        try:
            return decoder.decode(body)
        except (ValueError, RecursionError):  # unknown fields are rare; the second attempt reports other errors
            known = self._without_unknown(request, decoder, body)
            return _decode(decoder, body if known is None else known)

    def _without_unknown(self, request: HttpRequest, decoder: Any, body: bytes) -> bytes | None:
        """Encode the body without its unknown fields; None if it has none or is malformed."""
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
            f"the body has {size} bytes beside its token ids",
            "too-large",
            f"limits.max_json_bytes is {limits.max_json_bytes}; send long prompts as JSON, or as raw token ids to /v1/match",
        )


def _decode(decoder: Any, body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise ServiceError(f"invalid body: {error}", "bad-shape", "see /openapi.json", status=422) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(f"malformed body: {error}", "malformed-body", "send one JSON object") from error
