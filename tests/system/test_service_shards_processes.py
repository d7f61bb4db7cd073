"""Replicas with a shard each, as processes with the pauses of production: if one dies or hangs, others are queried."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import nats
import pytest

from kvevents.plane.layout import Layout
from kvevents.plane.replicas import SHARD_PREFIX, ShardAnnouncement, plan_queries
from nats_servers import NatsServer, nats_server, needs_nats
from plane_cases import plane_at, run_bridge
from ports import reserve_port
from service_cases import MODEL, Client, Service, engines, serving, wait_for
from service_replica_cases import watch_of

pytestmark = needs_nats
PARTITIONS: Final = 16
ENGINES: Final = 6
PROMPT: Final = list(range(96))
EXPECTED_TOKENS: Final = {f"e{at}": 16 * (at + 1) for at in range(ENGINES)}
"""Tokens of the prompt that each engine holds; they do not change during a test."""
NAMES: Final = ("a", "b", "c")
FAILURES: Final = "kvevents_shard_request_failures_total"
MIN_ANSWERS: Final = 50
"""Answers that each replica has to give after a change."""
REQUEST_INTERVAL: Final = 0.005
"""Seconds between an answer and the next request. Without it the clients keep the CPUs from the replicas."""


class Shards(NamedTuple):
    """Replicas by name, and the plane's server."""

    server: NatsServer
    services: dict[str, Service]

    def announcements(self) -> dict[str, ShardAnnouncement]:
        """Return the announcement of each replica."""

        async def read() -> dict[str, ShardAnnouncement]:
            client = await nats.connect(self.server.url)
            try:
                bucket = await client.jetstream().key_value(Layout("default", PARTITIONS).leases)
                found = [
                    (name, ShardAnnouncement.decode((await bucket.get(SHARD_PREFIX + name)).value or b"")) for name in NAMES
                ]
                return {name: announcement for name, announcement in found if announcement is not None}
            finally:
                await client.close()

        return asyncio.run(read())

    def settle(self) -> None:
        """Wait until two replicas hold each partition, and each replica has read that.

        A replica that has announced itself twice has read the other announcements in between.
        """

        def announcements_if_held_twice() -> dict[str, ShardAnnouncement] | None:
            found = self.announcements()
            counts = [sum(partition in announcement.held for announcement in found.values()) for partition in range(PARTITIONS)]
            return found if set(counts) == {2} else None

        before = wait_for("two replicas to hold each partition", announcements_if_held_twice)
        wait_for(
            "all replicas to read the announcements",
            lambda: all(announcement.counter > before[name].counter + 1 for name, announcement in self.announcements().items()),
        )

    def peer_of(self, name: str) -> str:
        """Return the replica that `name` queries for partitions it does not hold; the choice between two with all is stable."""

        def read() -> str | None:
            announcement = self.announcements()
            others = {other: each.held for other, each in announcement.items() if other != name}
            queried = list(plan_queries(name, set(range(PARTITIONS)).difference(announcement[name].held), others)[0])
            return queried[0] if len(queried) == 1 else None

        return wait_for("one replica with all other partitions", read)

    def metric_value(self, name: str, metric: str) -> float:
        """Return the value of a metric of one replica."""
        found = re.search(rf"^{metric} (\S+)$", self.services[name].get("/metrics").body.decode(), re.MULTILINE)
        assert found, metric
        return float(found[1])


@pytest.fixture(name="shards")
def start_shards(tmp_path: Path) -> Iterator[Shards]:
    """Yield shards of its own for each test, because a test stops one of the replicas."""
    with ExitStack() as stack:
        server = stack.enter_context(nats_server(tmp_path))
        running = stack.enter_context(engines(ENGINES))
        watches = [watch_of(f"e{at}", each) for at, each in enumerate(running)]
        stack.enter_context(run_bridge(plane_at(server.url, partitions=PARTITIONS), *watches))
        for each_engine, tokens in zip(running, EXPECTED_TOKENS.values(), strict=True):
            each_engine.store(PROMPT[:tokens])
        services: dict[str, Service] = {}
        for name in NAMES:
            port = reserve_port()
            shard = ("--shard-url", f"http://127.0.0.1:{port}", "--replication-factor", 2)
            services[name] = stack.enter_context(serving("--nats", server.url, "--replica-name", name, "--port", port, *shard))
        for each in services.values():
            each.wait_until_ready()
        found = Shards(server, services)
        found.settle()
        yield found


class QueryingClient:
    """A client that sends queries to one replica all the time."""

    def __init__(self, url: str) -> None:
        self.answers = 0
        self.wrong: list[Any] = []
        self._client = Client(url)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(REQUEST_INTERVAL):
            answer = self._client.post("/v1/match", {"model": MODEL, "tokens": PROMPT, "whole_prompt": True})
            found = answer.json if answer.status == 200 else {}
            if found.get("missing") != "" or {each["instance"]: each["tokens"] for each in found["workers"]} != EXPECTED_TOKENS:
                self.wrong.append(found or answer)
            self.answers += 1

    def wait_for_answers(self) -> None:
        """Wait until `MIN_ANSWERS` more queries were answered."""
        min_answers = self.answers + MIN_ANSWERS
        wait_for("answers", lambda: self.answers >= min_answers or not self._thread.is_alive())
        assert self._thread.is_alive()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


@contextmanager
def query_all_the_time(shards: Shards, *names: str) -> Iterator[list[QueryingClient]]:
    """Send queries to each replica all the time; every answer must be complete and right."""
    found = [QueryingClient(shards.services[name].url) for name in names]
    try:
        for each in found:
            each.wait_for_answers()
        yield found
    finally:
        for each in found:
            each.end()
    for name, each in zip(names, found, strict=True):
        assert each.wrong == [], f"{len(each.wrong)} of {each.answers} answers of {name} were wrong"


def test_every_answer_is_complete_while_a_replica_hangs(shards: Shards) -> None:
    """The replica accepts connections and does not answer, so another one with its partitions is queried. Then it resumes."""
    hung = shards.services[shards.peer_of("a")]
    before = shards.metric_value("a", FAILURES)
    with query_all_the_time(shards, *(name for name in NAMES if shards.services[name] is not hung)) as clients:
        hung.program.process.send_signal(signal.SIGSTOP)
        try:
            wait_for("a failed query", lambda: shards.metric_value("a", FAILURES) > before)
            for each in clients:
                each.wait_for_answers()
        finally:
            hung.program.process.send_signal(signal.SIGCONT)
        shards.settle()
        for each in clients:
            each.wait_for_answers()


def test_every_answer_is_complete_after_a_replica_is_killed(shards: Shards) -> None:
    """This holds before and after the other replicas have noticed the loss."""
    killed = shards.peer_of("a")
    remaining = [name for name in NAMES if name != killed]
    with query_all_the_time(shards, *remaining) as clients:
        shards.services[killed].kill()
        for name in remaining:
            wait_for("the killed replica to be removed", lambda: shards.metric_value(name, "kvevents_shard_replicas") == 1)  # noqa: B023 - called at once
        for each in clients:
            each.wait_for_answers()
    assert [shards.metric_value(name, "kvevents_shard_incomplete_answers_total") for name in remaining] == [0, 0]
