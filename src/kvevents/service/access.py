"""Who may do what: bearer tokens with roles.

A role may do what the roles below it may. Which role an endpoint asks for, and which endpoints are public, is the business of
the routing table.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

from msgspec import Struct

from kvevents.errors import ConfigError

MIN_TOKEN_BYTES: Final = 16
"""64 random bits as hexadecimal digits, 96 as base64: what nobody guesses over a network."""
MAX_TOKEN_BYTES: Final = 4096
"""More does not fit into the headers that servers and proxies let through."""
_HOW: Final = "make one with `openssl rand -base64 32`"


class Role(IntEnum):
    """What somebody may do; each role includes those below it."""

    NONE = 0
    READ = 1
    REGISTER = 2


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a request."""

    role: Role
    name: str
    """For logs: the name of the token, or that there was none."""


class TokenConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One bearer token, from exactly one of `token`, `token_file` and `token_env`; else `ConfigError` is raised."""

    role: Literal["read", "register"]
    token: str | None = None
    token_file: str | None = None
    """File that holds it, read when the service starts; white space around it does not count."""
    token_env: str | None = None
    """Environment variable that holds it."""
    name: str | None = None
    """What logs call who uses it."""

    def __post_init__(self) -> None:
        given = [name for name in _PLACES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(f"a token needs exactly one of {', '.join(_PLACES)}; it has {' and '.join(given) or 'none'}")

    def __repr__(self) -> str:
        return f"<TokenConfig {', '.join(f'{name} {value!r}' for name, value in self.__rich_repr__())}>"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        """Never the token, however this is printed."""
        shown = ("role", "name", "token_file", "token_env")
        return [(name, value) for name in shown if (value := getattr(self, name)) is not None]


_PLACES: Final = ("token", "token_file", "token_env")


class AccessConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tokens, and what may be done without one."""

    tokens: tuple[TokenConfig, ...] = ()
    anonymous: Literal["none", "read"] | None = None
    """What callers without a token may do. When not given: everything if no tokens are configured, nothing if some are."""


class Access:
    """Tells callers apart. Tokens are read here and kept as digests; a token that changes needs a restart.

    Raises `ConfigError` for a token that cannot be read, is shorter than `MIN_TOKEN_BYTES`, or is there twice.
    """

    def __init__(self, config: AccessConfig, environ: Mapping[str, str] = os.environ) -> None:
        self._known: dict[bytes, Caller] = {}
        for number, token in enumerate(config.tokens, 1):
            label = token.name or f"token {number}"
            digest = sha256(_checked(_read(token, label, environ), label)).digest()
            if digest in self._known:
                raise ConfigError(f"{self._known[digest].name} and {label} are the same token; {_HOW}")
            self._known[digest] = Caller(Role[token.role.upper()], label)
        self.anonymous = Caller(_anonymous_role(config), "no token")

    def caller(self, authorization: bytes | None) -> Caller:
        """The caller that sends this value of the `Authorization` header; None if it sends no such header.

        A wrong token has no role, though anonymous callers may have one: that is how its owner learns of it. It takes as long
        whichever token it is, if any.
        """
        if authorization is None or not self._known:
            return self.anonymous
        scheme, _, token = authorization.partition(b" ")
        digest = sha256(token.strip(b" \t")).digest()
        found = _STRANGER
        for known, caller in self._known.items():
            if hmac.compare_digest(known, digest):
                found = caller
        return found if scheme.lower() == b"bearer" else _STRANGER

    def digests(self, role: Role) -> list[bytes]:
        """Digests of the tokens that have a role."""
        return [digest for digest, caller in self._known.items() if caller.role >= role]

    def __repr__(self) -> str:
        return f"<Access {len(self._known)} tokens, without one {self.anonymous.role.name}>"


_STRANGER: Final = Caller(Role.NONE, "unknown token")


def _anonymous_role(config: AccessConfig) -> Role:
    if config.anonymous is None:
        return Role.NONE if config.tokens else Role.REGISTER
    return Role[config.anonymous.upper()]


def _read(token: TokenConfig, label: str, environ: Mapping[str, str]) -> bytes:
    if token.token is not None:
        return token.token.encode("utf-8", "surrogatepass")
    if token.token_env is not None:
        if token.token_env not in environ:
            raise ConfigError(f"{label}: there is no environment variable {token.token_env}")
        return environ[token.token_env].encode(errors="surrogateescape")
    return _read_file(Path(token.token_file or ""), label)


def _read_file(path: Path, label: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(2 * MAX_TOKEN_BYTES).strip()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(f"{label}: cannot read token_file {path}: {reason}") from error


def token_of_file(path: str, label: str) -> str:
    """A token to show others, read now. Raises `ConfigError`, which names `label`."""
    return _checked(_read_file(Path(path), label), label).decode("ascii")


def _checked(token: bytes, label: str) -> bytes:
    if not MIN_TOKEN_BYTES <= len(token) <= MAX_TOKEN_BYTES:
        raise ConfigError(f"{label} has {len(token)} bytes; it needs {MIN_TOKEN_BYTES} to {MAX_TOKEN_BYTES}: {_HOW}")
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise ConfigError(f"{label} has characters that no header carries; it is printable ASCII without spaces: {_HOW}")
    return token
