"""One service follows many sources: all of them become EXACT, and unreachable sources are reported at once."""

from __future__ import annotations

import re
import socket

from cli_cases import refuse_connections
from kvevents.publisher import PublisherSettings
from service_cases import BLOCK, engines, prompt, serving, wait_for

SOURCES = 200
ROUNDS = 10


def states_by_source(log: list[str]) -> dict[str, str]:
    """Return the newest state of each source in a log, after a check that each change begins with the state before it."""
    states: dict[str, str] = {}
    for line in log:
        if (match := re.search(r"(node-\d+ rank \d): ([A-Z]+)(?: \(.*\))?, was ([A-Z]+)$", line)) is not None:
            source, state, former = match.groups()
            assert state != former == states.get(source, "CONNECTING"), line
            states[source] = state
    return states


def test_two_hundred_sources_are_exact() -> None:
    # With the settings of production, since the pauses of tests are so short that 200 publishers keep the CPUs busy.
    with engines(SOURCES, settings=PublisherSettings()) as made, serving() as service:
        for number, each in enumerate(made):
            assert service.register(f"node-{number // 8}", each.publisher, number % 8).status == 201
        engines_by_key = {(f"node-{number // 8}", number % 8): each for number, each in enumerate(made)}
        for step in range(ROUNDS):
            for number, each in enumerate(made):
                hashes = each.store(prompt(number * 100 + step, 2))
                if step % 3 == 2:
                    each.remove(hashes[1:])
        blocks = ROUNDS * 2 - ROUNDS // 3

        def are_all_exact() -> bool:
            service.confirm()
            found = service.sources()
            return len(found) == SOURCES and all(
                each["trust"]["state"] == "EXACT"
                and each["blocks"] == blocks
                and each["last_seq"] == engines_by_key[key].last_seq
                for key, each in found.items()
            )

        wait_for("all sources", are_all_exact, 180)
        assert {key: each["batches"] for key, each in service.sources().items()} == {
            key: each.last_seq + 1 for key, each in engines_by_key.items()
        }
        found = service.sources().values()
        assert [(each["lost"], each["resets"], each["gaps"], each["rejected"]) for each in found] == [(0, 0, [], {})] * SOURCES
        for number in range(0, SOURCES, 17):
            name, rank = f"node-{number // 8}", str(number % 8)
            assert service.query(prompt(number * 100, 2))["scores"] == {name: {rank: 2 * BLOCK}}
        stats = service.get("/v1/stats").json
        assert stats["sources"] == {"EXACT": SOURCES}
        assert stats["blocks"] == SOURCES * blocks
        # The log has each change of a state, and nothing else about a source that is well.
        service.program.err.wait(lambda lines: list(states_by_source(lines).values()) == ["EXACT"] * SOURCES)
        assert not service.log_lines("WARNING|ERROR")
        metrics = service.get("/metrics").body.decode()
        assert f'kvevents_sources{{state="EXACT"}} {SOURCES}.0\n' in metrics


def test_an_unreachable_source_is_reported_at_once_and_logged_only_once() -> None:
    with refuse_connections() as endpoint, serving() as service:
        for number in range(20):
            assert service.register(f"dead-{number}", endpoint).status == 201
        assert service.register("lost", "tcp://no-such-host.invalid:5557").status == 201

        def count_reasons(text: str) -> int:
            return sum(text in each["trust"]["reason"] for each in service.sources().values())

        wait_for("refused connections", lambda: count_reasons(f"nothing listens at {endpoint}") == 20)
        wait_for("the unknown host name", lambda: count_reasons("no-such-host.invalid does not resolve") == 1)
        assert {each["trust"]["state"] for each in service.sources().values()} == {"CONNECTING"}
        assert all(each["fault"] for each in service.sources().values())
        # Attempts continue, with growing pauses; the log has only the first one.
        wait_for("later attempts", lambda: service.get("/v1/stats").json["uptime_seconds"] > 4)
        for line in ("dead-7 rank 0: nothing listens", "lost rank 0: the name"):
            service.wait_for_log(line)
            assert len(service.log_lines(line)) == 1


def test_a_port_of_another_protocol_is_reported() -> None:
    """The port accepts connections but sends no ZeroMQ greeting; libzmq alone would wait without a message."""
    with socket.create_server(("127.0.0.1", 0)) as listener, serving() as service:
        assert service.register("web", f"tcp://127.0.0.1:{listener.getsockname()[1]}").status == 201
        wait_for("a reason", lambda: "accepts connections and sends nothing" in service.source("web")["trust"]["reason"])
