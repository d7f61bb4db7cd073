"""The server process: checks of the settings, sockets, signals, and uvicorn behind the data plane."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import signal
import socket
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
from kvevents.service.allow_list import EndpointAllowList
from kvevents.service.certificates import check_tls
from kvevents.service.discovery.runner import check_engines
from kvevents.service.http.app import App, OriginPolicy
from kvevents.service.http.routes import ENDPOINTS
from kvevents.service.selection import terms_of
from kvevents.service.service import Service
from kvevents.service.settings import Limits, ServiceSettings
from kvevents.zeromq.sockets import raise_descriptor_limit

RESERVED_FILES: Final = 256
"""Files, pipes and sockets that are not client connections. The subscriber checks the room for its engines itself."""


def fit_clients(limits: Limits) -> tuple[Limits, str]:
    """Raise the soft limit of open files, and fit `max_clients` into it.

    Returns the limits and a warning, which is empty if `max_clients` did not have to be lowered.
    """
    raised = raise_descriptor_limit()
    if raised == resource.RLIM_INFINITY:
        return limits, ""
    room = max(raised - RESERVED_FILES - limits.reserved_clients, raised // 4)
    if limits.max_clients <= room:
        return limits, ""
    warning = (
        f"limits.max_clients is lowered from {limits.max_clients} to {room}, because the process may open {raised} files: "
        "raise that limit (ulimit -Hn, LimitNOFILE), or lower the setting"
    )
    return msgspec.structs.replace(limits, max_clients=room), warning


log = logging.getLogger(__name__)

BACKLOG: Final = 1_024
SEND_BYTES: Final = 1 << 18
"""Size of a connection's send buffer. The system's default is megabytes for each client that does not read."""
KEEP_ALIVE: Final[Mapping[str, int]] = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""TCP options of clients' connections, as far as the system has them: a dead client is noticed after 60 s."""
MAX_THREADS: Final = 8
"""Most threads of the data plane; it has one for each CPU up to this number."""
HEAP_RESERVE_BYTES: Final = 64 << 20
"""Freed memory that the process does not return to the system, for the next large request."""
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3


def serve(config: ServiceSettings, watched: Path | None, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, with the sources of a `watched` file beside those of `config`.

    `announce` is called with the URL. Raises `ConfigError` for settings that this machine cannot provide.
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


def check(config: ServiceSettings, watched: Path | None) -> None:
    """Raise `ConfigError` for settings with which `serve` fails. A state folder in use by another process is accepted."""
    check_settings(config, watched)
    _listen(config.host, config.port).close()


def check_settings(config: ServiceSettings, watched: Path | None) -> None:
    """Raise `ConfigError` for settings that `kvevents serve` cannot start with, and `MissingDependencyError`."""
    Access(config.access)
    EndpointAllowList(config.allow)
    if config.tls is not None:
        check_tls(config.tls)
    if config.plane is not None:
        check_connection(config.plane)
    if config.state_dir is not None:
        _check_folder(Path(config.state_dir))
    check_engines(config, watched)


def _check_folder(folder: Path) -> None:
    """Check that the folder can be created and written, and remove everything that the check created."""
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
    """The uvicorn server behind the data plane, which passes connections to it: it does not listen itself.

    A signal ends it in order: no new connections, finish the requests in progress, save the state.
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
        """Replace uvicorn's handlers, which raise the signal again at the end: the exit code would be the signal's number."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _stop(self, number: int) -> None:
        """On SIGTERM, report not ready and end after the grace period. On SIGINT, or a second signal, end at once."""
        service = self._service
        grace = service.settings.ready.grace_seconds if number == signal.SIGTERM and not service.is_ending else 0.0
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
        """Listen, and announce the URL."""
        await super().startup(sockets)
        if self._listening is not None and not self.should_exit:
            self._listening.listen(BACKLOG)
            settings = data_plane_settings(self._service, answers_queries=not self._app.has_spans)
            self._service.data_plane.start(self._listening, self._accept, settings)
            self._listening.close()  # the data plane has a copy
            self._announce(self._url)

    def _accept(self, connection: socket.socket) -> None:
        """Serve a connection that the data plane opened."""

        def protocol() -> asyncio.Protocol:
            kind: Any = self.config.http_protocol_class
            made: asyncio.Protocol = kind(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
            return made

        connection.setblocking(False)
        task = asyncio.ensure_future(asyncio.get_running_loop().connect_accepted_socket(protocol, connection))
        self._accepting.add(task)
        task.add_done_callback(self._accepting.discard)

    async def run_at(self, listening: socket.socket) -> None:
        """Serve at a socket until a signal arrives."""
        self._listening = listening
        await self._service.start()
        try:
            await self.serve([])
        finally:
            await self._service.stop()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish the requests in progress. Connections without a request are closed at once."""
        await self._service.data_plane.drain(self._service.settings.limits.drain_seconds)
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
    "timeout_keep_alive": 3_600,  # the data plane decides which connections stay open
    "timeout_graceful_shutdown": 1,  # the data plane has drained before
}


def data_plane_settings(service: Service, *, answers_queries: bool) -> Mapping[str, Any]:
    """Return the settings of the data plane, as `native/server/src/settings.rs` reads them."""
    config, access = service.settings, service.access
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
        "threads": min(MAX_THREADS, cpus),
        "tls": config.tls,
    }


def _keep_heap() -> None:
    """Make glibc keep the memory of large bodies. To return it after each of them would cost more than the request."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, HEAP_RESERVE_BYTES // 2)
        mallopt(_M_TRIM_THRESHOLD, HEAP_RESERVE_BYTES)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _listen_error(host, port, error) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE.items():
            if hasattr(socket, name):
                listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise _listen_error(host, port, error) from error
    return listening


def _listen_error(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen at {host} port {port}: {error.strerror or error}; name another with --host and --port")


def _url(config: ServiceSettings, listening: socket.socket) -> str:
    scheme = "http" if config.tls is None else "https"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{scheme}://{host}:{listening.getsockname()[1]}"
