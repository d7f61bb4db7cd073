"""The server process: checks of the settings, sockets, and signals."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import resource
import signal
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from kvevents.client.schemas import SelectRequest
from kvevents.errors import ConfigError
from kvevents.prometheus import require_prometheus
from kvevents.service.access import parse_hosts, read_tokens
from kvevents.service.allow_list import EndpointAllowList
from kvevents.service.certificates import check_tls
from kvevents.service.data_plane import DURATION_BOUNDS, MATCH_RATIO_BOUNDS
from kvevents.service.discovery.provider import bracket_host
from kvevents.service.discovery.runner import check_engines
from kvevents.service.http.app import App
from kvevents.service.http.routes import ENDPOINTS, ROUTES
from kvevents.service.index_source import OpenIndexSource
from kvevents.service.service import Service
from kvevents.service.settings import Limits, ServiceSettings
from kvevents.zeromq.sockets import raise_descriptor_limit

RESERVED_DESCRIPTORS: Final = 256
"""Number of file descriptors kept free of client connections. The subscriber checks whether they suffice for engines."""


def fit_clients(limits: Limits) -> tuple[Limits, str]:
    """Raise the soft limit of open files, and lower `max_clients` if so many connections would exceed this limit.

    Return the limits, and a warning if `max_clients` was lowered, else an empty text.
    """
    descriptors = raise_descriptor_limit()
    room = max(descriptors - RESERVED_DESCRIPTORS - limits.reserved_clients, descriptors // 4)
    if descriptors == resource.RLIM_INFINITY or limits.max_clients <= room:
        return limits, ""
    warning = (
        f"limits.max_clients is lowered from {limits.max_clients} to {room}, because the process may open {descriptors} files: "
        "raise that limit (ulimit -Hn, LimitNOFILE), or lower the setting"
    )
    return msgspec.structs.replace(limits, max_clients=room), warning


log = logging.getLogger(__name__)

STOP_SECONDS: Final = 1.0
"""Maximum number of seconds to finish requests in progress after the data plane has drained."""
SEND_BUFFER_BYTES: Final = 1 << 18
"""Size of a connection's send buffer in bytes. A client that does not read fills this buffer; Linux' default is megabytes."""
KEEP_ALIVE_OPTIONS: Final[Mapping[str, int]] = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""TCP options of client connections, as far as the system has these options. A dead client is detected after 60 s."""
MAX_THREADS: Final = 8
"""Maximum number of threads of the data plane, which has one thread for each CPU up to this number."""
HEAP_RESERVE_BYTES: Final = 64 << 20
"""Maximum size in bytes of free memory that the process keeps for the next large request."""


def serve(
    config: ServiceSettings,
    sources_file: Path | None,
    announce: Callable[[str], None],
    open_source: OpenIndexSource | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, with the sources in `config` and in the file `sources_file`.

    `announce` is called with the URL of the service. `open_source` opens an index source that replaces the engines in the
    settings. `check` must have accepted the settings.
    """
    _keep_heap()
    listening = _listen(config.host, config.port)
    try:
        limits, limit_warning = fit_clients(config.limits)
        service = Service(msgspec.structs.replace(config, limits=limits), sources_file, open_source)
        service.limit_warning = limit_warning
        url = f"{'http' if config.tls is None else 'https'}://{bracket_host(config.host)}:{listening.getsockname()[1]}"
        asyncio.run(_Server(service, announce, url).run_at(listening))
    finally:
        listening.close()


def check(config: ServiceSettings, sources_file: Path | None, origin: Callable[[str], str | None]) -> None:
    """Raise `ConfigError` or `MissingDependencyError` for settings with which `serve` would fail.

    Messages contain the `origin` of a setting, such as its file. Ignore whether a process has locked the state folder.
    """
    require_prometheus()
    path = "access.tokens"
    try:
        read_tokens(config.access)
        path = "allow"
        EndpointAllowList(config.allow)
        path = "state_dir"
        if config.state_dir is not None:
            _check_folder(Path(config.state_dir))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}" if (name := origin(path)) else str(error)) from error
    if config.tls is not None:
        check_tls(config.tls)
    check_engines(config, sources_file)
    _listen(config.host, config.port).close()


def _check_folder(folder: Path) -> None:
    """Raise `ConfigError` if the folder cannot be created or written. Remove everything that the check created."""
    created_folders: list[Path] = []
    try:
        for path in reversed((folder, *folder.parents)):
            if not path.exists():
                path.mkdir(mode=0o700)
                created_folders.append(path)
        with tempfile.NamedTemporaryFile(prefix=".", suffix=".tmp", dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"state_dir {folder} cannot be used: {error.strerror or error}") from error
    finally:
        for path in reversed(created_folders):
            with suppress(OSError):
                path.rmdir()


class _Server:
    """The running service, from its start to a signal.

    After a signal the server accepts no new connections, finishes the requests in progress and saves the state.
    """

    def __init__(self, service: Service, announce: Callable[[str], None], url: str) -> None:
        self._service = service
        self._app = App(service)
        self._announce = announce
        self._url = url
        self._end_requested = asyncio.Event()

    async def run_at(self, listening: socket.socket) -> None:
        """Serve at a socket until a signal arrives."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        service = self._service
        await service.start()
        try:
            if not self._end_requested.is_set():
                try:
                    listening.listen(1_024)  # two sockets can have bound a port to which neither listens
                except OSError as error:
                    raise _listen_error(service.settings.host, service.settings.port, error) from error
                settings = data_plane_settings(service, answers_queries=not self._app.has_spans)
                service.data_plane.start(listening, self._app, settings)
                listening.close()  # The data plane has a duplicate of the descriptor.
                self._announce(self._url)
            await self._end_requested.wait()
            await service.data_plane.drain(service.settings.limits.drain_seconds)
            await self._app.stop(STOP_SECONDS)
            await service.data_plane.close()
        finally:
            await service.stop()

    def _stop(self, number: int) -> None:
        """At SIGTERM, become not ready, and end after `grace_seconds`. At SIGINT or a second signal, end at once."""
        service = self._service
        grace = service.settings.ready.grace_seconds if number == signal.SIGTERM and not service.is_ending else 0.0
        service.is_ending = True
        service.data_plane.refresh()
        if grace:
            log.info("no longer ready for queries; the process ends in %g s", grace)
            asyncio.get_running_loop().call_later(grace, self._request_end)
        else:
            self._request_end()

    def _request_end(self) -> None:
        if self._end_requested.is_set():
            self._service.data_plane.abort()
        self._end_requested.set()
        self._service.fleet.event_bus.close()


def data_plane_settings(service: Service, *, answers_queries: bool) -> Mapping[str, Any]:
    """Return the settings of the data plane, in the form that `native/server/src/settings.rs` reads."""
    config = service.settings
    policy = {
        "tokens": service.tokens,
        "anonymous": config.access.anonymous_role,
        "host": config.host.lower(),
        "is_loopback": config.is_loopback,
        "hosts": parse_hosts(config.allowed_hosts),
    }
    defaults = SelectRequest(model="any", tokens=[])
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "limits": config.limits,
        "policy": policy,
        "answers_queries": answers_queries,
        "select": {name: getattr(defaults, name) for name in ("tiers", "trust", "wait_weight", "load_weight")},
        "endpoints": {
            path: {name: {"role": route.role, "probe": route.is_probe} for name, route in methods.items()}
            for path, methods in ROUTES.items()
        },
        "probes": [endpoint.path for endpoint in ENDPOINTS if endpoint.is_probe or endpoint.pool == "metrics"],
        "seconds": DURATION_BOUNDS,
        "depths": MATCH_RATIO_BOUNDS,
        "threads": min(MAX_THREADS, cpus),
        "tls": config.tls,
    }


def _keep_heap() -> None:
    """Make glibc keep the memory of large bodies: returning it to the system would take longer than the request itself."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-3, HEAP_RESERVE_BYTES // 2)  # M_MMAP_THRESHOLD
        mallopt(-1, HEAP_RESERVE_BYTES)  # M_TRIM_THRESHOLD


def _listen(host: str, port: int) -> socket.socket:
    listening = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE_OPTIONS.items():
            if hasattr(socket, name):
                listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        listening.bind((host, port))
    except OSError as error:
        if listening is not None:
            listening.close()
        raise _listen_error(host, port, error) from error
    return listening


def _listen_error(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen at {host} port {port}: {error.strerror or error}; change --host or --port")
