"""Sharded services in threads of this process, so that their intervals can be short."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvevents.service.server import _listen, _Server
from kvevents.service.service import Service
from kvevents.service.settings import MAX_ASK_SECONDS, ServiceSettings
from kvevents.settings import convert
from ports import reserve_port
from service_cases import Client

SECONDS = 60.0
PACE = {
    "announce_seconds": 0.1,
    "settle_seconds": 0.6,
    "present_seconds": 60.0,
    "dead_seconds": 120.0,
    "release_seconds": 0.5,
    "refresh_seconds": 0.1,
    "avoid_seconds": 0.3,
}
"""Intervals of tenths of seconds, except those after which a slow replica on a busy machine would be considered dead."""


class _ServerWithoutSignals(_Server):
    """A server that handles no signals, which is possible in the main thread only."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Replica(Client):
    """One service, and a client of it."""

    def __init__(self, server_url: str, plane: str, name: str, *, holders: int | None = 1, **more: Any) -> None:
        self.name, self._port = name, reserve_port()
        self.url = f"http://127.0.0.1:{self._port}"
        tables: dict[str, Any] = {
            "plane": {"servers": [server_url], "name": plane},
            "replica": name,
            "port": self._port,
            "snapshot_seconds": 3600.0,
            **more,
        }
        if holders is not None:
            # All replicas run in this process, which may be slow on a busy machine.
            tables["shard"] = {
                "url": self.url,
                "replication_factor": holders,
                "ask_seconds": MAX_ASK_SECONDS,
                "pace": PACE,
                **more.get("shard", {}),
            }
        self.settings = convert(tables, ServiceSettings, "test")
        self.service = Service(self.settings)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _ServerWithoutSignals | None = None
        self._started = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(SECONDS)
        super().__init__(self.url)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised by `end`
            self.error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        with _listen("127.0.0.1", self._port) as listening:
            self._server = _ServerWithoutSignals(self.service, lambda _: self._started.set(), self.url)
            await self._server.run_at(listening)

    @property
    def served(self) -> frozenset[int]:
        return self.service.replica.served if self.service.replica is not None else frozenset()

    def wait_until_ready(self) -> None:
        super().wait_until_ready()
        assert self.error is None

    def end(self) -> None:
        """End as on SIGTERM; a second call does nothing."""
        self.close()
        if self._server is not None:
            self._server.force_exit = self._server.should_exit = True
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


@contextmanager
def replica(*args: Any, **more: Any) -> Iterator[Replica]:
    found = Replica(*args, **more)
    try:
        yield found
    finally:
        found.end()
