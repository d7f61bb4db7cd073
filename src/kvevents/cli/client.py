"""A client of the service, for the commands that ask one.

Each request has a connection of its own: these commands ask a few times a second at most, and what went away and came back is
then no special case.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlencode, urlsplit

import msgspec

from kvevents.errors import ConfigError, ExternalError
from kvevents.service.schemas import Problem

if TYPE_CHECKING:
    from kvevents.service.http_client import Answer, HttpError, HttpErrorKind

T = TypeVar("T")

TOKEN_VARIABLE: Final = "KVEVENTS_TOKEN"  # noqa: S105 - the name of the variable
MAX_ANSWER_BYTES: Final = 64 << 20
"""Of one answer: 4,096 sources with full gap ledgers are 25 MiB. What is longer does not come from a service."""
MAX_TOKEN_BYTES: Final = 4096
"""Of a bearer token, as the service has it."""
_JSON: Final = '[{"'
"""What JSON begins with, and no bearer token."""
_MAX_QUOTED: Final = 80
"""Characters of an answer nobody understands that are shown."""
OK: Final = 200
UNAVAILABLE: Final = 503


class AskError(ExternalError):
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
        self._host = parts.hostname or ""
        self._tls = _tls(ca_file) if parts.scheme == "https" else None
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity", "Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def get(self, path: str, kind: type[T], parameters: Mapping[str, str] | None = None, *, status: int = OK) -> T:
        """The answer to GET, as `kind`; one with `status` is as good as one with 200."""
        target = f"{path}?{urlencode(parameters)}" if parameters else path
        return self._ask(target, None, kind, status)

    def post(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        """The answer to POST, as `kind`."""
        return self._ask(path, msgspec.json.encode(body), kind, OK)

    def _ask(self, target: str, body: bytes | None, kind: type[T], status: int) -> T:
        from kvevents.service.http_client import HttpError  # noqa: PLC0415 - aiohttp takes 0.1 s to import

        try:
            answered, content, _ = asyncio.run(self._exchange(target, body))
        except HttpError as error:
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

    async def _exchange(self, target: str, body: bytes | None) -> Answer:
        from kvevents.service.http_client import HttpConnections, RequestLimits  # noqa: PLC0415 - as above

        url = self.url.rstrip("/") + target
        async with HttpConnections(RequestLimits(self._timeout, MAX_ANSWER_BYTES), tls=self._tls) as connections:
            if body is None:
                return await connections.get(url, self._headers)
            return await connections.post(url, self._headers, body)

    def _unreachable(self, error: HttpError) -> AskError:
        sentence, hint = _TROUBLES[error.kind]
        text = sentence.format(
            url=self.url, host=self._host, seconds=f"{self._timeout:g}", detail=error, most=MAX_ANSWER_BYTES >> 20
        )
        return AskError(text, error.kind, hint)

    def _refused(self, status: int, content: bytes) -> AskError:
        try:
            problem = msgspec.json.decode(content, type=Problem)
        except msgspec.MsgspecError:
            quoted = content[:_MAX_QUOTED].decode(errors="replace").strip()
            sentence = f"{self.url} answered with status {status}" + (f": {quoted}" if quoted else "")
            return AskError(sentence, "not-kvevents", _STRANGE.get(status // 100, ""), status)
        hint = f"set {TOKEN_VARIABLE}, or name a file with --token-file" if status == 401 else problem.hint
        return AskError(problem.detail, problem.reason, hint, status)


_STRANGE: Final = {
    3: "redirections are not followed, since a token would go with them: name the final address",
    4: "is this a kvevents service?",
    5: "is this a proxy whose service is down? See its log",
}
_OTHER_PORT: Final = "is this another port, or should it be https://?"
# Sentence and hint.
_TROUBLES: Final[dict[HttpErrorKind, tuple[str, str]]] = {
    "untrusted": (
        "the certificate of {url} is not trusted: {detail}",
        "name the authority that signed it with --tls-ca",
    ),
    "no-tls": ("{url} does not speak TLS as we do: {detail}", "should this be http://?"),
    "unknown-host": ("the host name {host} is not known: {detail}", "check the name"),
    "timeout": ("{url} does not answer within {seconds} s", "see its log, or give it more --timeout"),
    "refused": ("nothing listens at {url}", "start one with `kvevents serve`, or name another with --service"),
    "closed": ("{url} closes the connection: {detail}", _OTHER_PORT),
    "not-http": ("{url} does not answer in HTTP: {detail}", _OTHER_PORT),
    "too-large": ("the answer of {url} has more than {most} MiB", "is this a kvevents service?"),
    "unreachable": ("{url} cannot be reached: {detail}", "check address, routes and firewalls between"),
}


def _tls(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"cannot use --tls-ca {ca_file}: {reason}; it is a PEM file of certificates") from error


def client_of(args: Namespace) -> ServiceClient:
    """The client that `options.add_service` and `options.add_access` describe. Raises `ConfigError`."""
    return ServiceClient(args.service, token=_token(args.token_file), ca_file=args.tls_ca, timeout=args.timeout)


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
