"""A running service with its engines, and answers of a service for tests of commands that query one."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from cli_cases import SECONDS, Program
from kvevents.cli import main
from kvevents.client.polling import PolledSource
from kvevents.client.schemas import ReadyAnswer, StatsAnswer
from kvevents.events import BlockStored, KVEventBatch
from kvevents.publisher import ZmqEventPublisher

BLOCK: Final = 16


TOKEN: Final = "a token of thirty-two characters".replace(" ", "-")


LISTENING: Final = r"listening at (https?://\S+)"


class RunningService:
    """A running service, and requests of tests to its API."""

    def __init__(self, program: Program) -> None:
        self.program = program
        found = re.search(LISTENING, program.err.wait(LISTENING))
        assert found
        self.url = found[1]
        self._address = self.url.removeprefix("http://")
        self._engines: dict[str, ZmqEventPublisher] = {}

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = HTTPConnection(self._address, timeout=SECONDS)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = json.loads(response.read())
            assert response.status < 300, answer
            return answer
        finally:
            connection.close()

    def register(self, name: str, publisher: ZmqEventPublisher, **more: Any) -> None:
        known = {"instance_id": name, "endpoint": publisher.endpoint, "model_name": "m", "block_size": BLOCK}
        replay = {} if publisher.replay_endpoint is None else {"replay_endpoint": publisher.replay_endpoint}
        self.ask("POST", "/register", known | replay | more)
        self._engines[f"{name}/{more.get('dp_rank', 0)}"] = publisher

    def sources(self) -> dict[str, Any]:
        return {f"{one['instance']}/{one['rank']}": one for one in self.ask("GET", "/v1/sources")["sources"]}

    def wait(self, name: str, test: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until a source passes `test`."""
        wait_until(lambda: name in self.sources() and test(self.sources()[name]), lambda: self.sources().get(name))

    def wait_exact(self, name: str, blocks: int) -> None:
        """Wait until a source is EXACT with `blocks` blocks.

        Its engine publishes an empty batch if replayed batches are not confirmed by a live one yet.
        """

        def is_exact(source: dict[str, Any]) -> bool:
            if "replay-unproven" in source["trust"]["reason_codes"] and name in self._engines:
                self._engines[name].publish(KVEventBatch(time.time(), [], 0))
            return bool(source["trust"]["state"] == "EXACT" and source["blocks"] == blocks)

        self.wait(name, is_exact)


def wait_until(test: Callable[[], bool], why: Callable[[], object] = lambda: "") -> None:
    """Call `test` until it returns True; fail with the result of `why` after the deadline."""
    deadline = time.monotonic() + SECONDS
    pause = threading.Event()
    while not test():
        assert time.monotonic() < deadline, why()
        pause.wait(0.01)


@contextmanager
def serving(*args: object, **env: str) -> Iterator[RunningService]:
    with Program("serve", "--port", 0, *args, **env) as program:
        yield RunningService(program)


@contextmanager
def engine(*stored: BlockStored) -> Iterator[ZmqEventPublisher]:
    publisher = ZmqEventPublisher(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic="kv")
    try:
        for event in stored:
            publisher.publish(KVEventBatch(time.time(), [event], 0))
        yield publisher
    finally:
        publisher.shutdown()


def blocks(count: int, first: int = 0, medium: str = "GPU", tokens: list[int] | None = None) -> BlockStored:
    """Return a store of `count` blocks of the prompt 0, 1, 2, ..., or of `tokens`, from block `first` on."""
    token_ids = list(range(first * BLOCK, (first + count) * BLOCK)) if tokens is None else tokens
    parent = 1000 + first - 1 if first else None
    return BlockStored([1000 + first + number for number in range(count)], parent, token_ids, BLOCK, medium=medium)


def error_of(capsys: pytest.CaptureFixture[str], *args: object, code: int = 1) -> str:
    """Run the command, check that it writes a single line to stderr, and return that line."""
    assert main([*map(str, args)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@contextmanager
def run_guarded_service(tmp_path: Path, settings: str = "") -> Iterator[tuple[str, Program]]:
    """Yield the URL and the process of a service that requires a token."""
    config = tmp_path / "fleet.toml"
    config.write_text(f'{settings}\n[[access.tokens]]\nrole = "read"\ntoken = "{TOKEN}"\n')
    with Program("serve", "--port", 0, "--config", config) as program:
        found = re.search(LISTENING, program.err.wait(LISTENING))
        assert found
        yield found[1], program


def source(number: int, state: str = "EXACT", **more: Any) -> PolledSource:
    fields: dict[str, Any] = {
        "instance": f"engine-{number:03}",
        "rank": 0,
        "model": "llama",
        "tenant": "default",
        "group": "default",
        "endpoint": "tcp://10.0.0.7:5557",
        "replay_endpoint": None,
        "origin": "http",
        "trust": {"state": state, "reason": more.pop("reason", "")},
        "since": 1000.0,
        "fault": None,
        "incarnation": 0,
        "last_seq": 7,
        "last_event": 1000.0,
        "lag_seconds": 0.003,
        "waiting": 0,
        "blocks": 10,
        "orphans": 0,
        "uncertain": 0,
        "block_sizes": [16],
        "declared_block_size": 16,
        "batches": 8,
        "replayed": 0,
        "lost": 0,
        "tiers": {},
        "stores_only": [],
        "gap_count": 0,
        "gaps": [],
        "resets": 0,
        "reconnects": 0,
        "rejected": {},
    }
    return msgspec.convert(fields | more, PolledSource)


def stats(**more: Any) -> StatsAnswer:
    fields: dict[str, Any] = {
        "version": "0.1.0",
        "uptime_seconds": 4000.0,
        "sources": {},
        "workers": 1,
        "blocks": 12_345,
        "unique_blocks": 10_000,
        "tiers": {},
        "index_bytes": 3 << 20,
        "memory_limit": 8 << 30,
        "orphans": 0,
        "evicted": 0,
        "lookups": 100,
        "hits": 56,
        "batches": 9,
        "batches_per_second": 120.0,
        "snapshot_seconds": 60.0,
        "snapshot_at": None,
        "snapshot_fault": None,
    }
    return msgspec.convert(fields | more, StatsAnswer)


READY: Final = ReadyAnswer(ready=True, why="all are EXACT", exact=1, sources=1, quorum=1.0, deadline_seconds=30.0)
