"""The connection to a plane's NATS servers: connects within a timeout, reconnects until closed, and logs the state."""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, Final
from urllib.parse import urlsplit

import nkeys  # type: ignore[import-untyped]  # it has no types
from nats import errors
from nats.aio.client import Client, Server
from nats.js.api import AccountInfo
from nats.js.errors import APIError

from kvevents.backoff import Backoff
from kvevents.errors import ConfigError, PlaneError
from kvevents_plane.nats_client import PlaneClient
from kvevents_plane.nats_errors import HINTS, PlaneFault, classify_error, error_text, map_errors
from kvevents_plane.settings import ConnectionLimits, PlaneSettings

STABLE_SECONDS: Final = 1.0
"""Seconds after which a connection counts as stable. When it ends, the pauses between attempts start short again."""
MAX_LOGGED_ERRORS: Final = 16
"""Maximum number of errors that are logged between two changes of state. Of equal errors, only the first is logged."""
MIN_VERSION: Final = (2, 11)
"""Oldest supported release of nats-server: the oldest one that still receives fixes."""

_FIRST_HINTS: Final[dict[PlaneFault, str]] = {
    "away": "check that it runs, and its name and port",
    "denied": "it rejects this login: check user and password, token, credentials or nkey",
    "timeout": "check that it is a NATS server, and the network in between",
}
"""Hints for faults of the first connection. Hints in this table replace hints in `HINTS`."""
_NO_JETSTREAM_CODES: Final = frozenset({None, 10035, 10039, 10076})
"""Error codes of an account without JetStream: no responder, JSNoAccountErr, JSNotEnabledForAccountErr, JSNotEnabledErr."""
_NATS_EXCEPTIONS: Final = (errors.Error, OSError, ValueError)
"""Exceptions that show that a server is unreachable or speaks another protocol. nats-py raises them or does not catch them."""
_STATE_LOGS: Final = {
    "connected": (logging.INFO, "%s: connected to %s"),
    "reconnecting": (logging.WARNING, "%s: lost the connection to %s; reconnecting"),
    "closed": (logging.INFO, "%s: closed the connection to %s"),
}

log = logging.getLogger(__name__)
DEFAULT_LIMITS: Final = ConnectionLimits()


async def connect(settings: PlaneSettings, *, name: str, on_state: Callable[[str], None] | None = None) -> PlaneClient:
    """Connect to a server and return the client, which reconnects to this or another server of the cluster until it is closed.

    The servers list the client under `name`. Each change of state calls `on_state` with `connected`, `reconnecting` or
    `closed`. This callback runs in the event loop, and must neither block nor raise an exception.

    Each server is tried one time. Raises `PlaneError` with the reason for each server, and `ConfigError` for invalid files.
    """
    options = client_options(settings)
    loop = asyncio.get_running_loop()
    end = loop.time() + settings.connection.connect_seconds
    addresses = random.sample(settings.addresses, len(settings.addresses))
    failed: list[tuple[str, Exception]] = []
    for count, address in enumerate(addresses):
        try:
            async with asyncio.timeout((end - loop.time()) / (len(addresses) - count)):
                client = await _open(settings, options, address, ConnectionLog(name, on_state, settings.connection, addresses))
        except _NATS_EXCEPTIONS as error:
            failed.append((address, error))
        else:
            client.add_servers(addresses)
            return client
    raise _connection_error(failed) from failed[-1][1]


@asynccontextmanager
async def open_client(
    settings: PlaneSettings, *, name: str, on_state: Callable[[str], None] | None = None, wait_seconds: float = 0.0
) -> AsyncIterator[PlaneClient]:
    """Yield a client from `connect`, and close the client at the end. Wait for absent servers for `wait_seconds`."""
    end, logged = time.monotonic() + wait_seconds, ""
    while True:
        try:
            client = await connect(settings, name=name, on_state=on_state)
            break
        except PlaneError as error:
            if error.fault != "away" or time.monotonic() >= end:
                raise
            if str(error) != logged:
                logged = str(error)
                log.warning("%s: waiting for at most %g s: %s", name, wait_seconds, error)
        await asyncio.sleep(settings.connection.reconnect_seconds)
    try:
        yield client
    finally:
        await close(client, settings.connection.close_seconds)


async def close(client: PlaneClient, seconds: float = DEFAULT_LIMITS.close_seconds) -> None:
    """Send published messages for at most `seconds`, then close the connection within another `seconds`."""
    with suppress(*_NATS_EXCEPTIONS):
        async with asyncio.timeout(seconds):
            if client.is_connected:
                await client.flush()
    with suppress(*_NATS_EXCEPTIONS):
        async with asyncio.timeout(seconds):
            await client.close()


async def require_jetstream(client: Client) -> AccountInfo:
    """Return the JetStream usage and limits of this account.

    Raises `PlaneError` if JetStream is disabled or unreachable, or the server is older than `MIN_VERSION`.
    """
    version = client.connected_server_version
    with suppress(ValueError):  # a custom build of the server can have a version without numbers
        if (version.major, version.minor) < MIN_VERSION:
            raise PlaneError(
                f"the NATS server{_server_suffix(client)} has version {version.major}.{version.minor}.{version.patch}; a plane "
                f"needs nats-server {'.'.join(map(str, MIN_VERSION))} or newer: update it",
                fault="old",
            )
    try:
        with map_errors("querying JetStream"):
            return await client.jetstream(timeout=DEFAULT_LIMITS.close_seconds).account_info()
    except PlaneError as error:
        # An account whose leader is missing, or that has no permission for the query, gets errors with other codes.
        if not isinstance(error.__cause__, APIError) or error.__cause__.err_code not in _NO_JETSTREAM_CODES:
            raise
        raise PlaneError(
            f"JetStream is disabled for this account{_server_suffix(client)}; a plane needs `jetstream` in the configuration "
            "of the servers, and of its account if there are accounts",
            fault=error.fault,
        ) from error


def _server_suffix(client: Client) -> str:
    server = client.connected_url
    return f" at {server.hostname}:{server.port}" if server is not None else ""


# --- the first connection ----------------------------------------------------------------------------------------------------


async def _open(settings: PlaneSettings, options: dict[str, Any], address: str, states: ConnectionLog) -> PlaneClient:
    client = PlaneClient(needs_tls=settings.needs_tls)
    try:
        await client.connect([address], **options, **states.callbacks(client))
        if not client.is_connected:  # the server has closed the connection instead of answering the first PING
            raise errors.UnexpectedEOF  # noqa: TRY301 - nats-py raises nothing in this case
    except BaseException:
        states.stop_logging()
        await close(client, settings.connection.close_seconds)
        raise
    client.options["connect_timeout"] = settings.connection.attempt_seconds
    states.set_state("connected")
    return client


def _connection_error(failed: list[tuple[str, Exception]]) -> PlaneError:
    faults: list[PlaneFault] = [classify_error(error) or "away" for _, error in failed]
    fault = faults[0] if len(set(faults)) == 1 else "away"
    reasons = "; ".join(f"{address}: {error_text(error)}" for address, error in failed)
    which = "the NATS server" if len(failed) == 1 else "any of the NATS servers"
    return PlaneError(f"cannot use {which} at {reasons}; {_FIRST_HINTS.get(fault, HINTS[fault])}", fault=fault)


# --- options of nats-py ------------------------------------------------------------------------------------------------------


def client_options(settings: PlaneSettings) -> dict[str, Any]:
    """Return the arguments of nats-py's `connect`. Raises `ConfigError` for invalid files."""
    limits = settings.connection
    options: dict[str, Any] = {
        "tls": _tls_context(settings),
        "tls_hostname": settings.tls_hostname,
        "connect_timeout": limits.connect_seconds,
        "max_reconnect_attempts": -1,
        "ping_interval": limits.ping_seconds,
        "max_outstanding_pings": limits.max_unanswered_pings,
        "pending_size": limits.pending_bytes,
        "inbox_prefix": settings.inbox_prefix,
    }
    if settings.credentials is not None:
        _sign(settings.read_credentials().seed, "")
        options["user_jwt_cb"] = lambda: _read_login(settings)
        options["signature_cb"] = lambda nonce: _read_login(settings, nonce)
    elif settings.nkey is not None:
        options["nkeys_seed_str"] = settings.read_seed()
        _sign(settings.read_seed(), "")
    else:
        options |= settings.login._asdict()
    return options


def _tls_context(settings: PlaneSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca)
        if settings.tls_certificate is not None:
            context.load_cert_chain(settings.tls_certificate, settings.tls_key, password=_refuse_password)
    except OSError as error:
        raise ConfigError(
            "tls_ca, tls_certificate or tls_key is not a valid PEM file, or certificate and key do not match:"
            f" {error_text(error)}"
        ) from error
    return context


def _refuse_password() -> str:
    raise ConfigError("the key in tls_key is encrypted with a password; store the key without one")


def _read_login(settings: PlaneSettings, nonce: str | None = None) -> bytes:
    """Return the JWT in the credentials file, or the signature of a nonce.

    Raises `PlaneError`, which nats-py counts as a failed attempt.
    """
    try:
        credentials = settings.read_credentials()
        return credentials.jwt.encode() if nonce is None else _sign(credentials.seed, nonce)
    except ConfigError as error:
        raise PlaneError(str(error), fault="denied") from error


def _sign(seed: str, nonce: str) -> bytes:
    """Sign a server's nonce. Raises `ConfigError`."""
    try:
        signature: bytes = nkeys.from_seed(bytearray(seed.encode())).sign(nonce.encode())
    except (nkeys.NkeysError, ValueError) as error:
        raise ConfigError(f"the seed in the file of credentials or nkey is invalid: {error}") from error
    return base64.b64encode(signature)


# --- reconnects and the log --------------------------------------------------------------------------------------------------


class ReconnectPolicy:
    """Selects the next server: tries all servers in random order and, after a growing pause, all servers again."""

    def __init__(self, limits: ConnectionLimits, addresses: Iterable[str] = ()) -> None:
        """`addresses` are the configured servers, which belong to the cluster even if no INFO lists them."""
        self._configured = {urlsplit(address).netloc for address in addresses}
        self._backoff = Backoff(initial=limits.reconnect_seconds, maximum=limits.max_reconnect_seconds)
        self._tried: set[str] = set()

    def start(self, duration: float) -> None:
        """Begin a new series of attempts to connect. The previous connection lasted `duration` seconds."""
        self._tried.clear()
        if duration >= STABLE_SECONDS:
            self._backoff.reset()

    def choose(self, servers: list[Server], info: Any) -> tuple[Server, float]:
        """Return one of `servers` and the seconds to wait before connecting to it.

        `info` is the newest INFO of a server and can have any content. Servers that INFO no longer lists have left the cluster.
        """
        urls: Any = info.get("connect_urls") if isinstance(info, dict) else ()
        present = self._configured | {*map(str, urls if isinstance(urls, list) else ())}
        servers = [server for server in servers if server.uri.netloc in present] or servers
        left = [server for server in servers if server.uri.netloc not in self._tried]
        pause = 0.0
        if not self._tried or not left:
            self._tried.clear()
            left, pause = servers, self._backoff.next_delay()
        chosen = random.choice(left)  # noqa: S311 - numbers that need not be secret
        self._tried.add(chosen.uri.netloc)
        return chosen, pause


class ConnectionLog:
    """Logs each change of state and each different error of one connection, and calls `on_state` at each change of state."""

    def __init__(
        self,
        name: str,
        on_state: Callable[[str], None] | None,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        addresses: Iterable[str] = (),
    ) -> None:
        self._name = name
        self._on_state = on_state
        self._state: str | None = None
        self._logged: set[str] = set()
        self._policy = ReconnectPolicy(limits, addresses)
        self._since = 0.0

    def callbacks(self, client: Client) -> dict[str, Any]:
        """Return the callback arguments of nats-py's `connect`."""
        self._client = client
        return {
            "name": self._name,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnect,
            "reconnected_cb": self._on_reconnect,
            "closed_cb": self._on_close,
            "reconnect_to_server_handler": self._policy.choose,
        }

    def set_state(self, state: str) -> None:
        """Change the state to `connected`, `reconnecting` or `closed`."""
        if state == self._state:
            return
        self._state = state
        self._since = time.monotonic()
        self._logged.clear()
        url = self._client.connected_url
        log.log(*_STATE_LOGS[state], self._name, f"{url.hostname}:{url.port}" if url is not None else "its servers")
        if self._on_state is not None:
            self._on_state(state)

    def stop_logging(self) -> None:
        """Log nothing from now on, because the first connection has failed."""
        self._state = "closed"

    async def _on_error(self, error: Exception) -> None:
        if self._state is None:  # `connect` reports errors of the first connection
            raise error
        text = error_text(error)
        if self._state != "closed" and text not in self._logged and len(self._logged) < MAX_LOGGED_ERRORS:
            self._logged.add(text)
            log.warning("%s: %s", self._name, text)

    async def _on_disconnect(self) -> None:
        if not self._client.is_closed and self._state == "connected":
            self._policy.start(time.monotonic() - self._since)
            self.set_state("reconnecting")

    async def _on_reconnect(self) -> None:
        self.set_state("connected")

    async def _on_close(self) -> None:
        self.set_state("closed")
