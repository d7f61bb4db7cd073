"""The examples work when they run as processes."""

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
from cli_cases import SECONDS, ProcessResult, Program, tape_of
from cluster_cases import (  # noqa: F401 - a fixture, which pytest finds by name
    Cluster,
    cluster_fixture,
    poll_for,
)
from kvevents.engines.plugin import VARIABLE, EngineSettings, read_settings
from kvevents.events import BlockStored, KVEventBatch
from kvevents.wire import encode_batch
from nats_cases import needs_nats
from service_cases import Service, engine, serving
from tools.nats_servers import nats_server
from tools.ports import reserve_port

EXAMPLES = paths.ROOT / "examples"


def logged_states(err: str) -> set[str]:
    """Return what the log reports of endpoints, each state once; a line of another form is returned unchanged."""
    return {(re.match(r"tcp://[\w.:]+: ([\w ]+): ", line) or [line, line])[1] for line in err.splitlines()}


def start_example(name: str, *args: object) -> Program:
    return Program(EXAMPLES / name, *args, command=[sys.executable])


def test_the_recorded_run_delivers_what_was_published() -> None:
    with start_example("recorded_run.py") as demo:
        ended = demo.end()
    assert ended.code == 0, ended.out + ended.err
    assert logged_states(ended.err) <= {"no connection"}  # while the engine restarts
    counts = re.findall(r"incarnation (\d): +(\d+) published, +(\d+) delivered, .*: equal, in order, byte for byte", ended.out)
    assert counts == [("0", "79", "79"), ("1", "35", "35")]
    assert "RESET   incarnation 1 begins" in ended.out
    assert "Try next:" in ended.out
    assert "\x1b[" not in ended.out


def test_the_subscribers_read_what_the_publisher_sends() -> None:
    with start_example("publish.py", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
        endpoints = publisher.out.wait("tcp://").split()
        with start_example("subscribe.py", *endpoints) as subscriber:
            subscriber.out.wait(r"^0 \[BlockStored\(block_hashes=\[1\], parent_block_hash=None")
            subscriber.out.wait(r"^\d+ \[BlockStored.* EXACT")
        with start_example("async_subscribe.py", ",".join(endpoints)) as subscriber:
            subscriber.out.wait(r"Batch\(source='pod-0', rank=0, incarnation=0, seq=\d+,.* EXACT")


def test_the_router_chooses_the_engine_that_holds_the_prompt() -> None:
    """The first answer counts their caches. An invalid line is reported, and the next line is read; Ctrl-C ends the router."""
    with ExitStack() as stack:
        tapes = [stack.enter_context(tape_of(encode_block_of(first))) for first in (1, 2)]
        for tape in tapes:
            tape.play()
        router = stack.enter_context(start_example("router.py", *(f"{tape.endpoint},{tape.replay_endpoint}" for tape in tapes)))
        assert router.process.stdin
        for first in (1, 2):
            req = f"{','.join([str(first)] * 16)},9\n".encode()
            assert answers(router, req, rf"chose engine-{first - 1} .* holds 16 of 17 tokens"), router.out.all
        assert answers(router, b"one,two\n", "^not a prompt: invalid literal")
        ended = router.interrupt()
    assert ended.code == 0, ended
    wrong = ask("router.py", "127.0.0.1:5557")
    assert (wrong.code, wrong.out) == (1, "")
    assert re.fullmatch("router.py: invalid endpoint '127.0.0.1:5557'.*", wrong.err)


def encode_block_of(first: int) -> tuple[bytes, int, bytes]:
    """Return a batch with one block, which has the same token 16 times."""
    return b"", 0, encode_batch(KVEventBatch(1.0, [BlockStored([first], None, [first] * 16, 16)], 0))


def answers(router: Program, line: bytes, expected: str) -> bool:
    """Return whether the router answers this line as expected."""
    assert router.process.stdin
    before = len(router.out.all)
    router.process.stdin.write(line)
    router.process.stdin.flush()
    router.out.wait(lambda lines: len(lines) > before)
    return re.search(expected, router.out.all[-1]) is not None


def test_the_routers_are_as_short_as_the_list_of_examples_says() -> None:
    """Empty lines and docstrings do not count."""
    stated = dict(re.findall(r"\((\w+\.py)\) \| .* in (\d+) lines", (EXAMPLES / "README.md").read_text()))
    assert set(stated) == {"router.py", "http_router.py"}
    for name, lines in stated.items():
        code = re.sub(r'""".*?"""', "", (EXAMPLES / name).read_text(), flags=re.DOTALL)
        assert sum(bool(line.strip()) for line in code.splitlines()) <= int(lines), name


class FakeEngine(BaseHTTPRequestHandler):
    """The HTTP side of vLLM as far as the router of the example uses it. Only this part is fake; the events are real."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["prompt"]
        tokens = [int(word) for word in prompt.split()] if isinstance(prompt, str) else prompt
        answer = {"tokens": tokens, "count": len(tokens)} if self.path == "/tokenize" else {"choices": [{"text": "fine"}]}
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


@contextmanager
def run_fake_engine() -> Iterator[str]:
    """Yield the URL of the fake engine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeEngine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def serve_engine(url: str | None = None) -> Iterator[Service]:
    """Yield a service whose engine has the prompt cached, and takes requests at `url`."""
    with engine() as made, serving() as service:
        assert service.register("engine-0", made.publisher, model_name="m", url=url).status == 201
        made.store([1] * 16)
        service.exact("engine-0", blocks=1)
        yield service


def ask(name: str, *arguments: object) -> ProcessResult:
    with start_example(name, *arguments) as program:
        return program.end()


PROMPT = ",".join(["1"] * 16 + ["9"])


def test_the_router_over_http_prints_the_engine_of_a_service() -> None:
    """An unknown model and a service that does not run are reported in one sentence."""
    with serve_engine("http://127.0.0.1:9") as service:
        answer = ask("http_router.py", "m", PROMPT, service.url)
        assert answer.out.startswith("engine-0 http://127.0.0.1:9 EXACT "), answer
        assert "holds 16 of 17 tokens" in answer.out
        unknown = ask("http_router.py", "other", PROMPT, service.url)
    assert (unknown.code, unknown.out) == (1, "")
    assert re.fullmatch("http_router.py: no engine serves model 'other'.*", unknown.err)
    assert ask("http_router.py").err.startswith("Ask a service which engine takes a prompt: ")
    stopped = ask("http_router.py", "m", "1", "http://127.0.0.1:9")
    assert stopped.code == 1
    assert re.fullmatch(r"http_router.py: .*http://127.0.0.1:9.*", stopped.err)


def test_the_reserving_router_streams_the_answer_and_ends_its_reservation() -> None:
    """It does so after an answer, and after the failure of the engine."""
    with run_fake_engine() as url, serve_engine(url) as service:
        answer = ask("reserving_router.py", "m", PROMPT, service.url)
        assert (answer.code, json.loads(answer.out)["choices"]) == (0, [{"text": "fine"}])
        count = 'kvevents_reservations_total{outcome="finished"} '
        assert f"{count}1" in service.get("/metrics").body.decode()
    with serve_engine("http://127.0.0.1:9") as service:
        failed = ask("reserving_router.py", "m", PROMPT, service.url)
        assert (failed.code, failed.out) == (1, "")
        assert re.fullmatch("reserving_router.py: .*refused.*", failed.err)
        assert f"{count}1" in service.get("/metrics").body.decode()
    with serve_engine() as service:
        failed = ask("reserving_router.py", "m", PROMPT, service.url)
        assert (failed.code, failed.out) == (1, "")
        assert failed.err.endswith("register it with a url")


def test_the_openai_endpoint_sends_a_prompt_to_the_engine_that_has_it_cached() -> None:
    """The engine's answer is returned to the client; the router answers 502 for an engine that stopped."""
    port = reserve_port()
    with ExitStack() as stack:
        tapes = [stack.enter_context(tape_of(encode_block_of(first))) for first in (1, 2)]
        engines = ExitStack()
        stack.push(engines)
        urls = [engines.enter_context(run_fake_engine()) for _ in tapes]
        for tape in tapes:
            tape.play()
        arguments = [f"{url},{tape.endpoint},{tape.replay_endpoint}" for url, tape in zip(urls, tapes, strict=True)]
        router = stack.enter_context(start_example("fastapi_router.py", *arguments, "--port", port))
        for first in (1, 2):
            poll_for(lambda first=first: complete(port, first) == (200, f"engine-{first - 1}", "16"), router)  # type: ignore[misc]
        engines.close()
        assert complete(port, 1)[0] == 502
        ended = router.interrupt()
    assert "Traceback" not in ended.err, ended.err


def test_the_openai_endpoint_reports_an_invalid_address_of_an_engine() -> None:
    with start_example("fastapi_router.py", "http://127.0.0.1:9,tcp://bad,tcp://127.0.0.1:5558") as router:
        ended = router.end()
    assert ended.code == 2
    assert ended.err.splitlines()[-1].startswith("fastapi_router.py: error: invalid endpoint 'tcp://bad'")


def complete(port: int, first: int) -> tuple[int, str | None, str | None]:
    """Return status, engine and cached tokens of a completion; the status is 0 while nothing listens."""
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
    """The example needs only pytest and kvevents, as for a user who copies it."""
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
        ended = tests.end(4 * SECONDS)
    assert ended.code == 0, ended.out
    assert "5 passed" in ended.out


def test_only_a_client_with_an_allowed_key_receives_events() -> None:
    with start_example("curve.py") as curve:
        ended = curve.end()
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert lines[0] == "router: receives events"
    assert lines[1].startswith("stranger: CONNECTING")
    assert re.fullmatch(r"connections refused: [1-9]\d*", lines[2])


def test_the_settings_of_the_engine_image_are_the_defaults() -> None:
    """The file has the defaults, as its comment says; the plugin would reject a name that it does not know."""
    file = EXAMPLES / "engine-image" / "publisher.toml"
    assert read_settings({VARIABLE: str(file)}) == EngineSettings()


def test_the_index_shows_how_much_of_a_prompt_each_worker_holds() -> None:
    """One engine publishes the prompt, the other does not run; Ctrl-C ends the example without an error."""
    prompt = ",".join(["1"] * 16 + ["2"] * 16 + ["1"])
    with start_example("publish.py", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*") as publisher:
        endpoints = ",".join(publisher.out.wait("tcp://").split())
        with start_example("prefix_index.py", "--prompt", prompt, endpoints, f"tcp://127.0.0.1:{reserve_port()}") as index:
            index.out.wait(r"^engine-0: 32 of 33 tokens, by tier \{'gpu': 32.*, EXACT$")
            ended = index.interrupt()
    assert ended.code == 0
    assert all(re.search("no connection|has no replay endpoint", state) for state in logged_states(ended.err))
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
def test_the_index_reports_wrong_arguments(arguments: list[str], code: int, message: str) -> None:
    with start_example("prefix_index.py", *arguments) as index:
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
    """Examples that follow or publish until Ctrl-C end with 0; one that had more to do ends with 130."""
    with tape_of((b"", 0, encode_batch(KVEventBatch(1.0, [BlockStored([1], None, [1, 2], 2)], 0)))) as tape:
        tape.play()
        arguments = {
            "publish.py": ("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"),
            "subscribe.py": (tape.endpoint, tape.replay_endpoint),
            "async_subscribe.py": (f"{tape.endpoint},{tape.replay_endpoint}",),
        }.get(name, ())
        with start_example(name, *arguments) as program:
            program.out.wait(ready)
            ended = program.interrupt()
    assert ended.code == (130 if name == "recorded_run.py" else 0), ended
    assert "Traceback" not in ended.out + ended.err


@pytest.mark.parametrize("name", ["publish.py", "subscribe.py", "async_subscribe.py"])
@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [(("--nonsense",), 2, "unrecognized arguments: --nonsense"), (("127.0.0.1:5557",), 1, "127.0.0.1:5557")],
)
def test_an_example_reports_wrong_arguments_in_a_sentence(name: str, arguments: tuple[str, ...], code: int, error: str) -> None:
    """The last line of stderr is the error, and there is no traceback."""
    with start_example(name, *arguments) as program:
        ended = program.end()
    assert (ended.code, ended.out) == (code, "")
    assert error in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err


def compose(name: str) -> dict[str, Any]:
    """Read a file for `docker compose`, which does not run here: its commands run as processes."""
    found: dict[str, Any] = yaml.safe_load((EXAMPLES / "compose" / name).read_text())
    return found


def start(stack: ExitStack, cluster: Cluster, services: dict[str, Any], **names: str) -> list[Program]:
    """Start each service of the image `kvevents`. The port is explicit, because another test might use the default port."""
    local = names | {f"//{name}:": "//127.0.0.1:" for name in services}
    commands = [each["command"] for each in services.values() if each["image"].startswith("kvevents:")]
    commands = [[*command, "--port=8090"] if command[0] == "serve" else command for command in commands]
    return [stack.enter_context(cluster.run(command, **local)) for command in commands]


def count_exact(cluster: Cluster) -> int:
    """Return how many streams of the service are EXACT."""
    return cluster.get(8090, "/v1/sources")[1].count(b'"state":"EXACT"')


def test_the_relay_of_the_compose_file_forwards_the_events_of_the_engine(cluster: Cluster) -> None:
    with ExitStack() as stack:
        programs = start(stack, cluster, compose("relay.yaml")["services"])
        poll_for(lambda: count_exact(cluster) == 1, *programs)


@needs_nats
def test_the_plane_of_the_compose_file_carries_the_events_of_both_engines(cluster: Cluster) -> None:
    with nats_server(cluster.folder / "nats") as nats, ExitStack() as stack:
        services = compose("plane.yaml")["services"]
        assert services["nats"]["command"][0] == "--jetstream"
        programs = start(stack, cluster, services, **{"nats://nats:4222": nats.url})
        poll_for(lambda: count_exact(cluster) == 2, *programs)


def test_the_prometheus_of_the_compose_file_scrapes_the_service_and_has_the_alerts(cluster: Cluster) -> None:
    found = compose("grafana.yaml")
    with ExitStack() as stack:
        programs = start(stack, cluster, found["services"])
        poll_for(lambda: count_exact(cluster) == 2, *programs)
        settings = yaml.safe_load(found["configs"]["prometheus"]["content"])
        [[target]] = [config["targets"] for config in settings["scrape_configs"][0]["static_configs"]]
        assert target == "service:8090"
        assert b"kvevents_" in cluster.get(8090, "/metrics")[1]
    for service in found["services"].values():
        for volume in service.get("volumes", []):
            assert (EXAMPLES / "compose" / volume.partition(":")[0]).is_file(), volume
        for config in service.get("configs", []):
            assert yaml.safe_load(found["configs"][config["source"]]["content"])
