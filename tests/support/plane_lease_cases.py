"""A key-value bucket for leases, and a clock."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvevents.plane.connection import open_client
from kvevents.plane.layout import Layout
from kvevents.plane.leases import Lease, LeaseHolder
from plane_cases import plane_at
from tools.nats_servers import NatsServer

KEY = "lease.snapshot.7"
LONG = 3600.0


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bucket:
    """The leases of one plane. The servers expire them after the `ttl` of the bucket."""

    def __init__(self, js: Any, name: str) -> None:
        self.js = js
        self.layout = Layout(name, 1)
        self.store: Any = None

    def lease(self, host: str = "here", **more: Any) -> Lease:
        """Return a lease with a new random holder."""
        return Lease(self.js, self.layout, KEY, LeaseHolder(host, 1, os.urandom(8).hex()), **more)

    async def revision(self) -> int:
        return int((await self.store.get(KEY)).revision)


@asynccontextmanager
async def bucket(*servers: NatsServer, name: str, ttl: float = LONG, copies: int = 1) -> AsyncIterator[Bucket]:
    async with open_client(plane_at(*(server.url for server in servers)), name="tests") as client:
        made = Bucket(client.jetstream(), name)
        made.store = await made.js.create_key_value(bucket=made.layout.leases, ttl=ttl, replicas=copies)
        yield made
