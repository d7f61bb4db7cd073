"""Tests of the mapping from errors of NATS to `PlaneFault`, for real servers and for each exception of nats-py."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, get_args

import nats.errors
import nats.js.errors
import pytest
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy

from discovery_cases import await_in_time
from kvevents.errors import PlaneError
from kvevents_plane.connection import open_client
from kvevents_plane.nats_errors import HINTS, PlaneFault, classify_error, map_errors
from kvevents_plane.settings import PlaneSettings
from nats_cases import needs_nats
from plane_cases import plane_at
from tools.nats_servers import NatsServer, nats_server

ROOM = 64 << 10
KINDS = {
    kind
    for module in (nats.errors, nats.js.errors)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


def test_every_fault_has_a_hint() -> None:
    assert HINTS.keys() == set(get_args(PlaneFault))


@pytest.mark.parametrize("kind", sorted(KINDS, key=str), ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_exception_of_nats_py_is_a_fault(kind: type[Exception]) -> None:
    """Every exception class of nats-py is constructed and classified."""
    needed: tuple[Any, ...] = ("a", "", 1, None) if kind is nats.errors.SlowConsumerError else ()
    error = kind(*needed)
    assert classify_error(error) in get_args(PlaneFault)


def test_an_error_without_a_description_is_described() -> None:
    """A server without JetStream sends one."""
    with pytest.raises(PlaneError, match=r"^querying: JetStream does not answer; not connected, or"), map_errors("querying"):
        raise nats.js.errors.ServiceUnavailableError


def no_peers(reasons: str) -> nats.js.errors.BadRequestError:
    """Return what a cluster answers that cannot place a new stream on its servers."""
    return nats.js.errors.BadRequestError(code=400, err_code=10005, description=f"no suitable peers for placement{reasons}")


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (nats.errors.TimeoutError(), "timeout"),
        (TimeoutError(), "timeout"),
        (nats.errors.NoRespondersError(), "away"),
        (nats.js.errors.NoStreamResponseError(), "away"),
        (nats.js.errors.ServiceUnavailableError(), "away"),
        (nats.js.errors.ServiceUnavailableError(code=503, err_code=10077, description="maximum bytes exceeded"), "full"),
        (nats.js.errors.ServerError(code=500, err_code=10047, description="insufficient storage resources available"), "full"),
        (no_peers(", insufficient storage"), "full"),
        (no_peers(", peer offline"), "away"),
        (no_peers(", peer offline, insufficient storage"), "away"),
        (no_peers(""), "away"),
        (nats.js.errors.NotFoundError(code=404, err_code=10059), "missing"),
        (nats.js.errors.ObjectNotFoundError(), "missing"),
        (nats.js.errors.KeyWrongLastSequenceError("wrong last sequence: 3"), "conflict"),
        (nats.js.errors.BadRequestError(code=400, err_code=10071), "conflict"),
        (nats.js.errors.BadRequestError(code=409, err_code=10158), "conflict"),
        (nats.js.errors.BadRequestError(code=400, err_code=10164), "conflict"),
        (nats.js.errors.BadRequestError(code=400, err_code=10058), "exists"),
        (nats.js.errors.BadRequestError(code=400, err_code=10003), "refused"),
        (nats.errors.Error("nats: 'Authorization Violation'"), "denied"),
        (nats.errors.Error('nats: permissions violation for publish to "a"'), "denied"),
        (nats.errors.Error("nats: the server said 'user authentication expired'"), "denied"),
        (nats.errors.ConnectionClosedError(), "closed"),
        (nats.errors.OutboundBufferLimitError(), "backlog"),
        (nats.errors.UnexpectedEOF(), "away"),
        (ssl.SSLError(1, "handshake failure"), "tls"),
        (ConnectionResetError(104, "Connection reset by peer"), "away"),
        (OSError(errno.ENOSPC, "No space left on device"), "full"),
        (OSError(errno.EFBIG, "File too large"), "full"),
    ],
    ids=repr,
)
def test_each_error_maps_to_its_fault(error: Exception, fault: PlaneFault) -> None:
    with pytest.raises(PlaneError, match=r"^reading: ") as caught, map_errors("reading"):
        raise error
    assert caught.value.fault == fault
    assert caught.value.__cause__ is error
    assert str(caught.value).endswith(HINTS[fault])


@pytest.mark.parametrize(
    "error", [KeyError("x"), AssertionError(), asyncio.CancelledError(), PlaneError("so", fault="full")], ids=repr
)
def test_other_exceptions_are_not_mapped(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, map_errors("reading"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_that_nats_py_swallows_is_raised(fails: bool) -> None:
    """`asyncio.wait_for` of Python 3.11 returns a result or raises an error that arrives at the moment of the cancellation."""

    async def read() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            if fails:
                raise TimeoutError from None

    async def read_forever() -> None:
        while True:
            with suppress(PlaneError), map_errors("reading"):
                await read()

    task = asyncio.create_task(read_forever())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await await_in_time(task)


@pytest.fixture(scope="module", name="server")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats"), max_payload=ROOM, jetstream={"max_file": 64 << 20}) as server:
        yield server


async def fill(js: JetStreamContext) -> None:
    await js.add_stream(name="small", subjects=["small"], max_bytes=ROOM, discard=DiscardPolicy.NEW)
    for _ in range(2):
        await js.publish("small", bytes(ROOM // 2))


async def fill_the_disk(js: JetStreamContext) -> None:
    await js.add_stream(name="huge", max_bytes=1 << 40)


async def write_a_stale_revision(js: JetStreamContext) -> None:
    bucket = await js.create_key_value(bucket="leases")
    first = await bucket.put("a", b"1")
    await bucket.update("a", b"2", last=first)
    await bucket.update("a", b"3", last=first)


async def create_a_stream_twice(js: JetStreamContext) -> None:
    await js.add_stream(name="twice", subjects=["one"])
    await js.add_stream(name="twice", subjects=["other"])


@needs_nats
@pytest.mark.parametrize(
    ("provoke", "fault"),
    [
        (lambda js: js.stream_info("none"), "missing"),
        (lambda js: js.publish("no.listener", b""), "away"),
        (lambda js: js.publish("large", bytes(ROOM + 1)), "large"),
        (lambda js: js.add_stream(name="copied", num_replicas=3), "refused"),
        (fill, "full"),
        (fill_the_disk, "full"),
        (write_a_stale_revision, "conflict"),
        (create_a_stream_twice, "exists"),
    ],
    ids=["no stream", "no listener", "large", "no cluster", "full stream", "full disk", "stale revision", "created twice"],
)
async def test_errors_of_a_real_server_map_to_their_faults(
    server: NatsServer, provoke: Callable[[JetStreamContext], Awaitable[object]], fault: PlaneFault
) -> None:
    async with open_client(PlaneSettings(servers=(server.url,)), name="test") as client:
        with pytest.raises(PlaneError) as caught, map_errors("provoking the error"):
            await provoke(client.jetstream())
    assert caught.value.fault == fault, caught.value


@needs_nats
async def test_a_request_can_be_cancelled_while_its_answer_arrives(server: NatsServer) -> None:
    """The task is cancelled in the same turn of the event loop in which the answer arrives."""
    async with open_client(plane_at(server.url), name="tests") as client:

        async def answer(message: Any) -> None:
            await message.respond(b"answer")

        await client.subscribe("echo", cb=answer)
        assert (await client.request("echo")).data == b"answer"
        query = asyncio.create_task(client.request("echo", timeout=60.0))
        while not client._resp_map:  # noqa: ASYNC110 - the client has no event for it
            await asyncio.sleep(0)
        client._resp_map[next(iter(client._resp_map))].add_done_callback(lambda _: query.cancel())
        with pytest.raises(asyncio.CancelledError):
            await query
