"""`kvevents plane status`, in a process of its own, of a plane on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nats_servers import NatsServer, nats_server, needs_nats
from plane_cases import bridging, plane_at
from service_cases import engine, serving, until
from test_cli import Ended, run
from test_service_replica import watch_of

pytestmark = needs_nats


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    with nats_server(tmp_path_factory.mktemp("nats")) as found:
        yield found


def status(*args: object) -> Ended:
    return run("plane", "status", *args)


def test_it_tells_lanes_snapshots_and_replicas(server: NatsServer) -> None:
    plane = plane_at(server.url, name="told", lanes=2)
    flags = ("--from", server.url, "--plane", "told", "--snapshot-seconds", "0.3", "--replica", "a")
    with engine() as one, bridging(plane, watch_of("one", one)), serving(*flags) as service:
        one.store(range(64))
        service.exact("one", blocks=4)

        def look() -> Any:
            found = msgspec.json.decode(status("--at", server.url, "--plane", "told", "--json").out)
            return found if found["snapshots"] and found["replicas"] else None

        found = until("a snapshot", look)
        assert found["faults"] == []
        assert [set(lane["bridges"]) for lane in found["lanes"]] == [{"bridge"}] * 2
        assert [(each["name"], each["differs"]) for each in found["replicas"]] == [("a", [])]
        ended = status("--at", server.url, "--plane", "told")
        assert ended.code == 0
        assert "lane   0" in ended.out


def test_what_is_not_there_is_one_sentence_and_an_error(server: NatsServer, tmp_path: Path) -> None:
    ended = status("--at", server.url, "--plane", "nowhere")
    assert (ended.code, ended.out) == (1, "")
    assert "there is no plane 'nowhere'" in ended.err
    ended = status("--at", "nats://127.0.0.1:1")
    assert ended.code == 1
    assert "127.0.0.1:1" in ended.err
    ended = status("--at", server.url, "--creds", str(tmp_path / "none"))
    assert ended.code in {1, 2}
    assert "cannot read" in ended.err
