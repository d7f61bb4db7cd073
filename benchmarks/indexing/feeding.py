"""A worker that costs the machine next to nothing: `python -m benchmarks.indexing.feeding PORT FRAMING DIALECT SHAPE ...`.

It sends bytes that were encoded before: to a subscriber it speaks ZMTP 3.0 by itself, so that sending is a copy into the
kernel, and neither ZeroMQ's threads nor an encoder take CPU time from the process that is measured. A slow reader slows it
down; nothing is lost.
`feed.py` is what its parent sees of it.
"""

from __future__ import annotations

import itertools
import random
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Final

from benchmarks.indexing.payloads import DIALECTS
from benchmarks.indexing.workload import Event, Removal, chain, pieces, rounds
from benchmarks.processes import receive_line, send_line

_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY: Final = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
_TOPIC: Final = b"\x01\x09kv-events"


def _zmtp(seq: int, payload: bytes) -> bytes:
    length = len(payload)
    head = bytes((0, length)) if length < 256 else b"\x02" + length.to_bytes(8, "big")
    return b"".join((_TOPIC, b"\x01\x08", seq.to_bytes(8, "big"), head, payload))


def _plain(_: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


FRAMINGS: Final[dict[str, Callable[[int, bytes], bytes]]] = {"zmtp": _zmtp, "plain": _plain}


def greet(connection: socket.socket) -> None:
    """Be a PUB socket to a SUB socket, as far as its subscription."""
    connection.sendall(_GREETING)
    with connection.makefile("rb") as stream:
        stream.read(len(_GREETING))
        connection.sendall(bytes((4, len(_READY))) + _READY)
        for _ in ("READY", "subscription"):
            flags, length = stream.read(2)
            assert not flags & 2, "a long frame before the subscription"
            stream.read(length)


def _chains(draw: random.Random, length: int, per_event: int) -> Callable[[int], Iterator[Event]]:
    def some(blocks: int) -> Iterator[Event]:
        for _ in range(0, blocks, length):
            yield from pieces(chain(draw, length), per_event)

    return some


SHAPES: Final[dict[str, Callable[..., Callable[[int], Iterator[Event]]]]] = {"chains": _chains, "churn": rounds}


def main(port: int, framing: str, dialect: str, shape: str, *numbers: int) -> None:
    """Serve one reader."""
    frame, encode, draw = FRAMINGS[framing], DIALECTS[dialect], random.Random(3)  # noqa: S311 - test data
    events, seq = SHAPES[shape](draw, *numbers), 0
    with socket.create_server(("127.0.0.1", port)) as server:
        send_line("bound")
        connection, _ = server.accept()
        if framing == "zmtp":
            greet(connection)
        while (blocks := receive_line()) is not None:
            ready, first, count = bytearray(), seq, 0
            sentinel = chain(draw, 1)
            for event in itertools.chain(events(blocks), pieces(sentinel, 1)):
                ready += frame(seq, encode(event))
                count += 0 if isinstance(event, Removal) else len(event.hashes)
                seq += 1
            send_line({"events": seq - first, "blocks": count, "seq": seq - 1, "last": sentinel.tokens.tolist()})
            receive_line()
            connection.sendall(ready)


if __name__ == "__main__":
    words = sys.argv[1:]
    main(int(words[0]), words[1], words[2], words[3], *map(int, words[4:]))
