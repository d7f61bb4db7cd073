"""The connection to a plane's NATS servers: made within a bound, and kept for as long as the process lives."""

from __future__ import annotations

import asyncio
import base64
import random
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from kvevents.errors import ConfigError, MissingDependencyError, PlaneError
from kvevents.plane.faults import HINTS, Fault, fault_of, text_of, told
from kvevents.plane.settings import Credentials, PlaneSettings
from kvevents.plane.voice import Voice

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.js.api import AccountInfo

    from kvevents.plane.client import PlaneClient

CONNECT_SECONDS: Final = 10.0
"""Until the first connection, over all servers: who starts a program wants to know soon, and its supervisor starts it again."""
ATTEMPT_SECONDS: Final = 2
"""For each step of an attempt to come back: a server that is there answers within milliseconds."""
PING_SECONDS: Final = 5
PINGS: Final = 2
"""Pings without an answer after which a connection is dead: a server that is stopped or cut off is left within 15 seconds."""
PENDING_BYTES: Final = 8 << 20
"""What may wait for the socket: publishing waits above it, and raises while there is no connection."""
CLOSE_SECONDS: Final = 5.0
"""For what was published to reach the server, and for the end."""

LEAST_VERSION: Final = (2, 11)
"""Of nats-server: the oldest that is tested with, and whose releases still get fixes."""

_FIRST_HINTS: Final[dict[Fault, str]] = {
    "away": "look whether it runs, and whether its name and port are these",
    "denied": "it does not take this login; look at user and password, token, credentials or nkey",
    "timeout": "look whether it is a NATS server, and what is in between",
}
"""In the place of `HINTS`, for the first connection."""
_NO_JETSTREAM: Final = frozenset({None, 10035, 10039, 10076})
"""Nobody takes requests of JetStream's; or JSNoAccountErr, JSNotEnabledForAccountErr, JSNotEnabledErr."""


def check_connection(settings: PlaneSettings) -> None:
    """Raise what `connect` raises before it asks any server: `ConfigError` and `MissingDependencyError`."""
    _require_nats(settings)
    _options(settings)


async def connect(settings: PlaneSettings, *, name: str, on_state: Callable[[str], None] | None = None) -> PlaneClient:
    """A client that is connected, and comes back to its servers, or others of their cluster, for as long as it is not closed.

    `name` is what the servers list it as. `on_state` is told `connected`, `reconnecting` and `closed` whenever it becomes
    so; it is called on the event loop and must neither block nor raise.

    Each server is tried once. Raises `PlaneError` that tells of each, `ConfigError` for files that are not what they should be,
    and `MissingDependencyError` without nats-py.
    """
    _require_nats(settings)
    options = _options(settings)
    loop = asyncio.get_running_loop()
    end = loop.time() + CONNECT_SECONDS
    addresses = random.sample(settings.addresses, len(settings.addresses))
    failed: list[tuple[str, Exception]] = []
    for count, address in enumerate(addresses):
        try:
            async with asyncio.timeout((end - loop.time()) / (len(addresses) - count)):
                client = await _open(settings, options, address, Voice(name, on_state))
        except _failures() as error:
            failed.append((address, error))
        else:
            client.add_servers(addresses)
            return client
    raise _unusable(failed) from failed[-1][1]


@asynccontextmanager
async def opened(
    settings: PlaneSettings, *, name: str, on_state: Callable[[str], None] | None = None
) -> AsyncIterator[PlaneClient]:
    """`connect`, and at the end `close`."""
    client = await connect(settings, name=name, on_state=on_state)
    try:
        yield client
    finally:
        await close(client)


async def close(client: PlaneClient) -> None:
    """Send what was published and end the connection, within `CLOSE_SECONDS`; what could not be sent by then is lost."""
    with suppress(*_failures()):
        async with asyncio.timeout(CLOSE_SECONDS):
            if client.is_connected:
                await client.flush()
    await _end(client)


async def require_jetstream(client: Client) -> AccountInfo:
    """What this account has and may have in JetStream.

    Raises `PlaneError` where JetStream is not enabled, or not reached, or older than `LEAST_VERSION`.
    """
    _require_version(client)
    try:
        with told("asking for JetStream"):
            return await client.jetstream(timeout=CLOSE_SECONDS).account_info()
    except PlaneError as error:
        if not _says_there_is_none(error.__cause__):
            raise
        server = client.connected_url
        where = f" at {server.hostname}:{server.port}" if server is not None else ""
        raise PlaneError(
            f"there is no JetStream for this account{where}; a plane needs `jetstream` in the servers' configuration, and in "
            "that of its account where there are accounts",
            fault=error.fault,
        ) from error


def _require_version(client: Client) -> None:
    version = client.connected_server_version
    try:
        found = (version.major, version.minor)
    except ValueError:  # a build of somebody's own
        return
    if found < LEAST_VERSION:
        server = client.connected_url
        where = f" at {server.hostname}:{server.port}" if server is not None else ""
        raise PlaneError(
            f"the NATS server{where} has version {version.major}.{version.minor}.{version.patch}; a plane needs nats-server "
            f"{'.'.join(map(str, LEAST_VERSION))} or newer: update it",
            fault="old",
        )


def _says_there_is_none(error: BaseException | None) -> bool:
    """Whether JetStream is not there at all, rather than without a leader or forbidden."""
    from nats.js import errors  # noqa: PLC0415 - an extra

    return isinstance(error, errors.APIError) and error.err_code in _NO_JETSTREAM


# --- the first connection ----------------------------------------------------------------------------------------------------


def _require_nats(settings: PlaneSettings) -> None:
    wanted = ["nats"]
    if settings.credentials is not None or settings.nkey is not None:
        wanted.append("nkeys")
    for module in wanted:
        if find_spec(module) is None:
            raise MissingDependencyError(f"a plane needs {module}, which is not installed: pip install 'kvevents[plane]'")
    if settings.over_web and find_spec("aiohttp") is None:
        raise MissingDependencyError(f"{settings.where}: WebSocket needs aiohttp besides: pip install 'nats-py[aiohttp]'")


def _failures() -> tuple[type[Exception], ...]:
    """What nats-py raises, and lets through, of a server that is not there or is none."""
    from nats import errors  # noqa: PLC0415 - an extra

    return (errors.Error, OSError, ValueError)


async def _open(settings: PlaneSettings, options: dict[str, Any], address: str, voice: Voice) -> PlaneClient:
    from nats import errors  # noqa: PLC0415 - an extra

    from kvevents.plane.client import PlaneClient  # noqa: PLC0415 - needs it

    client = PlaneClient(needs_tls=settings.needs_tls)
    try:
        await client.connect([address], **options, **voice.callbacks(client))
        if not client.is_connected:  # the server has hung up when it should have said PONG
            raise errors.UnexpectedEOF  # noqa: TRY301 - nats-py should have
    except BaseException:
        voice.silence()
        await _end(client)
        raise
    voice.say("connected")
    return client


async def _end(client: PlaneClient) -> None:
    client.abandon()
    with suppress(*_failures()):
        async with asyncio.timeout(CLOSE_SECONDS):
            await client.close()


def _unusable(failed: list[tuple[str, Exception]]) -> PlaneError:
    faults: list[Fault] = [fault_of(error) or "away" for _, error in failed]
    fault = faults[0] if len(set(faults)) == 1 else "away"
    said = "; ".join(f"{address}: {text_of(error)}" for address, error in failed)
    which = "the NATS server" if len(failed) == 1 else "any of the NATS servers"
    return PlaneError(f"cannot use {which} at {said}; {_FIRST_HINTS.get(fault, HINTS[fault])}", fault=fault)


# --- what nats-py is told ----------------------------------------------------------------------------------------------------


def _options(settings: PlaneSettings) -> dict[str, Any]:
    """Arguments of nats-py's `connect`. Raises `ConfigError`."""
    found: dict[str, Any] = {
        "tls": _tls(settings),
        "tls_hostname": settings.tls_hostname,
        "connect_timeout": ATTEMPT_SECONDS,
        "max_reconnect_attempts": -1,
        "ping_interval": PING_SECONDS,
        "max_outstanding_pings": PINGS,
        "pending_size": PENDING_BYTES,
        "inbox_prefix": settings.inbox_prefix,
    }
    if settings.credentials is not None:
        _sign(settings.read_credentials().seed, "")
        found["user_jwt_cb"] = lambda: _credentials(settings).jwt.encode()  # noqa: PLW0108 - read again each time
        found["signature_cb"] = lambda nonce: _sign_again(settings, nonce)
    elif settings.nkey is not None:
        found["nkeys_seed_str"] = settings.read_seed()
        _sign(settings.read_seed(), "")
    else:
        found |= settings.login._asdict()
    return found


def _tls(settings: PlaneSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca)
        if settings.tls_certificate is not None:
            context.load_cert_chain(settings.tls_certificate, settings.tls_key, password=_no_password)
    except OSError as error:
        raise ConfigError(
            f"tls_ca, tls_certificate or tls_key is no PEM file of its kind, or they do not belong together: {text_of(error)}"
        ) from error
    return context


def _no_password() -> str:
    raise ConfigError("tls_key is protected by a password, for which nobody is there to be asked; store it without")


def _credentials(settings: PlaneSettings) -> Credentials:
    """As the file has them now. Raises `PlaneError`, which nats-py takes for one more attempt that failed."""
    try:
        return settings.read_credentials()
    except ConfigError as error:
        raise PlaneError(str(error), fault="denied") from error


def _sign_again(settings: PlaneSettings, nonce: str) -> bytes:
    """With the seed that the file of credentials has now. Raises `PlaneError`, as above."""
    try:
        return _sign(_credentials(settings).seed, nonce)
    except ConfigError as error:
        raise PlaneError(str(error), fault="denied") from error


def _sign(seed: str, nonce: str) -> bytes:
    """A server's nonce, signed. Raises `ConfigError`."""
    import nkeys  # type: ignore[import-untyped]  # noqa: PLC0415 - an extra; it has no types

    try:
        signed: bytes = nkeys.from_seed(bytearray(seed.encode())).sign(nonce.encode())
    except (nkeys.NkeysError, ValueError) as error:
        raise ConfigError(f"the seed in the file of credentials or nkey is none: {error}") from error
    return base64.b64encode(signed)
