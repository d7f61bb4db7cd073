"""The process: uvicorn around the application, started and ended as an operator expects."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import uvicorn
import uvloop

from kvevents.errors import ConfigError
from kvevents.plane.connection import check_connection
from kvevents.service.access import Access, Role
from kvevents.service.allow_list import AllowList
from kvevents.service.config import ServiceConfig, Tls
from kvevents.service.discovery.runner import check_engines
from kvevents.service.hot_prefixes import MAX_DEPTH, SAMPLES_PER_SECOND
from kvevents.service.http.app import App
from kvevents.service.http.origins import OriginPolicy
from kvevents.service.http.routes import ENDPOINTS
from kvevents.service.open_files import fit_clients
from kvevents.service.selection import terms_of
from kvevents.service.service import Service
from kvevents.service.shards.peers import Peers

log = logging.getLogger(__name__)

BACKLOG: Final = 1_024
SEND_BYTES: Final = 1 << 18
"""Of an answer that the system keeps for a client that does not read, which else are megabytes."""
MAX_THREADS: Final = 8
"""Threads of the data plane: the machine's CPUs, up to so many."""
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
        limits, lowered = fit_clients(config.limits)
        service = Service(msgspec.structs.replace(config, limits=limits), watched)
        service.lowered = lowered
        server = _Server(service, announce, _url(config, listening))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.run_at(listening))
    finally:
        listening.close()


def check(config: ServiceConfig, watched: Path | None) -> None:
    """Raise `ConfigError` for what `serve` refuses, but for a state folder that another process has."""
    check_settings(config, watched)
    _listen(config.host, config.port).close()


def check_settings(config: ServiceConfig, watched: Path | None) -> None:
    """Raise `ConfigError` for settings that `kvevents serve` cannot start with, and `MissingDependencyError`."""
    Access(config.access)
    AllowList(config.allow)
    if config.tls is not None:
        _check_tls(config.tls)
    if config.plane is not None:
        check_connection(config.plane)
    if config.shard is not None:
        Peers(config.shard)
    if config.state_dir is not None:
        _check_folder(Path(config.state_dir))
    check_engines(config, watched)


def _check_tls(tls: Tls) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    file = tls.certificate
    try:
        for file in (tls.certificate, tls.key, *([tls.client_ca] if tls.client_ca is not None else [])):
            Path(file).read_bytes()
        file = tls.certificate
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
        if tls.client_ca is not None:
            file = tls.client_ca
            context.load_verify_locations(tls.client_ca)
    except (OSError, ValueError) as error:  # ssl's errors are both
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"tls cannot be used: {file}: {reason}; certificate, key and client_ca are PEM files, the key without password"
        ) from error


def _check_folder(folder: Path) -> None:
    """Make the folder, write there, and leave no trace."""
    made: list[Path] = []
    try:
        for each in reversed((folder, *folder.parents)):
            if not each.exists():
                each.mkdir(mode=0o700)
                made.append(each)
        with tempfile.NamedTemporaryFile(prefix=".", suffix=".tmp", dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"state_dir {folder} cannot be used: {error.strerror or error}") from error
    finally:
        for each in reversed(made):
            with suppress(OSError):
                each.rmdir()


class _Server(uvicorn.Server):
    """uvicorn's, behind the data plane, with signals that mean: no new connections, end what is under way, keep what is known.

    It listens nowhere: the data plane hands it connections.
    """

    def __init__(self, service: Service, announce: Callable[[str], None], url: str) -> None:
        self._service = service
        self._app = App(service)
        super().__init__(uvicorn.Config(self._app, **_OPTIONS))
        self._announce = announce
        self._url = url
        self._listening: socket.socket | None = None
        self._accepting: set[asyncio.Future[Any]] = set()

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
        service.data_plane.refresh()
        if grace:
            log.info("not ready any more; ending in %g s", grace)
            asyncio.get_running_loop().call_later(grace, self._end)
        else:
            self._end()

    def _end(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._service.fleet.event_bus.close()
        if self.force_exit:
            self._service.data_plane.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        if self._listening is not None and not self.should_exit:
            self._listening.listen(BACKLOG)
            answers_queries = self._service.shards is None and not self._app.has_spans
            settings = _data_plane_settings(self._service, answers_queries=answers_queries)
            self._service.data_plane.start(self._listening, self._accept, settings)
            self._listening.close()  # the data plane has it
            self._announce(self._url)

    def _accept(self, connection: socket.socket) -> None:
        """Serve a connection that the data plane has made."""

        def protocol() -> asyncio.Protocol:
            kind: Any = self.config.http_protocol_class
            made: asyncio.Protocol = kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
            return made

        connection.setblocking(False)
        task = asyncio.ensure_future(asyncio.get_running_loop().connect_accepted_socket(protocol, connection))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def run_at(self, listening: socket.socket) -> None:
        """Serve at a socket until a signal comes."""
        self._listening = listening
        await self._service.start()
        try:
            await self.serve([])
        finally:
            await self._service.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what is in progress; connections that have not sent anything are no reason to wait."""
        await self._service.data_plane.drain(self._service.config.limits.drain_seconds)
        await super().shutdown(sockets)
        await self._service.data_plane.close()


_OPTIONS: Final[dict[str, Any]] = {
    "log_config": None,
    "access_log": False,
    "server_header": False,
    "proxy_headers": False,
    "ws": "none",
    "lifespan": "off",
    "interface": "asgi3",
    "backlog": BACKLOG,
    "timeout_keep_alive": 3_600,  # connections are the data plane's, which keeps those that it has use for
    "timeout_graceful_shutdown": 1,  # it has waited before
}


def _data_plane_settings(service: Service, *, answers_queries: bool) -> Mapping[str, Any]:
    """What `native/server/src/settings.rs` reads."""
    config, access = service.config, service.access
    policy = OriginPolicy.of(config, access)
    paths: dict[str, list[str]] = {}
    for endpoint in ENDPOINTS:
        paths.setdefault(endpoint.path, []).append(endpoint.method)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "limits": config.limits,
        "tokens": [digest.hex() for digest in access.digests(Role.READ)],
        "has_tokens": bool(config.access.tokens),
        "is_open": access.anonymous.role >= Role.READ,
        "checks_host": policy.checks_host,
        "host": config.host,
        "names": [name for name in policy.names if "*" not in name and "/" not in name],
        "answers_queries": answers_queries,
        "select": terms_of(),
        "paths": paths,
        "probes": [endpoint.path for endpoint in ENDPOINTS if endpoint.probe],
        "seconds": service.metrics.DURATION_BOUNDS,
        "depths": service.metrics.MATCH_RATIO_BOUNDS,
        "sample_blocks": MAX_DEPTH,
        "samples": SAMPLES_PER_SECOND,
        "threads": min(MAX_THREADS, cpus),
        "tls": config.tls,
    }


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
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
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
