"""Tests of whether an engine still takes requests, which the engine's stream does not show."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli_cases import Program
from kvevents.client.schemas import Selection
from service_cases import BLOCK, DEADLINE, MODEL, Service, engines, prompt, serving, suspend, wait_for, write

PROMPT = [*prompt(1), 1]
polled = threading.Event()
"""Set when the server of an engine is asked."""


class _Api(BaseHTTPRequestHandler):
    """The server of an engine without metrics."""

    def do_GET(self) -> None:
        """Answer a question for its load, and that there is no other page, as SGLang without `--enable-metrics`."""
        polled.set()
        body = b'{"server_load": 0}' if self.path == "/load" else b""
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@contextmanager
def api_server(port: int = 0) -> Iterator[int]:
    """Run the server of an engine, and yield its port."""
    with ThreadingHTTPServer(("127.0.0.1", port), _Api) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def select(service: Service) -> Selection:
    idle = [{"instance": name, "load": 0} for name in ("a", "b")]  # otherwise the selections before count
    answer = service.post("/v1/select", {"model": MODEL, "tokens": PROMPT, "explain": True, "candidates": idle})
    assert answer.status == 200, answer
    return msgspec.json.decode(answer.body, type=Selection)


@pytest.mark.parametrize(("field", "path"), [("url", ""), ("load", "/load")])
def test_an_engine_whose_server_no_longer_answers_gets_no_requests(field: str, path: str) -> None:
    """It holds the whole prompt and its stream is EXACT. When its server is back, it gets requests again."""
    with engines(2) as made, serving() as service:
        with api_server() as port:
            servers: list[dict[str, Any]] = [{field: f"http://127.0.0.1:{port}{path}"}, {field: "http://127.0.0.1:1"}]
            service.register("a", made[0].publisher, **servers[0])
            service.register("b", made[1].publisher, **servers[1])  # a server that never answered is not judged
            made[0].store(prompt(1))
            service.exact("a", blocks=4)
            service.exact("b", blocks=0)
            assert (select(service).instance, select(service).usable) == ("a", True)
            assert polled.wait(DEADLINE)
            polled.clear()
            assert polled.wait(DEADLINE), "the first answer was received by then"
        wait_for("the other engine to be chosen", lambda: select(service).instance == "b")
        assert [one.instance for one in select(service).unreachable or ()] == ["a"]
        source = service.source("a")
        assert source["trust"]["state"] == "EXACT"
        assert f"http://127.0.0.1:{port}{path or '/metrics'} does not answer" in source["fault"]
        service.wait_for_log("a rank 0: http://127.0.0.1:.* does not answer")
        with api_server(port):
            wait_for("the engine to be chosen again", lambda: select(service).instance == "a")
            assert service.source("a")["fault"] is None


def test_an_engine_that_is_stopped_gets_no_requests() -> None:
    """A stopped process keeps its connections. The engine has no URL to poll, so the replay endpoint shows that it is
    stopped."""
    ports = ("--endpoint", "tcp://127.0.0.1:*", "--replay", "tcp://127.0.0.1:*")
    stored = {
        "type": "BlockStored",
        "block_hashes": [1, 2, 3, 4],
        "parent_block_hash": None,
        "token_ids": prompt(1),
        "block_size": BLOCK,
        "medium": "GPU",
    }
    with engines(1) as (other,), serving() as service, Program("publish", *ports) as publisher:
        live, replay = re.findall(r"tcp://[0-9.:]+", publisher.err.wait("publishing"))
        service.register("a", live, replay_endpoint=replay)
        service.register("b", other.publisher)
        publisher.write(json.dumps(stored).encode() + b"\n")
        service.exact("a", blocks=4)
        service.exact("b")
        publisher.write(b'{"type": "BlockRemoved", "block_hashes": [9], "medium": "GPU"}\n')
        wait_for("the engine that holds the prompt", lambda: select(service).instance == "a")
        suspend(publisher.process)
        wait_for("the other engine to be chosen", lambda: select(service).instance == "b")
        assert service.trust("a")[0] == "DEGRADED"
        assert "seems to be stopped" in service.source("a")["fault"]
        publisher.process.send_signal(signal.SIGCONT)
        wait_for("the engine to be chosen again", lambda: select(service).instance == "a")


def test_a_drained_engine_gets_no_requests_and_is_followed(tmp_path: Path) -> None:
    """It holds the whole prompt, and its stream stays EXACT. It stays drained when it registers again, and after a restart."""
    with engines(2) as made:
        with serving("--state-dir", tmp_path) as service:
            for name, one in zip(("a", "b"), made, strict=True):
                service.register(name, one.publisher)
                one.store(prompt(1) if name == "a" else prompt(2))
                service.exact(name)
            assert select(service).instance == "a"
            drained = service.post("/v1/drain", instance="a")
            assert (drained.status, drained.json) == (200, {"instance": "a", "ranks": [0], "draining": True})
            chosen = select(service)
            assert (chosen.instance, [one.instance for one in chosen.unreachable or ()]) == ("b", ["a"])
            assert chosen.why.endswith("; 1 left out: 1 drained.")
            made[0].store(prompt(3))
            service.wait_for_prefix("a", prompt(3))
            source = service.source("a")
            assert (source["draining"], source["trust"]["state"]) == (True, "EXACT")
            assert "it is drained" in source["fault"]
            assert service.register("a", made[0].publisher).status == 200
            service.post("/v1/drain", instance="b")
            chosen = select(service)
            assert (chosen.usable, chosen.why.partition("no candidate ")[2]) == (False, "takes requests: 2 drained.")
            service.post("/v1/drain", instance="b", draining=False)
            assert select(service).instance == "b"
            service.wait_for_log("drained a rank 0 of tenant default")
            service.end()
        with serving("--state-dir", tmp_path) as service:
            service.exact("a")
            service.exact("b")
            assert (service.source("a")["draining"], select(service).instance) == (True, "b")
            service.post("/v1/drain", instance="a", rank=0, draining=False)
            assert select(service).instance == "a"
            assert service.source("a")["fault"] is None
            for wrong, status in (
                ({"instance": "c"}, 404),
                ({"instance": "a", "rank": 1}, 404),
                ({"instance": "a", "tenant": "t"}, 404),
                ({"instance": "a", "drain": True}, 422),
                ({}, 422),
            ):
                assert service.post("/v1/drain", wrong).status == status


def test_an_engine_of_discovery_stays_drained_until_discovery_drops_it(tmp_path: Path) -> None:
    """A change of its table and restarts of the service do not end that, nor does a fault of discovery at a restart."""

    def name(*names: str, more: str = "") -> Path:
        tables = [f'[[sources]]\ninstance = "{name}"\nmodel = "m"\nendpoint = "tcp://127.0.0.1:1"\n{more}' for name in names]
        return write(tmp_path / "fleet.toml", "\n".join(tables) or "sources = []\n")

    def drained(service: Service) -> dict[str, bool]:
        return {instance: source["draining"] for (instance, _), source in service.sources().items()}

    words = ("--sources", name("a", "b"), "--state-dir", tmp_path / "state")
    with serving(*words) as service:
        wait_for("the engines", lambda: len(service.sources()) == 2)
        assert service.post("/v1/drain", instance="a").status == 200
        name("a", "b", more='labels = { zone = "1" }\n')
        wait_for("the change", lambda: [source["labels"] for source in service.sources().values()] == [{"zone": "1"}] * 2)
        assert drained(service) == {"a": True, "b": False}
        service.kill()
    write(tmp_path / "fleet.toml", '[[sources]]\ninstance = "c"\nbase_url = "http://127.0.0.1:1"\n')
    with serving(*words) as service:
        wait_for("the fault", lambda: service.get("/v1/sources").json["faults"])
        name("a", "b")
        wait_for("the engines", lambda: drained(service) == {"a": True, "b": False})
        name("b")
        wait_for("one engine", lambda: drained(service) == {"b": False})
        name("a", "b")
        wait_for("the engines", lambda: drained(service) == {"a": False, "b": False})
        assert service.post("/v1/drain", instance="a").status == 200
        service.end()
    with serving(*words) as service:
        wait_for("the engines", lambda: drained(service) == {"a": True, "b": False})
        assert service.post("/v1/drain", instance="a", draining=False).status == 200
        service.kill()
    with serving(*words) as service:
        wait_for("the engines", lambda: drained(service) == {"a": False, "b": False})
