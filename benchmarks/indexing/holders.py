"""An index that takes in what a feed sends, and what that does to its process's memory."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Final, Protocol

from benchmarks.indexing import procfs
from benchmarks.indexing.feed import Feed, received
from benchmarks.indexing.sides import Ours
from tools.dynamo import Service

SETTLING: Final = 1.0
"""Seconds that the service may go on tidying up before its memory is read."""


class Holder(Protocol):
    """An index with one worker, and its feed."""

    def take(self, blocks: int) -> int:
        """Have it take in about `blocks` more; how many there were."""

    def resident(self) -> int:
        """Bytes in memory."""


class OurHolder:
    """Our index, in this process, which has nothing else in it; payloads come through a plain socket."""

    def __init__(self, feed: Feed, payloads: Iterator[bytes]) -> None:
        self.side = Ours()
        self._feed, self._payloads = feed, payloads

    def take(self, blocks: int) -> int:
        prepared = self._feed.prepare(blocks)
        self._feed.send()
        self.side.apply(0, islice(self._payloads, prepared.events))
        assert len(self.side.index.match(prepared.last)) == 1
        return prepared.blocks

    def resident(self) -> int:
        gc.collect()
        return procfs.resident()


class ServiceHolder:
    """Dynamo's service in another process."""

    def __init__(self, feed: Feed, service: Service) -> None:
        self.service = service
        self._feed = feed

    def take(self, blocks: int) -> int:
        prepared = self._feed.prepare(blocks)
        self._feed.send()
        self.service.wait_for(prepared.last)
        return prepared.blocks

    def resident(self) -> int:
        time.sleep(SETTLING)
        return procfs.resident(self.service.pid)


@contextmanager
def ours(*shape: object) -> Iterator[OurHolder]:
    """Fed with `shape`."""
    with (
        Feed("plain", "map", *shape) as feed,
        socket.create_connection(("127.0.0.1", feed.port)) as connection,
        connection.makefile("rb") as stream,
    ):
        yield OurHolder(feed, received(stream))


@contextmanager
def service(*shape: object) -> Iterator[ServiceHolder]:
    """Fed with `shape`."""
    with Feed("zmtp", "map", *shape) as feed, Service(feed.port) as running:
        yield ServiceHolder(feed, running)


HOLDERS: Final[dict[str, Callable[..., AbstractContextManager[Holder]]]] = {"ours": ours, "service": service}
