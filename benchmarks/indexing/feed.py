"""A worker in another process, `feeding.py`, that sends events on request."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO, NamedTuple, Self

from benchmarks.processes import Peer, free_ports


class Prepared(NamedTuple):
    """What it will send next."""

    events: int
    blocks: int
    """How many it stores."""
    seq: int
    """Of the last one."""
    last: list[int]
    """Token ids of the last block, a root of its own: when it is visible, all of it is."""


class Feed:
    """Sends to the first peer of `port`, in one of `feeding.FRAMINGS`, `feeding.SHAPES` and `payloads.DIALECTS`."""

    def __init__(self, framing: str, dialect: str, *shape: object) -> None:
        (self.port,) = free_ports(1)
        self._peer = Peer("indexing.feeding", self.port, framing, dialect, *shape)
        self._peer.receive()

    def prepare(self, blocks: int) -> Prepared:
        """Have it make about `blocks` more blocks ready. Waits until a peer has connected, and the blocks are ready."""
        self._peer.send(blocks)
        return Prepared(**self._peer.receive())

    def send(self) -> None:
        """Let it send them. Returns at once."""
        self._peer.send("send")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._peer.kill()
        self._peer.close()


def received(stream: BinaryIO) -> Iterator[bytes]:
    """The payloads of plain framing."""
    while head := stream.read(4):
        yield stream.read(int.from_bytes(head, "big"))
