"""The examples, as processes."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

import paths
from cli_cases import SECONDS, Ended, Program, tape_of
from cluster_cases import (  # noqa: F401 - a fixture, used by being here
    Cluster,
    cluster_fixture,
    until,
)
from kvevents.engines.plugin import VARIABLE, EngineSettings, read_settings
from kvevents.events import BlockStored, KVEventBatch
from kvevents.wire import encode_batch
from nats_servers import nats_server, needs_nats
from ports import quiet_port

EXAMPLES = paths.ROOT / "examples"


def logged(err: str) -> set[str]:
    """What the log says of endpoints, each once; a line of another shape comes out as it is."""
    return {(re.match(r"tcp://[\w.:]+: ([\w ]+): ", line) or [line, line])[1] for line in err.splitlines()}


def example(name: str, *args: object) -> Program:
    return Program(EXAMPLES / name, *args, command=[sys.executable])


def test_the_recorded_run_delivers_what_was_published() -> None:
    with example("recorded_run.py") as demo:
        ended = demo.end()
    assert ended.code == 0, ended.out + ended.err
    assert logged(ended.err) <= {"no connection"}  # while the engine restarts
    counts = re.findall(r"life (\d): +(\d+) published, +(\d+) delivered, .*: equal, in order, byte for byte", ended.out)
    assert counts == [("0", "79", "79"), ("1", "35", "35")]
    assert "RESET   incarnation 1 begins" in ended.out
    assert "Try next:" in ended.out
    assert "\x1b[" not in ended.out


def test_one_end_publishes_and_the_other_reads() -> None:
    with example("publish.py", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
        endpoints = publisher.out.wait("tcp://").split()
        with example("subscribe.py", *endpoints) as subscriber:
            subscriber.out.wait(r"^0 \[BlockStored\(block_hashes=\[1\], parent_block_hash=None")
            subscriber.out.wait(r"^\d+ \[BlockStored.* EXACT")
        with example("async_subscribe.py", ",".join(endpoints)) as subscriber:
            subscriber.out.wait(r"Batch\(source='pod-0', rank=0, incarnation=0, seq=\d+,.* EXACT")


def test_the_router_chooses_the_engine_that_holds_the_prompt() -> None:
    """Two engines hold one prompt each. An invalid line is reported, and the next line is read; Ctrl-C ends it."""
    with ExitStack() as stack:
        tapes = [stack.enter_context(tape_of(stored(first))) for first in (1, 2)]
        for tape in tapes:
            tape.play()
        router = stack.enter_context(example("router.py", *(f"{tape.endpoint},{tape.replay_endpoint}" for tape in tapes)))
        assert router.process.stdin
        for first in (1, 2):
            ask = f"{','.join([str(first)] * 16)},9\n".encode()
            until(lambda ask=ask, first=first: answered(router, ask, rf"chose engine-{first - 1} .* holds 16 of 17 tokens"))  # type: ignore[misc]
        assert answered(router, b"one,two\n", "^not a prompt: invalid literal")
        ended = router.interrupt()
    assert ended.code == 0, ended


def stored(first: int) -> tuple[bytes, int, bytes]:
    """A block of 16 times one token."""
    return b"", 0, encode_batch(KVEventBatch(1.0, [BlockStored([first], None, [first] * 16, 16)], 0))


def answered(router: Program, line: bytes, expected: str) -> bool:
    """Whether the answer to this line is the expected one."""
    assert router.process.stdin
    before = len(router.out.all)
    router.process.stdin.write(line)
    router.process.stdin.flush()
    router.out.wait(lambda lines: len(lines) > before)
    return re.search(expected, router.out.all[-1]) is not None


def test_a_service_names_the_engine_for_a_prompt() -> None:
    """And a model that it does not know in one sentence."""
    with (
        tape_of(stored(1)) as tape,
        Program(
            "serve", "--port", 0, "--model", "m", "--worker", f"engine-0={tape.endpoint},{tape.replay_endpoint}"
        ) as service,
    ):
        tape.play()
        url = re.search(r"http://[\d.]+:\d+", service.err.wait("http://"))
        assert url
        prompt = ",".join(["1"] * 16 + ["9"])
        until(lambda: "engine-0: " in asked("m", prompt, url[0]).out, service)
        until(lambda: "holds 16 of 17 tokens" in asked("m", prompt, url[0]).out, service)
        unknown = asked("other", prompt, url[0])
        assert unknown.code == 1
        assert re.search(r"^query_service.py: http://.* answered 404: .*other", unknown.err)
    gone = asked("m", "1", "http://127.0.0.1:9")
    assert (gone.code, gone.err[:68]) == (1, "query_service.py: no service answers at http://127.0.0.1:9; start one"[:68])
    assert "argument tokens: invalid token_ids value: '1,x'" in asked("m", "1,x", "http://127.0.0.1:9").err


def asked(model: str, prompt: str, url: str) -> Ended:
    with example("query_service.py", model, prompt, "--service", url) as query:
        return query.end()


class FakeEngine(BaseHTTPRequestHandler):
    """The HTTP side of vLLM as far as the router of the example uses it; a real one does not run here. Its events are real."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = [int(word) for word in body["prompt"].split()]
        answer = {"tokens": tokens, "count": len(tokens)} if self.path == "/tokenize" else {"choices": [{"text": "fine"}]}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        """Keep quiet."""


@contextmanager
def fake_engine() -> Iterator[str]:
    """Its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeEngine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def test_the_openai_endpoint_sends_a_prompt_to_the_engine_that_has_it_cached() -> None:
    """The engine answers through it; an engine that is gone is 502."""
    port = quiet_port()
    with ExitStack() as stack:
        tapes = [stack.enter_context(tape_of(stored(first))) for first in (1, 2)]
        engines = ExitStack()
        stack.push(engines)
        urls = [engines.enter_context(fake_engine()) for _ in tapes]
        for tape in tapes:
            tape.play()
        arguments = [f"{url},{tape.endpoint},{tape.replay_endpoint}" for url, tape in zip(urls, tapes, strict=True)]
        router = stack.enter_context(example("fastapi_router.py", *arguments, "--port", port))
        for first in (1, 2):
            until(lambda first=first: completed(port, first) == (200, f"engine-{first - 1}", "16"), router)  # type: ignore[misc]
        engines.close()
        assert completed(port, 1)[0] == 502
        ended = router.interrupt()
    assert "Traceback" not in ended.err, ended.err


def test_the_openai_endpoint_says_what_is_wrong_with_an_engine() -> None:
    with example("fastapi_router.py", "http://127.0.0.1:9,tcp://bad,tcp://127.0.0.1:5558") as router:
        ended = router.end()
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("fastapi_router.py: error: invalid endpoint 'tcp://bad'")


def completed(port: int, first: int) -> tuple[int, str | None, str | None]:
    """Status, engine and cached tokens of a completion; status 0 while nothing listens."""
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    body = json.dumps({"model": "m", "prompt": " ".join([str(first)] * 16 + ["9"])})
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        assert response.status != 200 or b"fine" in text
        return response.status, response.headers["x-kvevents-engine"], response.headers["x-kvevents-cached-tokens"]
    except OSError:
        return 0, None, None
    finally:
        connection.close()


def test_the_example_of_a_test_passes() -> None:
    """As pasted: with pytest and kvevents alone."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        EXAMPLES,
        EXAMPLES / "test_my_router.py",
    ]
    with Program(command=list(map(str, command))) as tests:
        ended = tests.end()
    assert ended.code == 0, ended.out
    assert "5 passed" in ended.out


def test_only_the_key_that_is_allowed_reads_events() -> None:
    with example("curve.py") as curve:
        ended = curve.end()
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0] == "router: receives events"
    assert lines[1].startswith("stranger: CONNECTING")
    assert re.fullmatch(r"connections refused: [1-9]\d*", lines[2])


def test_the_settings_of_the_engine_image_are_the_defaults() -> None:
    """As the file says; a name that the plugin does not know would be an error."""
    file = EXAMPLES / "engine-image" / "publisher.toml"
    assert read_settings({VARIABLE: str(file)}) == EngineSettings()


def test_the_index_shows_how_much_of_a_prompt_each_worker_holds() -> None:
    """An engine that publishes the prompt beside one that is not there; Ctrl-C ends it without a word."""
    prompt = ",".join(["1"] * 16 + ["2"] * 16 + ["1"])
    with example("publish.py", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
        endpoints = ",".join(publisher.out.wait("tcp://").split())
        with example("prefix_index.py", "--prompt", prompt, endpoints, f"tcp://127.0.0.1:{quiet_port()}") as index:
            index.out.wait(r"^engine-0: 32 of 33 tokens, by tier \{'gpu': 32.*, EXACT$")
            ended = index.interrupt()
    assert ended.code == 0
    assert logged(ended.err) <= {"no connection"}
    assert re.search("^engine-1: 0 of 33 tokens, CONNECTING", ended.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--prompt", "1,x"], 2, "argument --prompt: invalid tokens value: '1,x'"),
        (["--prompt", "4294967296"], 2, "argument --prompt: token ids are from 0 to 2**32 - 1"),
        (["127.0.0.1:5557"], 1, "invalid endpoint '127.0.0.1:5557': it has no transport; expected tcp://HOST:PORT"),
        (["tcp://127.0.0.1"], 1, "invalid endpoint 'tcp://127.0.0.1': expected tcp://HOST:PORT"),
    ],
)
def test_the_index_says_what_is_wrong_with_its_arguments(arguments: list[str], code: int, message: str) -> None:
    with example("prefix_index.py", *arguments) as index:
        ended = index.end()
    assert (ended.code, ended.out) == (code, "")
    assert f"prefix_index.py: {'error: ' if code == 2 else ''}{message}" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("name", "ready"),
    [
        ("publish.py", "^tcp://"),
        ("subscribe.py", r"^0 \["),
        ("async_subscribe.py", "^Batch"),
        ("recorded_run.py", "#"),
    ],
)
def test_ctrl_c_ends_an_example_without_a_traceback(name: str, ready: str) -> None:
    """What follows or publishes until then ends with 0, what had more to do with 130."""
    with tape_of((b"", 0, encode_batch(KVEventBatch(1.0, [BlockStored([1], None, [1, 2], 2)], 0)))) as tape:
        tape.play()
        arguments = {
            "publish.py": ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
            "subscribe.py": (tape.endpoint, tape.replay_endpoint),
            "async_subscribe.py": (f"{tape.endpoint},{tape.replay_endpoint}",),
        }.get(name, ())
        with example(name, *arguments) as program:
            program.out.wait(ready)
            ended = program.interrupt()
    assert ended.code == (130 if name == "recorded_run.py" else 0), ended
    assert "Traceback" not in ended.out + ended.err


@pytest.mark.parametrize("name", ["publish.py", "subscribe.py", "async_subscribe.py", "router.py"])
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [(("--nonsense",), 2, "unrecognized arguments: --nonsense"), (("127.0.0.1:5557",), 1, "127.0.0.1:5557")],
)
def test_an_example_reports_wrong_arguments_in_a_sentence(name: str, arguments: tuple[str, ...], code: int, said: str) -> None:
    """The last line of stderr says what is wrong, and nothing is a traceback."""
    with example(name, *arguments) as program:
        ended = program.end()
    assert (ended.code, ended.out) == (code, "")
    assert said in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err


def compose(name: str) -> dict[str, Any]:
    """A file for `docker compose`, which does not run here: its commands run as processes."""
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose" / name).read_text())
    return found


def start(stack: ExitStack, cluster: Cluster, services: dict[str, Any], **names: str) -> list[Program]:
    """Start each service of the image `kvevents`. The service listens at its default port, which another test may have."""
    local = names | {f"//{name}:": "//127.0.0.1:" for name in services}
    commands = [each["command"] for each in services.values() if each["image"] == "kvevents"]
    commands = [[*command, "--port=8090"] if command[0] == "serve" else command for command in commands]
    return [stack.enter_context(cluster.run(command, **local)) for command in commands]


def exact(cluster: Cluster) -> int:
    """Streams of the service that are EXACT."""
    return cluster.get(8090, "/v1/sources")[1].count(b'"state":"EXACT"')


def test_the_composed_relay_carries_the_events_of_the_engine(cluster: Cluster) -> None:
    with ExitStack() as stack:
        programs = start(stack, cluster, compose("relay.yaml")["services"])
        until(lambda: exact(cluster) == 1, *programs)


@needs_nats
def test_the_composed_plane_carries_the_events_of_both_engines(cluster: Cluster) -> None:
    with nats_server(cluster.folder / "nats") as nats, ExitStack() as stack:
        services = compose("plane.yaml")["services"]
        assert services["nats"]["command"][0] == "--jetstream"
        programs = start(stack, cluster, services, **{"nats://nats:4222": nats.url})
        until(lambda: exact(cluster) == 2, *programs)


def test_the_composed_prometheus_asks_the_service_and_has_the_alerts(cluster: Cluster) -> None:
    found = compose("grafana.yaml")
    with ExitStack() as stack:
        programs = start(stack, cluster, found["services"])
        until(lambda: exact(cluster) == 2, *programs)
        settings = yaml.safe_load(found["configs"]["prometheus"]["content"])
        [[target]] = [config["targets"] for config in settings["scrape_configs"][0]["static_configs"]]
        assert target == "service:8090"
        assert b"kvevents_" in cluster.get(8090, "/metrics")[1]
    for service in found["services"].values():
        for volume in service.get("volumes", []):
            assert (EXAMPLES / "compose" / volume.partition(":")[0]).is_file(), volume
        for config in service.get("configs", []):
            assert yaml.safe_load(found["configs"][config["source"]]["content"])
