"""Requests, responses, and the decoders of request bodies."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct

from kvevents.client.schemas import Problem
from kvevents.index import extract_token_array
from kvevents.service.access import Client
from kvevents.service.errors import RefusedError, ServiceError, TooMuchError
from kvevents.service.scope_fields import check_unknown_fields
from kvevents.service.settings import Limits
from kvevents.settings import fault_of, suggestion, with_path
from kvevents_native import _native

JSON_TYPE: Final = b"application/json"
PROBLEM_TYPE: Final = b"application/problem+json"
"""Media type of errors (RFC 9457), whatever media types the request accepts."""
MSGPACK_TYPE: Final = b"application/msgpack"
OLD_MSGPACK_TYPE: Final = b"application/x-msgpack"
"""Unregistered media type of msgpack, which older clients send."""
RAW_TYPE: Final = b"application/octet-stream"
_WEIGHT_PATTERN: Final = re.compile(rb"0(\.[0-9]{0,3})?|1(\.0{0,3})?")
"""Matches a weight in an `Accept` header."""
_NOT_ACCEPTED: Final = (0.0, 0)
"""Weight and position for a media type that a client does not accept."""
MAX_ERROR_CHARACTERS: Final = 800
"""Maximum number of characters of an error's sentence, because the sentence can quote the request."""

_encode = msgspec.json.Encoder().encode
_encode_msgpack = msgspec.msgpack.Encoder().encode


class Headers:
    """The headers that the endpoints use. If a name occurs several times, the first counts; all `Accept` headers count."""

    def __init__(self, headers: Sequence[tuple[str, bytes]]) -> None:
        fields = dict(reversed(headers))
        self.wants_msgpack: Final = prefers_msgpack(b",".join(value for name, value in headers if name == "accept"))
        """Whether the answer should be msgpack instead of JSON."""
        self.kind: Final = fields.get("content-type", b"").partition(b";")[0].strip().lower()
        """Media type of the body in lower case, without parameters; empty without a header `Content-Type`."""
        self.host: Final = fields.get("host", b"")
        self.if_none_match: Final = fields.get("if-none-match", b"")
        last_event_id = fields.get("last-event-id")
        self.last_event_id: Final = None if last_event_id is None else last_event_id.decode("latin-1")
        self.origin: Final = fields.get("origin", b"")


def prefers_msgpack(accept: bytes) -> bool:
    """Return whether a client prefers msgpack to JSON, by its `Accept` header (RFC 9110, 12.5.1).

    A wildcard in `Accept` counts as JSON. If both types have the same weight, the client prefers the type that it names first.
    """
    ranks: dict[bytes, tuple[float, int]] = {}
    for position, entry in enumerate(accept.lower().split(b",")):
        kind, *parameters = (part.strip(b" \t") for part in entry.split(b";"))
        weight = next((value[2:] for value in parameters if value.startswith(b"q=")), b"1")
        if _WEIGHT_PATTERN.fullmatch(weight):
            ranks.setdefault(kind, (float(weight), -position))
    msgpack = max((ranks[kind] for kind in (MSGPACK_TYPE, OLD_MSGPACK_TYPE) if kind in ranks), default=_NOT_ACCEPTED)
    other = next((ranks[kind] for kind in (JSON_TYPE, b"application/*", b"*/*") if kind in ranks), _NOT_ACCEPTED)
    return msgpack[0] > 0 and msgpack > other


class Decoders(msgspec.Struct, frozen=True):
    """Decoders for the request bodies of one endpoint."""

    json: Any = None
    msgpack: Any = None
    known_fields: frozenset[str] | None = None
    """Names of the known fields, if the endpoint ignores unknown fields; None if the endpoint rejects unknown fields."""


class HttpRequest(Struct, eq=False):
    """A request with its complete body."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    decoders: Decoders
    """Decoders of the body."""
    limits: Limits
    client: Client
    """Sender of the request, for the audit log."""
    item: str = ""
    """Text of the path in place of `{id}` in the route's path."""
    ignored_fields: tuple[str, ...] = ()
    """Unknown fields of the body that were ignored."""
    arguments: Mapping[str, str] = {}
    """Parameters that the endpoint has read from the query string, by their names in `/v1`."""
    span_attributes: dict[str, str | int] = {}
    """Attributes about the query, for the span of the request."""

    @property
    def parameters(self) -> Mapping[str, str]:
        """All parameters of the query string. Raises `RefusedError` if the query string cannot be parsed."""
        try:
            text = self.query.decode("ascii")
            pairs = parse_qsl(text, keep_blank_values=True, max_num_fields=32, errors="strict")
        except (UnicodeDecodeError, ValueError) as error:
            raise RefusedError(f"invalid query string: {error}", "bad-query-string", "percent-encode it as UTF-8") from error
        parameters: dict[str, str] = {}
        for name, value in pairs:
            if name in parameters:
                raise RefusedError(f"parameter {name!r} occurs twice", "bad-parameter", "send it once")
            parameters[name] = value
        return parameters

    def read(self) -> Any:
        """Return the decoded body, checked against the schema. Raises `ServiceError`."""
        kind = self.headers.kind
        if kind in {MSGPACK_TYPE, OLD_MSGPACK_TYPE}:
            return self._decode(self.decoders.msgpack, self.body)
        if kind == JSON_TYPE or kind.endswith(b"+json"):
            return self._decode(self.decoders.json, self.body)
        # Require a content type: browsers send forms, text and untyped bodies to other origins without a preflight request.
        sentence = f"unsupported content type {kind.decode('latin-1')!r}"
        hint = "send Content-Type: application/json or application/msgpack"
        raise ServiceError(sentence, "unsupported-media-type", hint, status=415)

    def read_tokens(self, name: str) -> tuple[Any, Any]:
        """Return the decoded body, and the token ids in its field `name`, as a buffer if possible. Raises `ServiceError`."""
        extracted_parts = extract_token_array(self.body, name) if self.headers.kind == JSON_TYPE else None
        if extracted_parts is not None:
            return self._decode(self.decoders.json, extracted_parts[0]), extracted_parts[1]
        value = self.read()
        return value, getattr(value, name)

    def _decode(self, decoder: Any, body: bytes) -> Any:
        if len(body) > (limit := self.limits.max_json_bytes):
            hint = f"limits.max_json_bytes is {limit}; send long prompts as JSON, or as raw token ids to /v1/match"
            raise TooMuchError(f"the body has {len(body)} bytes beside its token ids", "too-large", hint)
        try:
            value = _decode(decoder, body)
        except ServiceError:  # Only now look for unknown fields and numbers such as 1.0, because they are rare.
            known = self._drop_unknown_fields(decoder, body)
            if decoder is self.decoders.json and len(known) <= MAX_REWRITTEN_BYTES:
                known = _replace_whole_floats(known)
            if known is body:
                raise
            value = _decode(decoder, known, self.ignored_fields)
        try:  # Reject a field that occurs twice: programs differ in which value they use, and the field can be the tenant.
            _native.check_names(body, decoder is self.decoders.msgpack)
        except ValueError as error:
            raise RefusedError(f"malformed body: {error}", "malformed-body", "send each field once") from error
        return value

    def _drop_unknown_fields(self, decoder: Any, body: bytes) -> bytes:
        """Return a body without its unknown fields. If the endpoint rejects unknown fields, return the body unchanged."""
        known, codec = self.decoders.known_fields, msgspec.json if decoder is self.decoders.json else msgspec.msgpack
        try:
            fields = {} if known is None else codec.decode(body, type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
            return body
        self.ignored_fields = tuple(name for name in fields if name not in (known or ()))
        check_unknown_fields(self.ignored_fields, fields)
        known_fields = {name: value for name, value in fields.items() if name not in self.ignored_fields}
        return codec.encode(known_fields) if self.ignored_fields else body


class Response(Struct, eq=False):
    """A complete response."""

    body: bytes = b""
    status: int = 200
    kind: bytes = JSON_TYPE
    headers: tuple[tuple[bytes, bytes], ...] = ()


class StreamingResponse(Struct, eq=False):
    """A response that is sent in pieces; `release` is called when it ends or fails."""

    pieces: AsyncIterator[bytes]
    kind: bytes
    release: Callable[[], None] = lambda: None


AnyResponse: TypeAlias = Response | StreamingResponse


def answer(value: Any, request: HttpRequest | None = None, *, status: int = 200) -> Response:
    """Return a response with a value as JSON, or as msgpack if the request prefers msgpack."""
    if request is not None and request.headers.wants_msgpack:
        return Response(_encode_msgpack(value), status=status, kind=MSGPACK_TYPE)
    return Response(_encode(value), status=status)


def answer_json(body: bytes, request: HttpRequest) -> Response:
    """Return a response with `body`, which is JSON; convert it to msgpack if the request prefers msgpack."""
    return answer(msgspec.json.decode(body), request) if request.headers.wants_msgpack else Response(body)


def problem(error: ServiceError, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Response:
    """Return an error as problem details."""
    problem = Problem.of(error.code, error.reason, _shorten(error.sentence), _shorten(error.hint))
    return Response(_encode(problem), status=error.code, kind=PROBLEM_TYPE, headers=headers)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[:MAX_ERROR_CHARACTERS]}..."


MAX_REWRITTEN_BYTES: Final = 1 << 16
"""Maximum size in bytes of JSON in which numbers such as `1.0` are replaced. At this size, it takes about 10 ms."""


def _replace_whole_floats(body: bytes) -> bytes:
    """Return JSON with integers in place of numbers such as `1.0`, which JSON Schema also counts as integers."""

    def replace_whole(text: str) -> int | msgspec.Raw:
        return int(value) if (value := float(text)).is_integer() and abs(value) < 1 << 63 else keep(text)

    def keep(text: str) -> msgspec.Raw:
        return msgspec.Raw(text.encode())

    try:
        return msgspec.json.encode(json.loads(body.decode(), parse_float=replace_whole, parse_int=keep, parse_constant=keep))
    except (ValueError, RecursionError):
        return body


def _decode(decoder: Any, body: bytes, ignored_fields: Iterable[str] = ()) -> Any:
    """Return a decoded body. If a required field is missing and an ignored field has a similar name, the error names both."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        sentence = str(error)
        if isinstance(decoder.type, type):
            fault = fault_of(error, decoder.type)
            names = [fault.missing] if fault.missing and not fault.place else []
            sentences = [f"unknown field {name!r}{text}" for name in ignored_fields if (text := suggestion(name, names)) != ";"]
            sentence = sentences[0] if sentences else with_path(fault, decoder.type)
        raise ServiceError(f"invalid body: {sentence}", "bad-shape", "see /openapi.json", status=422) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(f"malformed body: {error}", "malformed-body", "send one JSON object") from error
