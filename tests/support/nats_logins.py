"""Keys and credentials of NATS users, like those that `nk` and `nsc` create."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import nkeys  # type: ignore[import-untyped]  # it has no types

OPERATOR: Final[int] = nkeys.PREFIX_BYTE_OPERATOR
ACCOUNT: Final[int] = nkeys.PREFIX_BYTE_ACCOUNT
USER: Final[int] = nkeys.PREFIX_BYTE_USER
ANYTHING: Final[Mapping[str, Mapping[str, list[str]]]] = {"publish": {}, "subscribe": {}}
_NO_LIMIT: Final = (
    *("subs", "conn", "leaf", "imports", "exports", "data", "payload"),
    *("mem_storage", "disk_storage", "streams", "consumer"),
)


class Key(NamedTuple):
    """The secret seed and the public key of an owner: an operator, an account or a user."""

    seed: str
    public: str

    @classmethod
    def new(cls, kind: int = USER) -> Key:
        seed = bytes(nkeys.encode_seed(os.urandom(32), kind))
        return cls(seed.decode(), nkeys.from_seed(bytearray(seed)).public_key.decode())

    def sign_jwt(self, about: Key, name: str, nats: dict[str, Any], **claims: Any) -> str:
        """Return a JWT that is signed with this key and contains claims about the owner of another key."""
        claims |= {"jti": name, "iat": int(time.time()), "iss": self.public, "name": name, "sub": about.public, "nats": nats}
        parts = [_base64(json.dumps(part).encode()) for part in ({"typ": "JWT", "alg": "ed25519-nkey"}, claims)]
        signature = nkeys.from_seed(bytearray(self.seed.encode())).sign(".".join(parts).encode())
        return ".".join([*parts, _base64(signature)])


class Operator:
    """An operator that defines the only accounts that its servers accept: their configuration, and credentials of users."""

    def __init__(self) -> None:
        self._key, self._system, self.account = Key.new(OPERATOR), Key.new(ACCOUNT), Key.new(ACCOUNT)

    @property
    def options(self) -> dict[str, Any]:
        """Options for `NatsServer`: a system account, and an account with unlimited JetStream."""
        limits = dict.fromkeys(_NO_LIMIT, -1) | {"wildcards": True}
        system = {"type": "account", "version": 2, "limits": limits | dict.fromkeys(_NO_LIMIT[-4:], 0)}
        account = {"type": "account", "version": 2, "limits": limits}
        return {
            "operator": self._key.sign_jwt(self._key, "tests", {"type": "operator", "version": 2}),
            "system_account": self._system.public,
            "resolver": "MEMORY",
            "resolver_preload": {
                self._system.public: self._key.sign_jwt(self._system, "SYS", system),
                self.account.public: self._key.sign_jwt(self.account, "PLANE", account),
            },
        }

    def credentials(
        self, path: Path, name: str = "bridge", permissions: Mapping[str, Mapping[str, list[str]]] = ANYTHING, **claims: Any
    ) -> Path:
        """Write a `.creds` file of a new user with permissions as in a server's configuration. `claims` may have `exp`."""
        user = Key.new()
        granted = {"pub": permissions["publish"], "sub": permissions["subscribe"]}
        nats = {"type": "user", "version": 2, **granted, **dict.fromkeys(("subs", "data", "payload"), -1)}
        jwt = self.account.sign_jwt(user, name, nats, **claims)
        path.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
        )
        return path


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
