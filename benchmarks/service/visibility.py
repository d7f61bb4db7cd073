"""The time from an event to an answer that contains it, on an otherwise idle service."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from functools import partial
from typing import Final

from benchmarks.measures import percentile
from benchmarks.service.server import HOST, JSON, Server, query, wait_until
from benchmarks.service.workers import Workers
from benchmarks.workload import chain, stores

PAUSE_SECONDS: Final = 0.01
"""Mean number of seconds between two events. The time varies by half, so that events do not coincide with a timer of the
service."""
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Connection:
    """A connection that repeats one query as fast as a client in Python can."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> bytes:
        """Return the body of the answer."""
        self._socket.sendall(request)
        content, body, bytes_left = b"", b"", 1
        while bytes_left > 0:
            content += self._socket.recv(1 << 16)
            head, end, body = content.partition(b"\r\n\r\n")
            length = _LENGTH.search(head) if end else None
            bytes_left = int(length[1]) - len(body) if length else 1
        return body

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def measure(contender: str, events: int) -> dict[str, float]:
    """Return p50 and p99 of the time until an event is visible, and p50 of a query, in milliseconds."""
    draw = random.Random(13)  # noqa: S311 - test data
    delays, questions = [], []
    with Server(contender) as server, Workers(1) as workers:
        server.register(workers.endpoints)
        workers.wait_for_subscribers()
        connection = Connection(server.port)
        payload, request = _block(draw)
        workers.send(0, payload)
        wait_until(partial(_is_visible, connection, request), "the first event")
        for _ in range(events):
            payload, request = _block(draw)
            time.sleep(PAUSE_SECONDS * draw.uniform(0.5, 1.5))
            start = time.perf_counter_ns()
            connection.ask(request)
            questions.append(time.perf_counter_ns() - start)
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter_ns()
            workers.send(0, payload)
            wait_until(partial(_is_visible, connection, request), "an event", pause=0.0)
            delays.append(time.perf_counter_ns() - start)
        connection.close()
    figures = {"p50": percentile(delays, 50), "p99": percentile(delays, 99), "question": percentile(questions, 50)}
    return {name: value / 1e6 for name, value in figures.items()}


def _block(draw: random.Random) -> tuple[bytes, bytes]:
    """Return the payload that stores a block, and all bytes of a `/query` for it."""
    block = chain(draw, 1)
    body = json.dumps(query(block.tokens.tolist())).encode()
    head = f"POST /query HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
    return next(stores(block, 1)), head.encode() + body


def _is_visible(connection: Connection, request: bytes) -> bool:
    return any(instance["longest_matched"] for instance in json.loads(connection.ask(request))["instances"].values())
