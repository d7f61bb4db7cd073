"""Engines that connect to the service, as in llm-d: each is found by its topic, `kv@INSTANCE@MODEL`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli_cases import refuse_connections, run
from kvevents.publisher import ZmqEventPublisher
from service_cases import Engine, Service, prompt, serving, wait_for, write
from tools.ports import reserve_port


@contextmanager
def pod(endpoint: str, topic: str) -> Iterator[Engine]:
    """Yield an engine that connects to the service."""
    publisher = ZmqEventPublisher(0, endpoint, topic=topic, bind=False)
    try:
        yield Engine(publisher)
    finally:
        publisher.shutdown()


def store_until_found(service: Service, made: Engine, instance: str, tokens: list[int], model: str = "m", **scope: str) -> None:
    """Have an engine store a prompt until a query finds it: a PUB socket drops messages before it has a subscriber."""

    def is_found() -> bool:
        made.clear()
        made.store(tokens)
        if (instance, 0) not in service.sources():
            return False
        answer = service.post("/v1/match", model=model, tokens=tokens, **scope)
        return any(each["instance"] == instance and each["tokens"] for each in answer.json["workers"])

    wait_for(f"the blocks of {instance}", is_found)


def test_engines_that_connect_are_found_by_their_topics() -> None:
    """Each engine has its own blocks, numbers and trust. An engine that restarts loses only its own blocks."""
    endpoint = f"tcp://127.0.0.1:{reserve_port()}"
    with serving("--listen", endpoint) as service, pod(endpoint, "kv@b@m") as other:
        assert service.sources() == {}
        with pod(endpoint, "kv@a@m") as made:
            store_until_found(service, made, "a", prompt(1))
            store_until_found(service, other, "b", prompt(9))
            assert service.held(prompt(1)) == {"a": 64}
            assert set(service.sources()) == {("a", 0), ("b", 0)}
            state, reason = service.trust("a")
            assert state == "DEGRADED"
            assert "no replay endpoint" in reason
            assert b'engine="a"' in service.get("/metrics").body
            assert service.get("/v1/sources").json["faults"] == {}
        wait_for("the end of the connection", lambda: service.trust("a")[0] == "STALE")
        assert service.trust("b")[0] == "DEGRADED"
        with pod(endpoint, "kv@a@m") as again:
            store_until_found(service, again, "a", prompt(2))
            assert service.held(prompt(1)) == {}
            assert service.held(prompt(9)) == {"b": 64}


def test_an_engine_that_stays_away_is_removed_and_found_again(tmp_path: Path) -> None:
    """The rule is that of answers that omit it (`hide_stale_seconds`). Clients cannot remove an engine that has connected."""
    endpoint = f"tcp://127.0.0.1:{reserve_port()}"
    config = write(tmp_path / "c.toml", f'hide_stale_seconds = 1\n[topics]\nendpoint = "{endpoint}"\ntenant = "t"\n')
    with serving("--config", config) as service:
        for _ in range(2):
            with pod(endpoint, "kv@10.0.0.7:8000@org/model") as made:
                store_until_found(service, made, "10.0.0.7:8000", prompt(1), model="org/model", tenant="t")
                answer = service.post("/unregister", instance_id="10.0.0.7:8000", tenant_id="t")
                assert (answer.status, answer.reason) == (409, "named-by-discovery")
                assert answer.json["detail"] == f"10.0.0.7:8000 rank 0 was found by its topic at {endpoint}"
            wait_for("its removal", lambda: not service.sources())
            wait_for("no blocks", lambda: service.get("/v1/stats").json["blocks"] == 0)


def test_a_topic_that_cannot_be_followed_is_a_fault(tmp_path: Path) -> None:
    """A registered engine has its name, or the topic has no model. The first heals when the name becomes free."""
    endpoint = f"tcp://127.0.0.1:{reserve_port()}"
    with refuse_connections() as nowhere, serving("--listen", endpoint) as service:
        assert service.register("a", nowhere).status == 201
        with pod(endpoint, "kv@a@m") as made, pod(endpoint, "kv@odd") as odd:

            def faults() -> list[str]:
                made.store(prompt(1))
                odd.store(prompt(2))
                found: list[str] = service.get("/v1/sources").json["faults"].get("topic", [])
                return sorted(found) if len(found) == 2 else []

            taken, unnamed = wait_for("both faults", faults)
            assert taken.startswith(
                "the engine with the topic 'kv@a@m' is not followed: a rank 0 is registered over HTTP already"
            )
            assert unnamed == (
                "the engine with the topic 'kv@odd' is not followed: its topic names no model: expected kv@INSTANCE@MODEL, or"
                " the setting topics.model"
            )
            assert set(service.get("/health").json["warnings"]) >= {taken, unnamed}
            assert list(service.sources()) == [("a", 0)]
            assert service.post("/unregister", instance_id="a").status == 200
            store_until_found(service, made, "a", prompt(3))
            assert service.get("/v1/sources").json["faults"]["topic"] == [unnamed]


def test_an_endpoint_that_is_in_use_ends_the_service_with_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        result = run("serve", "--port", "0", "--listen", endpoint)
    assert result.code == 1
    assert f"cannot bind {endpoint}: Address already in use" in result.err
