"""Tests of the differences between `PlaneClient` and the client of nats-py, with a scripted server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("nats")

from discovery_cases import await_in_time
from kvevents.errors import PlaneError
from kvevents_plane.connection import open_client, require_jetstream
from kvevents_plane.nats_client import NotPermittedError, PlaneClient
from kvevents_plane.nats_errors import map_errors
from kvevents_plane.settings import ConnectionLimits, PlaneSettings

IMPATIENT = ConnectionLimits(reconnect_seconds=0.01, max_reconnect_seconds=0.02)
"""The client reconnects almost at once, so that no test waits for a pause."""


class Script:
    """A NATS server that sends its INFO, answers pings, and sends the lines that a test chooses."""

    def __init__(self) -> None:
        self.info: dict[str, Any] = {"server_id": "x", "version": "2.11.0", "max_payload": 1 << 20, "headers": True}
        self.connections = 0
        self.bad_greetings: list[bytes] = []
        """Sent instead of an INFO, one to each new connection."""
        self.has_lines = asyncio.Condition()
        self.lines: list[bytes] = []
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[PlaneSettings]:
        server = await asyncio.start_server(self._talk, "127.0.0.1")
        async with server:
            yield PlaneSettings(connection=IMPATIENT, servers=(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}",))
            for task in self._tasks:
                await await_in_time(task)

    def send(self, line: str) -> None:
        assert self._writer
        self._writer.write(line.encode() + b"\r\n")

    def greet(self) -> None:
        self.send("INFO " + json.dumps(self.info))

    async def wait_for(self, start: bytes) -> None:
        async def has_lines() -> None:
            async with self.has_lines:
                await self.has_lines.wait_for(lambda: any(line.startswith(start) for line in self.lines))

        await await_in_time(has_lines())

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.append(task)
        self._writer = writer
        self.connections += 1
        if self.bad_greetings:
            writer.write(self.bad_greetings.pop(0))
            writer.close()
            return
        self.greet()
        while line := await reader.readline():
            if line == b"PING\r\n":
                writer.write(b"PONG\r\n")
            async with self.has_lines:
                self.lines.append(line)
                self.has_lines.notify_all()
        writer.close()


class States:
    """The states that `on_state` received."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self.back = asyncio.Event()

    def __call__(self, state: str) -> None:
        self.all.append(state)
        if self.all[-2:] == ["reconnecting", "connected"]:
            self.back.set()


async def round_trip(client: PlaneClient) -> None:
    """Wait until the client has processed everything that the server has sent before."""
    await await_in_time(client.flush())


@pytest.mark.parametrize(
    "reason",
    ["Stale Connection", "User Authentication Expired", "Account Authentication Expired", "Secure Connection - TLS Required"],
)
async def test_the_client_reconnects_after_any_error_of_the_server(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    script, states = Script(), States()
    async with script.serving() as settings, open_client(settings, name="test", on_state=states) as client:
        script.send(f"-ERR '{reason}'")
        await await_in_time(states.back.wait())
        await round_trip(client)
        assert script.connections == 2
    assert states.all == ["connected", "reconnecting", "connected", "closed"]
    assert sum(record.getMessage().endswith(f"'{reason.lower()}'") for record in caplog.records) == 1


async def test_invalid_greetings_do_not_end_the_attempts_to_reconnect() -> None:
    """The answers are too long, invalid, not an INFO, or empty."""
    script, states = Script(), States()
    script.info["connect_urls"] = []
    async with script.serving() as settings, open_client(settings, name="test", on_state=states) as client:
        script.bad_greetings = [b"x" * (1 << 20), b"INFO \xff\r\n", b"INFO []\r\n", b"PING\r\n", b""]
        script.send("-ERR 'Stale Connection'")
        await await_in_time(states.back.wait())
        await round_trip(client)
        assert script.connections == 7
    assert states.all == ["connected", "reconnecting", "connected", "closed"]


async def test_a_missing_permission_fails_only_the_requests_that_need_it() -> None:
    """Other requests and the connection continue."""
    script = Script()
    async with script.serving() as settings, open_client(settings, name="test") as client:
        refused = [asyncio.create_task(client.request("Lane.1", b"", timeout=60)) for _ in range(2)]
        other = asyncio.create_task(client.request("lane.10", b"", timeout=60))
        await script.wait_for(b"PUB lane.10 ")
        script.send("-ERR 'Permissions Violation for Publish to \"Lane.1\"'")
        for task in refused:
            with pytest.raises(NotPermittedError, match=r"this user must not publish to 'Lane.1'"):
                await await_in_time(task)
        await round_trip(client)
        assert not other.done()
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other
        with pytest.raises(PlaneError) as caught, map_errors("requesting"):
            await client.request("lane.2", b"", timeout=0.01)
        assert caught.value.fault == "timeout"
        assert script.connections == 1


def is_stuck(client: PlaneClient) -> bool:
    """Return whether the system accepts no more of the written bytes."""
    transport: Any = client._transport
    return transport._io_writer.transport.get_write_buffer_size() > 1 << 16  # type: ignore[no-any-return]


async def test_publishing_to_a_server_that_reads_nothing_can_be_cancelled() -> None:
    """Cancelling takes effect at once."""
    may_close = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"max_payload": 1048576}\r\n')
        await reader.readuntil(b"PING\r\n")
        writer.write(b"PONG\r\n")
        await may_close.wait()
        writer.close()

    async def flood(client: PlaneClient) -> None:
        while True:
            await client.publish("a", bytes(1 << 20))

    server = await asyncio.start_server(listen, "127.0.0.1")
    async with server:
        settings = PlaneSettings(connection=IMPATIENT, servers=(f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}",))
        client = PlaneClient()
        await client.connect([*settings.addresses], pending_size=1 << 20)
        task = asyncio.create_task(flood(client))
        while not is_stuck(client):
            await asyncio.wait([task], timeout=0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await await_in_time(task)
        await await_in_time(client.close())
        may_close.set()


async def test_a_server_that_is_too_old_is_refused_with_its_version() -> None:
    """The check comes before any request to JetStream, and the message says what to do."""
    script = Script()
    script.info["version"] = "2.10.29"
    async with script.serving() as settings, open_client(settings, name="test") as client:
        sentence = r"127\.0\.0\.1:\d+ has version 2\.10\.29; a plane needs nats-server 2\.11 or newer"
        with pytest.raises(PlaneError, match=sentence) as caught:
            await require_jetstream(client)
        assert caught.value.fault == "old"
        assert not any(b"$JS.API" in line for line in script.lines)


@pytest.mark.parametrize("version", ["2.11.0", "2.15.1-RC.1", "3.0.0", "built-here"])
async def test_newer_servers_and_builds_without_a_version_number_are_accepted(version: str) -> None:
    script = Script()
    script.info["version"] = version
    async with script.serving() as settings, open_client(settings, name="test") as client:
        query = asyncio.create_task(require_jetstream(client))
        await script.wait_for(b"PUB $JS.API.INFO")
        query.cancel()
