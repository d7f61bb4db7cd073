"""Settings of access control: bearer tokens with roles, and host patterns; and the audit log of changes and refused requests.

The data plane applies the settings (`native/server/src/policy.rs`). The audit log never contains a token.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from msgspec import Struct

from kvevents.errors import ConfigError, reason_of

MIN_TOKEN_BYTES: Final = 16
"""Minimum length of a token in bytes. Random digits then have 64 bits in hexadecimal, 96 in base64: too many to guess."""
MAX_TOKEN_BYTES: Final = 4096
"""Maximum length of a token. Common servers and proxies accept headers of this length."""
_HINT: Final = "create one with `openssl rand -base64 32`"


Role: TypeAlias = Literal["none", "read", "register"]
"""Permissions of a caller; each role includes the permissions of the roles listed before it."""


class TokenSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bearer token, from exactly one of `token`, `token_file` and `token_env`. Raises `ConfigError`."""

    role: Literal["read", "register"]
    """`read` permits queries; `register` permits queries, and registering and unregistering engines."""
    token: str | None = None
    """The token itself. Use `token_file` or `token_env` to keep the token out of the configuration."""
    token_file: str | None = None
    """File with the token. The service reads the file when it starts, and removes white space around the token."""
    token_env: str | None = None
    """Name of the environment variable that contains the token."""
    name: str | None = None
    """Name in logs for the user of the token."""

    def __post_init__(self) -> None:
        names = [name for name in _TOKEN_SOURCES if getattr(self, name) is not None]
        if len(names) != 1:
            given = " and ".join(names) or "none"
            raise ConfigError(f"invalid token: expected exactly one of {', '.join(_TOKEN_SOURCES)}, got {given}")

    def __repr__(self) -> str:
        return f"<TokenSettings {', '.join(f'{name} {value!r}' for name, value in self.__rich_repr__())}>"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Return the names and values of the fields to print, without the token."""
        names = ("role", "name", "token_file", "token_env")
        return [(name, value) for name in names if (value := getattr(self, name)) is not None]


_TOKEN_SOURCES: Final = ("token", "token_file", "token_env")


class AccessSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens, and the permissions of callers without a token."""

    tokens: tuple[TokenSettings, ...] = ()
    """Bearer tokens that the service accepts."""
    anonymous: Literal["none", "read"] | None = None
    """Role of callers without a token. Default: `register` if no tokens are configured, else `none`."""

    @property
    def anonymous_role(self) -> Role:
        """Role of callers without a token."""
        return self.anonymous or ("none" if self.tokens else "register")


class Token(Struct, frozen=True):
    """A token in the form that the data plane compares with requests."""

    digest: tuple[int, ...]
    """The bytes of the token's SHA-256 digest."""
    role: Role
    name: str
    """Name in logs for the user of the token."""


def read_tokens(config: AccessSettings, environ: Mapping[str, str] = os.environ) -> tuple[Token, ...]:
    """Read the access tokens. The service reads them only when it starts, so a changed token needs a restart.

    Raises `ConfigError` for a token that cannot be read, has an invalid length or character, or occurs twice.
    """
    tokens: dict[tuple[int, ...], Token] = {}
    for number, settings in enumerate(config.tokens, 1):
        label = settings.name or f"token {number}"
        token = _read_token(settings, label, environ)
        if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
            raise ConfigError(f"{label} has {len(token)} bytes: expected {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}; {_HINT}")
        if not all(0x21 <= byte <= 0x7E for byte in token):
            raise ConfigError(f"{label} has invalid characters: expected printable ASCII without spaces; {_HINT}")
        digest = tuple(sha256(token).digest())
        if digest in tokens:
            raise ConfigError(f"{tokens[digest].name} and {label} are the same token; {_HINT}")
        tokens[digest] = Token(digest, settings.role, label)
    return tuple(tokens.values())


def _read_token(token: TokenSettings, label: str, environ: Mapping[str, str]) -> bytes:
    if token.token is not None:
        return token.token.encode("utf-8", "surrogatepass")
    if token.token_env is not None:
        if token.token_env not in environ:
            raise ConfigError(f"{label}: environment variable {token.token_env} is not set")
        return environ[token.token_env].encode(errors="surrogateescape")
    path = Path(token.token_file or "")
    try:
        with path.open("rb") as file:
            return file.read(2 * MAX_TOKEN_BYTES).strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{label}: cannot read token_file {path}: {reason_of(error)}") from error


# --- hosts

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network
_HOST_PATTERN: Final = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?", re.IGNORECASE)


def address_of(host: str) -> Address | None:
    """Return `host` parsed as an IP address; None if the host is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that listens at `host`."""
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback


class Hosts(Struct, frozen=True):
    """A set of hosts; names are in lower case."""

    names: list[str]
    suffixes: list[str]
    """Suffixes with a leading dot. Every name with one of these suffixes is in the set."""
    networks: list[tuple[str, str]]
    """First and last address of each network."""


def parse_hosts(patterns: Sequence[str]) -> Hosts:
    """Parse `allowed_hosts`: names, addresses, networks such as `10.0.0.0/8`, and `*.SUFFIX` for all names with this suffix.

    Raises `ConfigError` for an invalid entry.
    """
    hosts = Hosts([], [], [])
    for pattern in patterns:
        try:
            network = ipaddress.ip_network(pattern)
        except ValueError as error:
            if _HOST_PATTERN.fullmatch(pattern) is None:
                forms = "HOST, NETWORK/BITS or *.SUFFIX, without a port"
                raise ConfigError(f"invalid allowed_hosts entry {pattern!r}: expected {forms}") from error
            name = pattern.lower()
            (hosts.suffixes if name.startswith("*.") else hosts.names).append(name.removeprefix("*"))
        else:
            hosts.networks.append((str(network[0]), str(network[-1])))
    return hosts


# --- the audit log

log = logging.getLogger("kvevents.service.audit")


class Client(NamedTuple):
    """The sender of a request."""

    caller: str
    """Name of the token in the request."""
    peer: str
    """Address of the client."""


LOGGED_REFUSALS_PER_SECOND: Final = 10
"""Maximum number of refused requests logged per second. Further requests are only counted: no client can fill the disk."""

MAX_REASON_CHARACTERS: Final = 800
"""Maximum number of characters of a reason in the log, because a reason can quote the request."""


class AuditLog:
    """Logs changes (level INFO) and refused requests (WARNING) to `kvevents.service.audit`. Only one thread may use it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock: Final = clock
        self._second = -1
        self._logged = 0
        self._suppressed = 0

    def log_change(self, change: str, client: Client | None = None) -> None:
        """Log a change by a client, or by the service itself; `change` begins with a verb in the past tense."""
        log.info("%s%s", "" if client is None else f"{client.caller} client={client.peer} ", change)

    def log_refusal(self, request: str, *, caller: str, peer: str, reason: str) -> None:
        """Log a refused request, or only count it if `LOGGED_REFUSALS_PER_SECOND` requests were logged in this second."""
        second = int(self._clock())
        if second != self._second:
            if self._suppressed:
                log.warning("%d more refused requests were not logged", self._suppressed)
            self._second, self._logged, self._suppressed = second, 0, 0
        if self._logged >= LOGGED_REFUSALS_PER_SECOND:
            self._suppressed += 1
            return
        self._logged += 1
        text = reason if reason.isprintable() else ascii(reason)
        log.warning("refused %s by %s client=%s: %s", request, caller, peer, text[:MAX_REASON_CHARACTERS])
