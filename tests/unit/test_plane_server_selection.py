"""`ReconnectPolicy` chooses the next server and pause, and `ConnectionLog` logs no message twice."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents_plane.connection import (
    DEFAULT_LIMITS,
    MAX_LOGGED_ERRORS,
    STABLE_SECONDS,
    ConnectionLog,
    ReconnectPolicy,
)

HOSTS = ("a", "b", "c")


def servers(*hosts: str) -> list[Any]:
    return [SimpleNamespace(uri=urlsplit(f"nats://{host}:4222")) for host in hosts]


def attempts(policy: ReconnectPolicy, count: int, *hosts: str) -> list[tuple[str, float]]:
    chosen = [policy.choose(servers(*hosts), {}) for _ in range(count)]
    return [(str(server.uri.hostname), pause) for server, pause in chosen]


def test_each_round_tries_every_server_once_after_one_pause() -> None:
    policy = ReconnectPolicy(DEFAULT_LIMITS)
    policy.start(STABLE_SECONDS)
    for number in range(8):
        found = attempts(policy, 3, *HOSTS)
        assert sorted(host for host, _ in found) == list(HOSTS)
        most = min(DEFAULT_LIMITS.reconnect_seconds * 2**number, DEFAULT_LIMITS.max_reconnect_seconds)
        assert most / 2 <= found[0][1] <= most
        assert [pause for _, pause in found[1:]] == [0, 0]


def test_servers_that_have_left_the_cluster_are_not_tried() -> None:
    """The servers name those of the cluster. A configured one is tried although no server names it."""
    policy = ReconnectPolicy(DEFAULT_LIMITS, ["nats://a:4222"])
    info = {"connect_urls": ["b:4222"]}
    assert {str(policy.choose(servers(*HOSTS), info)[0].uri.hostname) for _ in range(20)} == {"a", "b"}
    assert {str(policy.choose(servers("c"), info)[0].uri.hostname) for _ in range(3)} == {"c"}, "without another server"


@pytest.mark.parametrize(("lasted", "starts_again"), [(STABLE_SECONDS, True), (STABLE_SECONDS / 2, False)])
def test_pauses_start_again_only_after_a_connection_that_lasted(lasted: float, starts_again: bool) -> None:
    """The pauses go on for a server that closes every connection at once."""
    policy = ReconnectPolicy(DEFAULT_LIMITS)
    attempts(policy, 5, "a")
    policy.start(lasted)
    assert (attempts(policy, 1, "a")[0][1] <= DEFAULT_LIMITS.reconnect_seconds) == starts_again


@given(st.lists(st.sets(st.sampled_from("abcdef"), min_size=1), min_size=1, max_size=30))
def test_the_list_of_servers_can_change_at_any_time(known: list[set[str]]) -> None:
    """A chosen server is one of the known servers, and no server is chosen twice in a round."""
    policy, this_round = ReconnectPolicy(DEFAULT_LIMITS), Counter[str]()
    for hosts in known:
        ((host, pause),) = attempts(policy, 1, *hosts)
        assert host in hosts
        if pause:
            this_round.clear()
        this_round[host] += 1
        assert this_round[host] == 1


class Client:
    """The attributes of the nats-py client that `ConnectionLog` reads."""

    connected_url = urlsplit("nats://a:4222")
    is_closed = False


def log_with_client(states: list[str]) -> tuple[ConnectionLog, Client]:
    connection_log, client = ConnectionLog("bridge", states.append), Client()
    assert connection_log.callbacks(client)["name"] == "bridge"  # type: ignore[arg-type]
    return connection_log, client


async def test_a_state_is_logged_when_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    states: list[str] = []
    connection_log, client = log_with_client(states)
    calls = connection_log.callbacks(client)  # type: ignore[arg-type]
    connection_log.set_state("connected")
    await calls["disconnected_cb"]()
    await calls["disconnected_cb"]()
    await calls["reconnected_cb"]()
    client.is_closed = True
    await calls["disconnected_cb"]()  # nats-py calls this also for a closed client
    await calls["closed_cb"]()
    await calls["closed_cb"]()
    assert states == ["connected", "reconnecting", "connected", "closed"]
    assert len(caplog.records) == 4


async def test_the_same_error_is_logged_once_in_each_state(caplog: pytest.LogCaptureFixture) -> None:
    connection_log, client = log_with_client([])
    calls = connection_log.callbacks(client)  # type: ignore[arg-type]
    connection_log.set_state("connected")
    for _ in range(2):
        await calls["disconnected_cb"]()
        for _ in range(5):
            await calls["error_cb"](ConnectionRefusedError(111, "refused"))
        await calls["reconnected_cb"]()
    assert [record.getMessage() for record in caplog.records].count("bridge: refused") == 2


async def test_the_number_of_different_logged_errors_is_limited(caplog: pytest.LogCaptureFixture) -> None:
    connection_log, client = log_with_client([])
    calls = connection_log.callbacks(client)  # type: ignore[arg-type]
    connection_log.set_state("connected")
    for number in range(3 * MAX_LOGGED_ERRORS):
        await calls["error_cb"](OSError(number, f"error {number}"))
    assert len(caplog.records) == MAX_LOGGED_ERRORS


async def test_before_the_first_connection_errors_go_to_the_caller_of_connect(caplog: pytest.LogCaptureFixture) -> None:
    states: list[str] = []
    connection_log, client = log_with_client(states)
    calls = connection_log.callbacks(client)  # type: ignore[arg-type]
    with pytest.raises(ConnectionRefusedError):
        await calls["error_cb"](ConnectionRefusedError(111, "refused"))
    connection_log.stop_logging()
    await calls["error_cb"](ConnectionRefusedError(111, "refused"))
    await calls["closed_cb"]()
    assert not caplog.records
    assert not states
