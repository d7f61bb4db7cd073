"""Who may connect to sockets that are CURVE servers: the other side of ZAP, ZeroMQ's authentication protocol (RFC 27).

Theory of operation. libzmq asks whoever is bound to `inproc://zeromq.zap.01` of its context about each peer that has proven to
own a key; there can be only one, so the allow-lists of one context share a desk with a thread, `zmq-admission`, told apart by
ZAP's "domain". A socket with an allow-list is set up so that without a desk nobody comes in (`ZAP_ENFORCE_DOMAIN`).

A peer that may not come in is told 300, not 400. On 400 libzmq's client gives up for good, and a consumer whose key is added
later would have to be restarted. On 300 the connection ends, at once or after `HANDSHAKE_SECONDS`, and is tried again at the
client's own pace: who is added comes in by itself.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import Any, Final

import zmq

from kvevents.certificates import AllowList, key_text
from kvevents.config import Curve
from kvevents.errors import ConfigError

logger = logging.getLogger(__name__)

ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
HANDSHAKE_SECONDS: Final = 10.0
"""How long a connection may take to introduce itself, and how long one that was refused may linger."""
LOG_EVERY: Final = 60.0
"""Seconds between lines about refusals at one end; those between are counted and told with the next."""

_ACCEPTED: Final = (b"200", b"OK")
_REFUSED: Final = (b"300", b"unknown key")

Context = zmq.Context[Any]


class Admission:
    """The keys of one end, and with an allow-list who may connect to its sockets. Close it after them."""

    def __init__(self, curve: Curve, label: str) -> None:
        """Raises `ConfigError` when the allow-list cannot be used."""
        self.refused = 0
        """Connections turned away because their key is not allowed."""
        self.domain = f"kvevents-{next(_numbers)}"
        self.allowed = None if curve.allowed is None else AllowList(curve.allowed)
        self._curve = curve
        self._label = label
        self._desk: _Desk | None = None
        self._told, self._told_at = 0, float("-inf")
        self._faults: list[str] = []
        if self.allowed is not None:
            self.allowed.refresh()
            if self.allowed.faults:
                raise ConfigError(f"curve.allowed: {self.allowed.faults[0]}")

    def apply(self, socket: Any) -> None:
        """Set keys and allow-list on a socket, before it binds or connects."""
        self._curve.apply(socket)
        if self.allowed is not None:
            socket.zap_domain = self.domain.encode()
            socket.handshake_ivl = int(1000 * HANDSHAKE_SECONDS)

    def sit_at(self, desk: _Desk) -> None:
        """Remember where questions about these sockets are answered."""
        self._desk = desk

    def admits(self, key: bytes, address: str) -> bool:
        """Whether the owner of `key` (32 bytes) may connect; counts and tells when not."""
        if self.allowed is None:
            return True
        self.allowed.refresh()
        self._tell_faults(self.allowed.faults)
        if key in self.allowed.keys:
            return True
        self.refused += 1
        if monotonic() - self._told_at >= LOG_EVERY:
            self._tell(f", the last one from {address} with the key {key_text(key)}")
        return False

    def close(self) -> None:
        """Let nobody in any more. May be called again."""
        desk, self._desk = self._desk, None
        if desk is not None:
            _leave(desk, self)
        if self.refused > self._told:
            self._tell("")

    def _tell(self, which: str) -> None:
        new = self.refused - self._told
        self._told, self._told_at = self.refused, monotonic()
        noun = "connection" if new == 1 else "connections"
        logger.warning("%s: refused %d %s of unknown keys%s; curve.allowed says who may connect", self._label, new, noun, which)

    def _tell_faults(self, faults: list[str]) -> None:
        if faults != self._faults:
            self._faults = faults
            if faults:
                logger.warning("%s: %d of the allowed keys cannot be used: %s", self._label, len(faults), faults[0])


def admit(context: Context, curve: Curve | None, label: str) -> Admission | None:
    """What the sockets of one end are to be set up with, in `context`; None without keys. `label` is for the log.

    Raises `ConfigError` for an allow-list that cannot be used, and when something else answers ZAP's questions in `context`.
    """
    if curve is None:
        return None
    admission = Admission(curve, label)
    if admission.allowed is not None:
        with _state.lock:
            desk = _state.desks.get(context.underlying)
            if desk is None:
                desk = _state.desks[context.underlying] = _Desk(context)
            desk.domains[admission.domain.encode()] = admission
        admission.sit_at(desk)
    return admission


class _Desk:
    """Answers for one context, in a thread of its own, as long as there is an allow-list in it."""

    def __init__(self, context: Context) -> None:
        self.domains: dict[bytes, Admission] = {}
        self.place = context.underlying
        self.process = os.getpid()
        # Not context.socket(): an asyncio context has other sockets, and destroy() would close this one under its thread.
        self._socket: zmq.Socket[bytes] = zmq.Socket(context, zmq.REP)
        self._socket.linger = 0
        try:
            self._socket.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            self._socket.close()
            text = f"curve.allowed: something else decides who may connect in this ZeroMQ context ({ZAP_ENDPOINT}: {error})"
            raise ConfigError(f"{text}; give kvevents a context of its own, or leave allowed out and decide there") from error
        self._ear, self._bell = os.pipe()
        self._thread = threading.Thread(target=self._run, name="zmq-admission", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Free the context of it; returns when that is done."""
        os.write(self._bell, b"\0")
        self._thread.join()
        os.close(self._bell)
        os.close(self._ear)

    def _run(self) -> None:
        with suppress(zmq.ContextTerminated):
            while self._asked():
                self._socket.send_multipart(self._answer(self._socket.recv_multipart()))
        # Before the socket is closed, on which the end of the context waits: another one may be made at the same place then.
        if _state.desks.get(self.place) is self:
            del _state.desks[self.place]
        with suppress(zmq.ZMQError):  # close() alone frees the name some time later
            self._socket.unbind(ZAP_ENDPOINT)
        self._socket.close()

    def _asked(self) -> bool:
        """Wait for a question; False when told to stop."""
        ready = dict(zmq.zmq_poll([(self._ear, zmq.POLLIN), (self._socket, zmq.POLLIN)], -1))
        return self._ear not in ready

    def _answer(self, question: list[bytes]) -> list[bytes]:
        version, request, domain, address, _, mechanism, *credentials = question
        status = _ACCEPTED if mechanism == b"CURVE" and self._admits(domain, address, credentials[0]) else _REFUSED
        return [version, request, *status, b"", b""]

    def _admits(self, domain: bytes, address: bytes, key: bytes) -> bool:
        if not domain:
            # A CURVE server without an allow-list in the same context: whoever knows its key may connect, as without a desk.
            return True
        admission = self.domains.get(domain)
        return admission is not None and admission.admits(key, address.decode(errors="replace"))


class _State:
    """The desks of this process by the address of their context."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.desks: dict[int, _Desk] = {}


_numbers = count()
_state = _State()


def _leave(desk: _Desk, admission: Admission) -> None:
    if desk.process != os.getpid():
        return
    with _state.lock:
        desk.domains.pop(admission.domain.encode(), None)
        if not desk.domains:
            if _state.desks.get(desk.place) is desk:
                del _state.desks[desk.place]
            desk.stop()


def _forget() -> None:
    """In a forked child: neither the threads nor who held the lock are there."""
    _state.lock = threading.RLock()
    _state.desks = {}


os.register_at_fork(after_in_child=_forget)
