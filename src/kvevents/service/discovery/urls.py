"""Where an engine's HTTP server is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self
from urllib.parse import SplitResult, urljoin, urlsplit

from kvevents.errors import ConfigError, PeerError
from kvevents.service.discovery.places import bracketed

_PORTS: Final = {"http": 80, "https": 443}


class AskError(PeerError):
    """An engine could not be asked, or its answer cannot be used; the message is a sentence for people."""


@dataclass(frozen=True, slots=True)
class BaseUrl:
    """Where an engine's HTTP server is."""

    scheme: str
    host: str
    """Without brackets."""
    port: int
    path: str = ""
    """In front of every path, without a slash at its end."""
    query: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `ConfigError` that says what it must look like."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"base_url is {text!r}: {error}") from error
        if parts.scheme not in _PORTS or not parts.hostname or parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(f"base_url is {text!r}; write http://HOST:PORT or https://HOST:PORT")
        return cls._of(parts, port)

    @classmethod
    def _of(cls, parts: SplitResult, port: int | None) -> Self:
        path = parts.path.rstrip("/") if not parts.query else parts.path
        if not (path + parts.query).isascii() or " " in path + parts.query or not (parts.hostname or "").isascii():
            raise ConfigError(f"the URL {parts.geturl()!r} has characters that must be escaped")
        return cls(parts.scheme, parts.hostname or "", port or _PORTS.get(parts.scheme, 0), path, parts.query)

    def __str__(self) -> str:
        return f"{self.scheme}://{self.address}{self.path}" + (f"?{self.query}" if self.query else "")

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{bracketed(self.host)}:{self.port}"

    def join(self, path: str) -> Self:
        """The URL of what stands at `path` below it."""
        return replace(self, path=self.path + path)

    def redirected(self, location: str) -> Self:
        """Where an answer points to. Raises `AskError` when that is another host, or no longer encrypted."""
        try:
            parts = urlsplit(urljoin(str(self), location))
            found = self._of(parts, parts.port)
        except ValueError as error:
            raise AskError(f"{self} redirects to {location!r}, which is no URL") from error
        if found.host != self.host or found.scheme not in {self.scheme, "https"}:
            raise AskError(f"{self} redirects to {location!r}, which is another server: name that one as base_url")
        return found
