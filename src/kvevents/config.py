"""What a publisher is told: one frozen definition for code, JSON and either engine's command line.

Fields, names and defaults are those of vLLM 0.33 (`vllm/config/kv_events.py`) and SGLang 0.5.23
(`sglang/srt/disaggregation/kv_events.py`); what follows `topic` is ours. This module imports no zmq.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from kvevents.certificates import KEY_CHARACTERS, key_bytes, read_pair, read_public_keys
from kvevents.endpoints import MAX_PORT, split_tcp
from kvevents.errors import ConfigError, UnknownDialectError
from kvevents.settings import FilePath, PublicKey, Secret, convert
from kvevents.structs import prepared
from kvevents.wire.dialects import Dialect, dialect_for

_TRANSPORTS: Final = ("tcp", "ipc", "inproc")
_SGLANG_FORMATS: Final = ("default", "dynamo")
MAX_HEARTBEAT: Final = 86_400
"""Seconds between two heartbeats, at most: what `kvevents.events.Heartbeat` can say."""


def resolve_dialect(value: Dialect | str | None) -> Dialect | None:
    """A dialect as people write it: a row, `vllm-0.24`, `sglang-latest`, or None for "as declared".

    Raises `UnknownDialectError` for an engine or release that no row covers.
    """
    if value is None or isinstance(value, Dialect):
        return value
    engine, _, release = value.partition("-")
    return dialect_for(engine, release or "latest")


def check_heartbeat(every: float | None) -> None:
    """Raise `ConfigError` for what is no number of seconds between heartbeats."""
    if every is not None and not 0 < every <= MAX_HEARTBEAT:
        raise ConfigError(f"heartbeat is {every}; it is a number of seconds above 0, at most {MAX_HEARTBEAT}, or None for none")


class Curve(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """CURVE keys of one end, each 40 characters of Z85 (`zmq.curve_keypair`).

    Without `server_key` this end is the CURVE server: peers must know its public key. With it, this end is a client of the
    server that owns that key. Which end binds does not matter.

    Raises `ConfigError` for what is no key, and for a `key_file` that cannot be read or that others can read.
    """

    public_key: str = ""
    """Own public key, instead of a file of both."""
    secret_key: Secret = ""
    """Own secret key, instead of a file of both."""
    server_key: PublicKey | None = None
    """Public key of the other end, or a file of it (NAME.key), if that is the CURVE server, as engines are."""
    key_file: FilePath | None = None
    """File of both own CURVE keys: a NAME.key_secret of `kvevents keys`."""
    allowed: tuple[str, ...] | FilePath | None = None
    """Public keys that may connect, or a file or folder of them, if this end is the CURVE server. It is looked at again for
    every connection. None lets in every client that knows this end's public key."""

    def __post_init__(self) -> None:
        if self.key_file is not None:
            self._read(Path(self.key_file))
        elif not self.public_key and not self.secret_key:
            raise ConfigError("curve needs key_file, your own keys, a file made by `kvevents keys NAME`; or both of its keys")
        if self.server_key is not None and key_bytes(self.server_key) is None:
            self._read_server_key(self.server_key)
        for name, key in self._keys():
            if key_bytes(key) is None:
                raise ConfigError(
                    f"curve.{name} must be {KEY_CHARACTERS} characters of Z85, as `kvevents keys` or zmq.curve_keypair() makes"
                )
        if self.allowed is not None and self.server_key is not None:
            raise ConfigError(
                "curve.allowed is for a CURVE server; with server_key this end is a client, and that key its check"
            )

    def _read(self, path: Path) -> None:
        pair = read_pair(path)
        for name, found in (("public_key", pair.public), ("secret_key", pair.secret)):
            if getattr(self, name) not in {"", found}:
                raise ConfigError(f"curve.{name} is not that of curve.key_file ({path}); leave it out")
            msgspec.structs.force_setattr(self, name, found)

    def _read_server_key(self, text: str) -> None:
        """Take the key out of a file; what names none stays, and is no key."""
        if not os.path.isfile(text):  # noqa: PTH113 - unlike Path.is_file, it raises for no text
            return
        found = read_public_keys(Path(text))
        if len(found) > 1:
            raise ConfigError(f"curve.server_key: {text} holds {len(found)} keys; the other end has one")
        msgspec.structs.force_setattr(self, "server_key", found[0])

    def _keys(self) -> Iterator[tuple[str, str]]:
        yield "public_key", self.public_key
        yield "secret_key", self.secret_key
        if self.server_key is not None:
            yield "server_key", self.server_key
        if isinstance(self.allowed, tuple):
            yield from (("allowed", key) for key in self.allowed)

    def apply(self, socket: Any) -> None:
        """Set the keys on a ZeroMQ socket; to be called before it binds or connects.

        With `allowed` nobody can connect then, until `kvevents.admission` says who.
        """
        if self.server_key is None:
            socket.curve_server = True
        else:
            socket.curve_serverkey = self.server_key.encode()
        socket.curve_publickey = self.public_key.encode()
        socket.curve_secretkey = self.secret_key.encode()
        if self.allowed is not None:
            socket.zap_domain = b"kvevents"
            socket.zap_enforce_domain = True

    def __repr__(self) -> str:
        role = "server" if self.server_key is None else f"client of {self.server_key!r}"
        return f"<Curve {role}, public key {self.public_key!r}>"

    def __rich_repr__(self) -> Any:
        """Never the secret key, however this is printed."""
        yield "public_key", self.public_key
        yield "server_key", self.server_key
        yield "allowed", self.allowed


@prepared
class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Whether, where and how KV cache events are published.

    Raises `ConfigError`, which names the field, for a value out of range.
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    """Name in `EventPublisherFactory`; left out, it becomes `zmq` when events are enabled and `null` when not."""
    endpoint: str = "tcp://*:5557"
    """Where live batches are published. Port 0 lets the OS choose; a rank is added to other ports."""
    replay_endpoint: str | None = None
    """Where replay requests are answered; None for no replay."""
    buffer_steps: int = 10_000
    """Batches kept for replay."""
    hwm: int = 100_000
    """Batches that may wait for one slow subscriber before it loses some; 0 for no limit."""
    max_queue_size: int = 100_000
    """Batches that may wait for the publisher thread before new ones are dropped, as a visible gap; 0 for no limit."""
    topic: str = ""
    bind: bool | None = None
    """Bind or connect the event socket; None goes by the endpoint, as the engines do."""
    dialect: str | None = None
    """Engine and release to be understood by, such as `sglang-0.5.17` or `vllm-latest`; None sends events as declared."""
    replay_topic: bool | None = None
    """Whether replay replies repeat the topic (vLLM from 0.26, SGLang from 0.5.22); None goes by the dialect."""
    compact: bool | None = None
    """Whether history older than the replay buffer is collapsed into a snapshot instead of forgotten; None goes by whether the
    native module is installed."""
    curve: Curve | None = None
    heartbeat: float | None = None
    """Seconds between batches that say what is resident, by which consumers check what they know; None for none. Needs the
    native module."""
    snapshot_endpoint: str | None = None
    """Where placement snapshots are answered, as in SGLang's draft `snapshot-v1`; a rank is added to its port. Needs the native
    module."""

    def __post_init__(self) -> None:
        check_heartbeat(self.heartbeat)
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it counts batches and cannot be negative")
        _check_endpoint("endpoint", self.endpoint)
        for name in ("replay_endpoint", "snapshot_endpoint"):
            if (endpoint := getattr(self, name)) is not None:
                _check_endpoint(name, endpoint)
        try:
            resolve_dialect(self.dialect)
        except UnknownDialectError as error:
            raise ConfigError(f"dialect: {error}") from error
        if self.publisher is None:
            msgspec.structs.force_setattr(self, "publisher", "zmq" if self.enable_kv_cache_events else "null")

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read vLLM's `--kv-events-config` or SGLang's, which are the same JSON but for two keys.

        SGLang has no `enable_kv_cache_events`: naming a publisher other than `null` enables it. Its `format` concerns the
        hashes that the engine computes and is checked, not kept.

        Raises `ConfigError` for anything that is not such an object; an unknown key is named beside the known ones.
        """
        try:
            found = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"the KV events configuration is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError("the KV events configuration must be a JSON object")
        return cls.from_mapping(found)

    @classmethod
    def from_mapping(cls, found: dict[str, Any]) -> Self:
        """As `from_json`, from an object already parsed."""
        given = dict(found)
        shape = given.pop("format", "default")
        if shape not in _SGLANG_FORMATS:
            raise ConfigError(f"format is {shape!r}; SGLang knows {' and '.join(_SGLANG_FORMATS)}")
        if given.get("publisher") not in {None, "null"}:
            given.setdefault("enable_kv_cache_events", True)
        return convert(given, cls, "the KV events configuration")

    @classmethod
    def from_cli(cls, text: str) -> Self:
        """`from_json`, under the name that SGLang gives it."""
        return cls.from_json(text)


def _check_endpoint(name: str, endpoint: str) -> None:
    transport, separator, address = endpoint.partition("://")
    if not separator or not address or transport not in _TRANSPORTS:
        raise ConfigError(f"{name} is {endpoint!r}; it must look like tcp://*:5557, ipc:///path or inproc://name")
    if transport != "tcp":
        return
    found = split_tcp(endpoint)
    if found is None or found[1] > MAX_PORT:
        raise ConfigError(f"{name} is {endpoint!r}; it needs a port from 0 to {MAX_PORT}")
