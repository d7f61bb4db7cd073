"""From one event to an answer that has it, nothing else going on: `python -m benchmarks.service.noticing notice WHO TIMES`."""

from __future__ import annotations

import json
import random
import re
import socket
import sys
import time
from functools import partial
from typing import Final

from benchmarks.indexing.payloads import in_maps
from benchmarks.indexing.workload import chain, percentile, pieces
from benchmarks.processes import send_line
from benchmarks.service.running import HOST, JSON, Running, query, wait_until
from benchmarks.service.workers import Workers

PAUSE: Final = 0.01
"""Seconds between two events, give or take a half, so that no tick of a service is met always, or never."""
_LENGTH: Final = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


class Line:
    """A connection over which one question is asked as fast as a client in Python can."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection((HOST, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> bytes:
        """The body of the answer."""
        self._socket.sendall(request)
        head, body, missing = b"", b"", 1
        while missing > 0:
            head += self._socket.recv(1 << 16)
            start, end, body = head.partition(b"\r\n\r\n")
            length = _LENGTH.search(start) if end else None
            missing = int(length[1]) - len(body) if length else 1
        return body

    def close(self) -> None:
        self._socket.close()


def request(tokens: list[int]) -> bytes:
    """All bytes of one `/query`."""
    body = json.dumps(query(tokens)).encode()
    head = f"POST /query HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: {JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def notice(contender: str, times: int) -> dict[str, float]:
    """p50 and p99 of it, and p50 of the question alone, in milliseconds."""
    draw = random.Random(13)  # noqa: S311 - test data
    taken, asked = [], []
    with Running(contender) as service, Workers(1) as workers:
        service.register(workers.endpoints)
        workers.wait_for_subscribers()
        line = Line(service.port)
        workers.send(0, in_maps(next(pieces(first := chain(draw, 1), 1))))
        wait_until(partial(_visible, line, request(first.tokens.tolist())), "the first event")
        for _ in range(times):
            block = chain(draw, 1)
            payload, question = in_maps(next(pieces(block, 1))), request(block.tokens.tolist())
            time.sleep(PAUSE * draw.uniform(0.5, 1.5))
            before = time.perf_counter_ns()
            line.ask(question)
            asked.append(time.perf_counter_ns() - before)
            time.sleep(PAUSE)
            before = time.perf_counter_ns()
            workers.send(0, payload)
            wait_until(partial(_visible, line, question), "an event", pause=0.0)
            taken.append(time.perf_counter_ns() - before)
        line.close()
    return {"p50": percentile(taken, 50) / 1e3, "p99": percentile(taken, 99) / 1e3, "question": percentile(asked, 50) / 1e3}


def _visible(line: Line, question: bytes) -> bool:
    return any(each["longest_matched"] for each in json.loads(line.ask(question))["instances"].values())


if __name__ == "__main__":
    _, _, name, number = sys.argv
    send_line(notice(name, int(number)))
