"""One small HTTP client of a service, for the commands that ask one.

Each request has a connection of its own: these commands ask a few times a second at most, and what went away and came back is
then no special case.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from argparse import Namespace
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from kvevents.errors import ConfigError, PeerError
from kvevents.service.shapes import Problem

T = TypeVar("T")

TOKEN_VARIABLE: Final = "KVEVENTS_TOKEN"  # noqa: S105 - the name of the variable
MAX_ANSWER_BYTES: Final = 64 << 20
"""Of one answer: 4,096 sources with full gap ledgers are 25 MiB. What is longer does not come from a service."""
MAX_TOKEN_BYTES: Final = 4096
"""Of a bearer token, as the service has it."""
_JSON: Final = '[{"'
"""What JSON begins with, and no bearer token."""
_PIECE: Final = 1 << 16
_MAX_QUOTED: Final = 80
"""Characters of an answer nobody understands that are shown."""
OK: Final = 200
UNAVAILABLE: Final = 503


class AskError(PeerError):
    """A service could not be asked, or its answer was an error; the text is the sentence and what to do."""

    def __init__(self, sentence: str, reason: str, hint: str, status: int | None = None) -> None:
        super().__init__(f"{sentence}; {hint}" if hint else sentence)
        self.sentence = sentence
        self.reason = reason
        """The same for programs: the service's own reason, or one of those in this module."""
        self.hint = hint
        self.status = status
        """Of HTTP; None when no answer came."""


class ServiceClient:
    """Asks one service. Every method raises `AskError`."""

    def __init__(self, url: str, *, token: str | None = None, ca_file: Path | None = None, timeout: float = 5.0) -> None:
        parts = urlsplit(url)
        self.url = url
        self._timeout = timeout
        self._base = parts.path.rstrip("/")
        self._host, self._port = parts.hostname or "", parts.port
        self._tls = _tls(ca_file) if parts.scheme == "https" else None
        self._headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def get(self, path: str, kind: type[T], parameters: Mapping[str, str] | None = None, *, status: int = OK) -> T:
        """The answer to GET, as `kind`; one with `status` is as good as one with 200."""
        target = f"{path}?{urlencode(parameters)}" if parameters else path
        return self._ask("GET", target, None, kind, status)

    def post(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        """The answer to POST, as `kind`."""
        return self._ask("POST", path, msgspec.json.encode(body), kind, OK)

    def _ask(self, method: str, target: str, body: bytes | None, kind: type[T], status: int) -> T:
        try:
            answered, content = self._exchange(method, target, body)
        except (OSError, HTTPException, UnicodeError) as error:
            raise self._unreachable(error) from error
        if answered not in {OK, status}:
            raise self._refused(answered, content)
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            if answered != OK:
                raise self._refused(answered, content) from None
            path = target.partition("?")[0]
            raise AskError(
                f"what {self.url} answers to {path} is not what a kvevents service says: {error}",
                "not-kvevents",
                "is this another service's port, or another release?",
                answered,
            ) from error

    def _exchange(self, method: str, target: str, body: bytes | None) -> tuple[int, bytes]:
        until = time.monotonic() + self._timeout
        connection = self._connection()
        try:
            connection.request(method, self._base + target, body, self._headers)
            response = connection.getresponse()
            return response.status, self._read(response, until)
        finally:
            connection.close()

    def _connection(self) -> HTTPConnection:
        if self._tls is None:
            return HTTPConnection(self._host, self._port, timeout=self._timeout)
        return HTTPSConnection(self._host, self._port, timeout=self._timeout, context=self._tls)

    def _read(self, response: HTTPResponse, until: float) -> bytes:
        pieces: list[bytes] = []
        left = MAX_ANSWER_BYTES
        while piece := response.read1(_PIECE):
            pieces.append(piece)
            left -= len(piece)
            if left < 0:
                raise AskError(
                    f"the answer of {self.url} has more than {MAX_ANSWER_BYTES >> 20} MiB",
                    "too-large",
                    "is this a kvevents service?",
                )
            if time.monotonic() > until:
                raise TimeoutError
        return b"".join(pieces)

    def _unreachable(self, error: Exception) -> AskError:
        trouble = next(trouble for trouble in _TROUBLES if isinstance(error, trouble.kind))
        detail = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        sentence = trouble.sentence.format(url=self.url, host=self._host, seconds=f"{self._timeout:g}", detail=detail)
        return AskError(sentence, trouble.reason, trouble.hint)

    def _refused(self, status: int, content: bytes) -> AskError:
        try:
            told = msgspec.json.decode(content, type=Problem)
        except msgspec.MsgspecError:
            quoted = content[:_MAX_QUOTED].decode(errors="replace").strip()
            sentence = f"{self.url} answered with status {status}" + (f": {quoted}" if quoted else "")
            return AskError(sentence, "not-kvevents", _STRANGE.get(status // 100, ""), status)
        hint = f"set {TOKEN_VARIABLE}, or name a file with --token-file" if status == 401 else told.hint
        return AskError(told.error, told.reason, hint, status)


class _Trouble(NamedTuple):
    kind: type[Exception]
    reason: str
    sentence: str
    hint: str


_STRANGE: Final = {
    3: "redirections are not followed, since a token would go with them: name the final address",
    4: "is this a kvevents service?",
    5: "is this a proxy whose service is down? See its log",
}
_OTHER_PORT: Final = "is this another port, or should it be https://?"
# The first that fits; the order matters, for some are kinds of others, and what ends without an answer is of two.
_TROUBLES: Final[tuple[_Trouble, ...]] = (
    _Trouble(
        ssl.SSLCertVerificationError,
        "untrusted",
        "the certificate of {url} is not trusted: {detail}",
        "name the authority that signed it with --ca-file",
    ),
    _Trouble(ssl.SSLError, "no-tls", "{url} does not speak TLS as we do: {detail}", "should this be http://?"),
    _Trouble(socket.gaierror, "unknown-host", "the host name {host} is not known: {detail}", "check the name"),
    _Trouble(UnicodeError, "unknown-host", "{host} is no host name: {detail}", "check the name"),
    _Trouble(TimeoutError, "timeout", "{url} does not answer within {seconds} s", "see its log, or give it more --timeout"),
    _Trouble(
        ConnectionRefusedError,
        "refused",
        "nothing listens at {url}",
        "start one with `kvevents serve`, or name another with --service",
    ),
    _Trouble(ConnectionError, "closed", "{url} closes the connection: {detail}", _OTHER_PORT),
    _Trouble(HTTPException, "not-http", "{url} does not answer in HTTP: {detail}", _OTHER_PORT),
    _Trouble(Exception, "unreachable", "{url} cannot be reached: {detail}", "check address, routes and firewalls between"),
)


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"cannot use --ca-file {ca_file}: {reason}; it is a PEM file of certificates") from error


def client_of(args: Namespace) -> ServiceClient:
    """The client that `options.add_service` and `options.add_access` describe. Raises `ConfigError`."""
    return ServiceClient(args.service, token=_token(args.token_file), ca_file=args.ca_file, timeout=args.timeout)


def _token(file: Path | None) -> str | None:
    if file is None:
        given, origin = os.environ.get(TOKEN_VARIABLE, "").strip(), TOKEN_VARIABLE
        if not given:
            return None
    else:
        given, origin = _read_token(file), f"--token-file {file}"
    if not given or len(given) > MAX_TOKEN_BYTES or not all("!" <= char <= "~" for char in given):
        raise ConfigError(f"{origin} holds no token: that is 1 to {MAX_TOKEN_BYTES} printable ASCII characters without spaces")
    if given[0] in _JSON:
        # A token goes into a header that proxies log: a prompt that is named by mistake must not.
        raise ConfigError(f"{origin} holds JSON and no token; --prompt-file is for token ids")
    return given


def _read_token(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(2 * MAX_TOKEN_BYTES).decode("latin-1").strip()
    except OSError as error:
        raise ConfigError(f"cannot read --token-file {file}: {error.strerror or error}") from error
