"""The process: uvicorn around the application, started and ended as an operator expects."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvicorn
import uvloop

from kvevents.errors import ConfigError
from kvevents.service.checking import check_settings
from kvevents.service.config import ServiceConfig
from kvevents.service.http.app import App
from kvevents.service.http.connections import Connection, Entry
from kvevents.service.http.lane import Lane
from kvevents.service.http.protocol import Protocol
from kvevents.service.http.turns import Turns, descriptor_of
from kvevents.service.service import Service

log = logging.getLogger(__name__)

BACKLOG: Final = 1_024
KEPT_BYTES: Final = 64 << 20
"""Freed memory that the process keeps for the next large request."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def serve(config: ServiceConfig, watched: Path | None, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, with the sources of a `watched` file beside those of `config`.

    `announce` is told the URL. Raises `ConfigError` for what the machine refuses.
    """
    check_settings(config, watched)
    _keep_heap()
    listening = _listen(config.host, config.port)
    try:
        server = _Server(Service(config, watched), announce, _url(config, listening))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.run_at(listening))
    finally:
        listening.close()


class _Server(uvicorn.Server):
    """uvicorn's, with signals that mean: no new connections, end what is under way, keep what is known."""

    def __init__(self, service: Service, announce: Callable[[str], None], url: str) -> None:
        self._service = service
        app = App(service)
        config = uvicorn.Config(app, **_options(service.config))
        config.load()
        tls, config.ssl = config.ssl, None  # `Entry` does the handshake, so that it counts as a connection
        config.http_protocol_class = _protocol(app, tls)
        super().__init__(config)
        self._announce = announce
        self._url = url

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours: uvicorn raises a signal again when all is done, which would end an orderly exit with its number."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        """SIGTERM has `/readyz` say no, and ends the service after the grace; SIGINT, or a second signal, ends it at once."""
        service = self._service
        grace = service.config.ready.grace_seconds if number == signal.SIGTERM and not service.is_ending else 0.0
        service.is_ending = True
        if grace:
            log.info("not ready any more; ending in %g s", grace)
            asyncio.get_running_loop().call_later(grace, self._end)
        else:
            self._end()

    def _end(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._service.fleet.announcer.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self._announce(self._url)

    async def run_at(self, listening: socket.socket) -> None:
        """Serve at a socket until a signal comes."""
        loop = asyncio.get_running_loop()
        self._service.fleet.alternation.questions = descriptor_of(loop)
        await self._service.start()
        sweeping = loop.create_task(self._service.connections.run())
        try:
            await self.serve(sockets=[listening])
        finally:
            sweeping.cancel()
            await self._service.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what is in progress; connections that have not sent anything are no reason to wait."""
        self._service.connections.close_silent()
        await super().shutdown(sockets)
        self._service.connections.close_all()


def _protocol(app: App, tls: ssl.SSLContext | None) -> Any:
    """What uvicorn makes for each connection: it reads requests in the fast lane, unless these need spans."""
    service = app.service
    turns = Turns(
        service.config.awake_microseconds / 1e6, before=service.fleet.alternation.follow, behind=service.lookups.count
    )

    def protocol(config: Any, server_state: Any, app_state: Any, _loop: Any = None) -> Entry:
        def make(connection: Connection) -> Any:
            general = partial(Protocol, app, connection, config, server_state, app_state, _loop)
            return general() if app.traces else Lane(app, turns, server_state.connections, general, connection)

        return Entry(service.connections, make, tls)

    return protocol


def _keep_heap() -> None:
    """Have glibc keep the memory of large bodies: giving it back after each of them costs more than all else."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES // 2)
        mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _refused(host, port, error) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise _refused(host, port, error) from error
    return listening


def _refused(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen at {host} port {port}: {error.strerror or error}; name another with --host and --port")


def _url(config: ServiceConfig, listening: socket.socket) -> str:
    scheme = "http" if config.tls is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listening.getsockname()[1]}"


def _options(config: ServiceConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "ws": "none",
        "lifespan": "off",
        "interface": "asgi3",
        "backlog": BACKLOG,
        "timeout_graceful_shutdown": config.limits.drain_seconds,
    }
    if config.tls is not None:
        options |= {"ssl_certfile": config.tls.certificate, "ssl_keyfile": config.tls.key}
        if config.tls.client_ca is not None:
            options |= {"ssl_ca_certs": config.tls.client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options
