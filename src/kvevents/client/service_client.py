"""A client of the service, and how sources are named for people."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from kvevents.client.schemas import DEFAULT_GROUP, Problem, SourceView
from kvevents.errors import ConfigError, ExternalError
from kvevents.typed_json import decode_json

if TYPE_CHECKING:
    from kvevents.routing.http_client import Answer, HttpError, HttpErrorKind


T = TypeVar("T")

TOKEN_VARIABLE: Final = "KVEVENTS_TOKEN"  # noqa: S105 - the name of the variable
MAX_RESPONSE_BYTES: Final = 64 << 20
"""Largest response. 4,096 sources with all their gaps are 25 MiB."""
_MAX_QUOTED: Final = 80
"""Characters of an unknown response that an error message quotes."""
OK: Final = 200
UNAVAILABLE: Final = 503


class ServiceRequestError(ExternalError):
    """A request to a service failed, or its response was an error. The message is the sentence and the hint."""

    def __init__(self, sentence: str, reason: str, hint: str, status: int | None = None) -> None:
        super().__init__(f"{sentence}; {hint}" if hint else sentence)
        self.sentence = sentence
        self.reason = reason
        """The reason for programs: that of the service, or a `HttpErrorKind` of the HTTP client, or `not-kvevents`."""
        self.hint = hint
        self.status = status
        """HTTP status; None without a response."""


class ServiceClient:
    """A client of one service. Every method raises `ServiceRequestError`.

    Each request has its own connection: a command sends a few requests per second at most, and a service that restarts needs no
    special case.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        ca_file: Path | None = None,
        timeout: float = 5.0,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        parts = urlsplit(url)
        self.url = url
        self._timeout = timeout
        self._max_bytes = max_response_bytes
        self._host = parts.hostname or ""
        self._tls = _tls(ca_file) if parts.scheme == "https" else None
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity", "Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def get(self, path: str, kind: type[T], parameters: Mapping[str, str] | None = None, *, status: int = OK) -> T:
        """Return the response to GET as `kind`. Accept `status` like 200."""
        target = f"{path}?{urlencode(parameters)}" if parameters else path
        return self._request(target, None, kind, status)

    def post(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        """Return the response to POST as `kind`."""
        return self._request(path, msgspec.json.encode(body), kind, OK)

    def _request(self, target: str, body: bytes | None, kind: type[T], status: int) -> T:
        from kvevents.routing.http_client import HttpError  # noqa: PLC0415 - aiohttp takes 0.1 s to import

        try:
            answered, content, _ = asyncio.run(self._exchange(target, body))
        except HttpError as error:
            raise self._unreachable(error) from error
        if answered not in {OK, status}:
            raise self._refused(answered, content)
        try:
            return decode_json(content, kind)
        except msgspec.MsgspecError as error:
            if answered != OK:
                raise self._refused(answered, content) from None
            path = target.partition("?")[0]
            raise ServiceRequestError(
                f"the response of {self.url} to {path} is not that of a kvevents service: {error}",
                "not-kvevents",
                "check the port, and that the service has the same release",
                answered,
            ) from error

    async def _exchange(self, target: str, body: bytes | None) -> Answer:
        from kvevents.routing.http_client import HttpConnections, RequestLimits  # noqa: PLC0415 - as above

        url = self.url.rstrip("/") + target
        async with HttpConnections(RequestLimits(self._timeout, self._max_bytes), tls=self._tls) as connections:
            if body is None:
                return await connections.get(url, self._headers)
            return await connections.post(url, self._headers, body)

    def _unreachable(self, error: HttpError) -> ServiceRequestError:
        sentence, hint = _TROUBLES[error.kind]
        text = sentence.format(
            url=self.url, host=self._host, seconds=f"{self._timeout:g}", detail=error, most=self._max_bytes >> 20
        )
        return ServiceRequestError(text, error.kind, hint)

    def _refused(self, status: int, content: bytes) -> ServiceRequestError:
        try:
            problem = decode_json(content, Problem)
        except msgspec.MsgspecError:
            quoted = content[:_MAX_QUOTED].decode(errors="replace").strip()
            sentence = f"{self.url} answered with status {status}" + (f": {quoted}" if quoted else "")
            return ServiceRequestError(sentence, "not-kvevents", _STATUS_HINTS.get(status // 100, ""), status)
        hint = f"set {TOKEN_VARIABLE}, or name a file with --token-file" if status == 401 else problem.hint
        return ServiceRequestError(problem.detail, problem.reason, hint, status)


_STATUS_HINTS: Final = {
    3: "redirections are not followed, since they would receive the token: use the final address",
    4: "check that this is a kvevents service",
    5: "if this is a proxy, check that the service behind it runs",
}
_OTHER_PORT: Final = "check the port, and whether the URL begins with https://"
_TROUBLES: Final[dict[HttpErrorKind, tuple[str, str]]] = {
    "untrusted": (
        "the certificate of {url} is not trusted: {detail}",
        "name the authority that signed it with --tls-ca",
    ),
    "no-tls": ("the TLS handshake with {url} failed: {detail}", "check whether the URL begins with http://"),
    "unknown-host": ("the host name {host} cannot be resolved: {detail}", "check the name"),
    "timeout": ("{url} does not answer within {seconds} s", "see its log, or raise --timeout"),
    "refused": ("nothing listens at {url}", "start a service with `kvevents serve`, or name another one with --service"),
    "closed": ("{url} closes the connection: {detail}", _OTHER_PORT),
    "not-http": ("{url} does not answer in HTTP: {detail}", _OTHER_PORT),
    "too-large": ("the response of {url} has more than {most} MiB", "check that this is a kvevents service"),
    "unreachable": ("{url} cannot be reached: {detail}", "check the address, routes and firewalls"),
}


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"cannot use --tls-ca {ca_file}: {reason}; expected a PEM file of certificates") from error


def worker_name(instance: str, rank: int, tenant: str = DEFAULT_GROUP, group: str = DEFAULT_GROUP) -> str:
    """Return `engine-0/1`, with `@tenant` or `@tenant/group` unless these are the default ones."""
    name = f"{instance}/{rank}"
    if group != DEFAULT_GROUP:
        return f"{name}@{tenant}/{group}"
    return name if tenant == DEFAULT_GROUP else f"{name}@{tenant}"


def source_issues(source: SourceView) -> str:
    """Return the reason of a source's trust, and its fault unless the reason contains it."""
    fault = source.fault or ""
    return "; ".join(part for part in (source.trust.reason, fault if fault not in source.trust.reason else "") if part)
