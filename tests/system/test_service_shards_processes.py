"""Replicas that hold a share each, as processes with the pauses of production: one dies, one hangs, and others are asked."""

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
from plane_cases import bridging, plane_at
from ports import quiet_port
from service_cases import MODEL, Client, Service, engines, serving, until
from service_replica_cases import watch_of

pytestmark = needs_nats
PARTITIONS: Final = 16
ENGINES: Final = 6
PROMPT: Final = list(range(96))
HELD: Final = {f"e{at}": 16 * (at + 1) for at in range(ENGINES)}
"""What is the truth all the time: each engine holds another length of the prompt."""
NAMES: Final = ("a", "b", "c")
FAILURES: Final = "kvevents_shard_request_failures_total"
ANSWERS: Final = 50
"""That each replica gives after something has happened."""
REQUEST_INTERVAL: Final = 0.005
"""Seconds between an answer and the next request. Without it the clients keep the CPUs from the replicas."""


class Shares(NamedTuple):
    """Replicas by name, and the plane's server."""

    server: NatsServer
    services: dict[str, Service]

    def announced(self) -> dict[str, ShardAnnouncement]:
        """What each says of itself."""

        async def look() -> dict[str, ShardAnnouncement]:
            client = await nats.connect(self.server.url)
            try:
                bucket = await client.jetstream().key_value(Layout("default", PARTITIONS).leases)
                found = [
                    (name, ShardAnnouncement.decode((await bucket.get(SHARD_PREFIX + name)).value or b"")) for name in NAMES
                ]
                return {name: said for name, said in found if said is not None}
            finally:
                await client.close()

        return asyncio.run(look())

    def settle(self) -> None:
        """Wait until each partition is held by two, and each replica has read so.

        A replica that has announced itself twice has read the others in between.
        """

        def held_by_two() -> dict[str, ShardAnnouncement] | None:
            found = self.announced()
            counts = [sum(partition in said.held for said in found.values()) for partition in range(PARTITIONS)]
            return found if set(counts) == {2} else None

        before = until("two that hold each partition", held_by_two)
        until("all to read it", lambda: all(said.counter > before[name].counter + 1 for name, said in self.announced().items()))

    def asked_by(self, name: str) -> str:
        """The replica that another one asks for the partitions it does not hold: of two that hold all it is always the same."""

        def look() -> str | None:
            said = self.announced()
            others = {other: each.held for other, each in said.items() if other != name}
            asked = list(plan_queries(name, set(range(PARTITIONS)).difference(said[name].held), others)[0])
            return asked[0] if len(asked) == 1 else None

        return until("one that holds all the rest", look)

    def counted(self, name: str, metric: str) -> float:
        """A metric of one of them."""
        found = re.search(rf"^{metric} (\S+)$", self.services[name].get("/metrics").body.decode(), re.MULTILINE)
        assert found, metric
        return float(found[1])


@pytest.fixture(name="shares")
def three_shares(tmp_path: Path) -> Iterator[Shares]:
    """Of each test its own: one of them is left without a replica."""
    with ExitStack() as stack:
        server = stack.enter_context(nats_server(tmp_path))
        running = stack.enter_context(engines(ENGINES))
        watches = [watch_of(f"e{at}", each) for at, each in enumerate(running)]
        stack.enter_context(bridging(plane_at(server.url, partitions=PARTITIONS), *watches))
        for one, tokens in zip(running, HELD.values(), strict=True):
            one.store(PROMPT[:tokens])
        services: dict[str, Service] = {}
        for name in NAMES:
            port = quiet_port()
            shard = ("--shard-url", f"http://127.0.0.1:{port}", "--replication-factor", 2)
            services[name] = stack.enter_context(serving("--nats", server.url, "--replica-name", name, "--port", port, *shard))
        for each in services.values():
            each.ready()
        found = Shares(server, services)
        found.settle()
        yield found


class Asking:
    """A client that asks one replica all the time."""

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
            if found.get("missing") != "" or {each["instance"]: each["tokens"] for each in found["workers"]} != HELD:
                self.wrong.append(found or answer)
            self.answers += 1

    def some(self) -> None:
        """Wait until it has asked often since."""
        wanted = self.answers + ANSWERS
        until("answers", lambda: self.answers >= wanted or not self._thread.is_alive())
        assert self._thread.is_alive()

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()


@contextmanager
def asking(shares: Shares, *names: str) -> Iterator[list[Asking]]:
    """Within, each is asked all the time; every answer must be whole, and right."""
    found = [Asking(shares.services[name].url) for name in names]
    try:
        for each in found:
            each.some()
        yield found
    finally:
        for each in found:
            each.end()
    for name, each in zip(names, found, strict=True):
        assert each.wrong == [], f"{len(each.wrong)} of {each.answers} answers of {name} were wrong"


def test_while_one_hangs_every_answer_is_whole(shares: Shares) -> None:
    """It takes connections and answers nothing; another one that holds the same is asked in its place. Then it goes on."""
    hung = shares.services[shares.asked_by("a")]
    before = shares.counted("a", FAILURES)
    with asking(shares, *(name for name in NAMES if shares.services[name] is not hung)) as both:
        hung.program.process.send_signal(signal.SIGSTOP)
        try:
            until("it to be asked in vain", lambda: shares.counted("a", FAILURES) > before)
            for each in both:
                each.some()
        finally:
            hung.program.process.send_signal(signal.SIGCONT)
        shares.settle()
        for each in both:
            each.some()


def test_while_one_is_killed_every_answer_is_whole(shares: Shares) -> None:
    """Until the others have noticed, and after that."""
    killed = shares.asked_by("a")
    left = [name for name in NAMES if name != killed]
    with asking(shares, *left) as both:
        shares.services[killed].kill()
        for name in left:
            until("it to leave", lambda: shares.counted(name, "kvevents_shard_replicas") == 1)  # noqa: B023 - called at once
        for each in both:
            each.some()
    assert [shares.counted(name, "kvevents_shard_incomplete_answers_total") for name in left] == [0, 0]
