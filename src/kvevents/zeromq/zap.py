"""Decides which keys may connect to CURVE servers: the handler side of ZAP, ZeroMQ's authentication protocol (RFC 27).

Theory of operation. For each peer that has proven to own a key, libzmq sends a request to the socket bound to
`inproc://zeromq.zap.01` in its context. A context can have only one ZAP handler, so all allow-lists of a context share a
thread, `zmq-zap`, which distinguishes the lists by ZAP's "domain". A socket with an allow-list rejects every peer if there is
no handler (`ZAP_ENFORCE_DOMAIN`).

For a peer that is not allowed, the handler answers 300 instead of 400. After 400, libzmq's client never connects again, so a
consumer whose key is added later would need a restart. After 300, the connection ends, at once or after `handshake_timeout`,
and the client retries periodically until its key is added.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.utils import z85

from kvevents.errors import ConfigError
from kvevents.settings import Pause, Positive, Seconds, Settings
from kvevents.zeromq.keys import PUBLIC_SUFFIX, Curve, read_public_keys, z85_decode

logger = logging.getLogger(__name__)

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"

_ACCEPTED_STATUS: Final = (b"200", b"OK")
_REFUSED_STATUS: Final = (b"300", b"unknown key")

Context = zmq.Context[Any]


class SecuritySettings(Settings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits and timers of CURVE servers."""

    handshake_timeout: Seconds = 10.0
    """Maximum seconds in which a connection must complete its handshake, and for which a refused connection stays open."""
    log_interval: Seconds = 60.0
    """Minimum seconds between two log records about refused connections of one end. A record has the number of refusals."""
    max_allowed_keys: Positive = 4_096
    """Maximum number of keys in one allow-list, and of files in its folder. Reading a file takes about 50 us."""
    reread_interval: Pause = 1.0
    """Seconds for which the keys of the files are used before a new connection reads the files again."""


DEFAULT_SECURITY_SETTINGS: Final = SecuritySettings()


class KeyAllowList:
    """The public keys that may connect: given keys, the keys of a file, or the keys of all `*.key` files of a folder."""

    def __init__(self, allowed: tuple[str, ...] | str, settings: SecuritySettings = DEFAULT_SECURITY_SETTINGS) -> None:
        """`allowed` is a tuple of keys in Z85, or the path of a file or folder."""
        self.keys: frozenset[bytes] = frozenset()
        self.errors: list[str] = []
        """Errors of files at the last `refresh`. The keys of a faulty file are not allowed."""
        self._settings = settings
        self._path: Path | None = Path(allowed) if isinstance(allowed, str) else None
        self._read_at = float("-inf")
        if isinstance(allowed, tuple):
            self.keys = frozenset(decoded_key for key in allowed if (decoded_key := z85_decode(key)) is not None)

    def refresh(self) -> None:
        """Read the files, unless they were read within `reread_interval`. Raises nothing; an unreadable file allows no key."""
        now = time.monotonic()
        if self._path is None or now - self._read_at < self._settings.reread_interval:
            return
        self._read_at = now
        keys: set[bytes] = set()
        errors: list[str] = []
        try:
            paths = self._key_files(self._path)
        except (OSError, ConfigError) as error:
            paths = []
            errors.append(f"{self._path}: {error.strerror}" if isinstance(error, OSError) else str(error))
        for path in paths:
            try:
                keys |= {decoded_key for key in read_public_keys(path) if (decoded_key := z85_decode(key)) is not None}
            except ConfigError as error:
                errors.append(str(error))
        limit = self._settings.max_allowed_keys
        if len(keys) > limit:
            errors.append(f"{self._path} holds {len(keys)} keys, more than {limit}; no client may connect")
            keys.clear()
        self.keys, self.errors = frozenset(keys), errors

    def _key_files(self, path: Path) -> list[Path]:
        if not path.is_dir():
            return [path]
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(PUBLIC_SUFFIX) and entry.name[0] != ".")
        limit = self._settings.max_allowed_keys
        if len(names) > limit:
            raise ConfigError(f"{path} holds {len(names)} files of keys, more than {limit}; no client may connect")
        return [path / name for name in names]


class SocketSecurity:
    """The CURVE keys, and the allow-list if there is one, for sockets of this process. Close the sockets before this object."""

    def __init__(self, curve: Curve, label: str, settings: SecuritySettings) -> None:
        """Raises `ConfigError` if the allow-list cannot be used."""
        self.refusals = 0
        """Number of connections that were refused because the client's key is not allowed."""
        self.domain = f"kvevents-{next(_domain_numbers)}"
        self.allow_list = None if curve.allowed is None else KeyAllowList(curve.allowed, settings)
        self._settings = settings
        self._curve = curve
        self._label = label
        self.handler: _ZapHandler | None = None
        """The handler that answers ZAP requests for this end; None if there is no allow-list."""
        self._logged_refusals, self._logged_at = 0, float("-inf")
        self._logged_errors: list[str] = []
        if self.allow_list is not None:
            self.allow_list.refresh()
            if self.allow_list.errors:
                raise ConfigError(f"curve.allowed: {self.allow_list.errors[0]}")

    def apply(self, socket: Any) -> None:
        """Set keys and allow-list on a socket; call this before the socket binds or connects."""
        self._curve.apply(socket)
        if self.allow_list is not None:
            socket.zap_domain = self.domain.encode()
            socket.handshake_ivl = int(1000 * self._settings.handshake_timeout)

    def is_allowed(self, key: bytes, address: str) -> bool:
        """Whether the owner of `key` (32 bytes) may connect; counts and logs a refusal."""
        if self.allow_list is None:
            return True
        self.allow_list.refresh()
        errors = self.allow_list.errors
        if errors != self._logged_errors:
            self._logged_errors = errors
            if errors:
                logger.warning("%s: %d files of curve.allowed cannot be used: %s", self._label, len(errors), errors[0])
        if key in self.allow_list.keys:
            return True
        self.refusals += 1
        if time.monotonic() - self._logged_at >= self._settings.log_interval:
            self._log_refusals(f", the last one from {address} with the key {z85.encode(key).decode()}")
        return False

    def close(self) -> None:
        """Refuse all further connections. A second call does nothing."""
        handler, self.handler = self.handler, None
        if handler is not None and handler.process == os.getpid():
            with _registry.lock:
                handler.domains.pop(self.domain.encode(), None)
                if not handler.domains:
                    if _registry.handlers.get(handler.context_id) is handler:
                        del _registry.handlers[handler.context_id]
                    handler.stop()
        if self.refusals > self._logged_refusals:
            self._log_refusals("")

    def _log_refusals(self, detail: str) -> None:
        count = self.refusals - self._logged_refusals
        self._logged_refusals, self._logged_at = self.refusals, time.monotonic()
        noun = "connection" if count == 1 else "connections"
        text = "%s: refused %d %s of unknown keys%s; add the key to curve.allowed to accept it"
        logger.warning(text, self._label, count, noun, detail)


def secure_sockets(
    context: Context, curve: Curve | None, label: str, settings: SecuritySettings = DEFAULT_SECURITY_SETTINGS
) -> SocketSecurity | None:
    """Return the security of the sockets of one end in `context`; None without keys. `label` names the end in the log.

    Raises `ConfigError` if the allow-list cannot be used, or if `context` has another ZAP handler.
    """
    if curve is None:
        return None
    security = SocketSecurity(curve, label, settings)
    if security.allow_list is not None:
        with _registry.lock:
            handler = _registry.handlers.get(context.underlying)
            if handler is None:
                handler = _registry.handlers[context.underlying] = _ZapHandler(context)
            handler.domains[security.domain.encode()] = security
        security.handler = handler
    return security


class _ZapHandler:
    """Answers the ZAP requests of one context in a separate thread, as long as the context has an allow-list."""

    def __init__(self, context: Context) -> None:
        self.domains: dict[bytes, SocketSecurity] = {}
        self.context_id = context.underlying
        self.process = os.getpid()
        # Not context.socket(): it may create an asyncio socket, and destroy() would close a socket that the thread uses.
        self._socket: zmq.Socket[bytes] = zmq.Socket(context, zmq.REP)
        self._socket.linger = 0
        try:
            self._socket.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            self._socket.close()
            text = f"cannot use curve.allowed: this ZeroMQ context has another ZAP handler ({ZAP_ENDPOINT}: {error})"
            raise ConfigError(f"{text}; pass another context, or omit allowed and check keys in that handler") from error
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._run, name="zmq-zap", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and close the socket, and wait until both have ended."""
        os.write(self._wake_write, b"\0")
        self._thread.join()
        os.close(self._wake_write)
        os.close(self._wake_read)

    def _run(self) -> None:
        try:
            with suppress(zmq.ContextTerminated):
                sockets: list[tuple[Any, int]] = [(self._wake_read, zmq.POLLIN), (self._socket, zmq.POLLIN)]
                while all(ready != self._wake_read for ready, _ in zmq.zmq_poll(sockets, -1)):
                    self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        except Exception:
            logger.exception("the handler of allowed keys ended; all further connections are refused")
        # The handler is removed before its socket is closed: then the context can end, and a new context may get the same id.
        if _registry.handlers.get(self.context_id) is self:
            del _registry.handlers[self.context_id]
        with suppress(zmq.ZMQError):  # `close` alone would free the endpoint too late
            self._socket.unbind(ZAP_ENDPOINT)
        self._socket.close()

    def _answer(self, request: list[bytes]) -> list[bytes]:
        version, request_id, domain, address, _, mechanism, *credentials = request
        security, is_accepted = self.domains.get(domain), False
        if mechanism == b"CURVE":
            # A server without a domain has no allow-list, and accepts every client that knows its key.
            is_accepted = not domain or (
                security is not None and security.is_allowed(credentials[0], address.decode(errors="replace"))
            )
        return [version, request_id, *(_ACCEPTED_STATUS if is_accepted else _REFUSED_STATUS), b"", b""]


class _Registry:
    """The handlers of this process, by the id of their context."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.handlers: dict[int, _ZapHandler] = {}


_domain_numbers = count()
_registry = _Registry()


def _reset_after_fork() -> None:
    """Replace lock and handlers in a forked child: neither the handlers' threads nor the holder of the lock exist there."""
    _registry.lock = threading.RLock()
    _registry.handlers = {}


os.register_at_fork(after_in_child=_reset_after_fork)
