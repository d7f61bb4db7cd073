"""Targets that choose a worker for a prompt: routers with an OpenAI endpoint.

The referee plays the workers: small OpenAI servers beside the engines' event sockets. The referee adds one more worker, the
control, whose engine has no faults. The control first holds one block of a prompt less than the best worker of the scenario. A
router that lacks blocks of the best worker then chooses the control. Afterwards, the control holds one block more than the best
worker. A router that still counts removed blocks then chooses a worker that no longer holds them.
"""

from __future__ import annotations

import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Protocol

import msgspec

from kvevents.conform.scenario import Ability, CheckQuery, Scenario
from kvevents.conform.target import Driver, EngineRegistration, Program, Target, check_program, install_package, request
from kvevents.conform.verdict import WrongAnswer
from kvevents.errors import ConfigError
from kvevents.events import BlockRemoved, BlockStored, KVEvent, KVEventBatch
from kvevents.publisher import ZmqEventPublisher
from kvevents.testing.ports import reserve_port
from kvevents.testing.tape import ANY_LOCAL_PORT

MODEL: Final = "m"
CONTROL_NAME: Final = "control"
REQUESTS_PER_STATE: Final = 3
"""Number of requests for each prompt and state of the control. All of these requests must reach a right worker, because a
single request can reach a right worker by chance."""
CONTROL_SECONDS: Final = 0.2
"""Time for the router to read the events of the control."""
VLLM_ROUTER_PACKAGE: Final = ("vllm-router", "0.1.17")


class RouterWorker(NamedTuple):
    """The description of a worker that a router receives."""

    url: str
    endpoint: str
    replay_endpoint: str | None


class FakeWorker:
    """An OpenAI server without a model. A prompt's token ids are the numbers in its text. Every answer is the worker's name."""

    def __init__(self, name: str) -> None:
        worker = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if worker.is_closed:  # the client uses a connection that it has kept open
                    self.close_connection = True
                    return
                answer = worker.answer(self.command, self.path, text)
                body = msgspec.json.encode({"error": "not found"} if answer is None else answer)
                self.send_response(404 if answer is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = _answer  # noqa: N815  names of the library

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  as the library has it
                """Log nothing."""

        self._name = name
        self.is_closed = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url: Final = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, method: str, path: str, text: bytes) -> Any:
        """Return the answer to a request, or None if the path is unknown or the body is invalid."""
        try:
            body = msgspec.json.decode(text, type=dict[str, Any]) if text else {}
        except msgspec.MsgspecError:
            return None
        tokens = tokens_of(body.get("prompt", ""))
        choice = {"index": 0, "text": self._name, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        completion = {"id": "x", "object": "text_completion", "created": 0, "model": MODEL, "choices": [choice], "usage": usage}
        return {
            "GET /health": {"status": "ok"},
            "GET /v1/models": {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 1 << 20}]},
            "GET /server_info": {"model_path": MODEL},
            "POST /tokenize": {"count": len(tokens), "max_model_len": 1 << 20, "tokens": tokens},
            "POST /v1/completions/render": [{"request_id": "r", "token_ids": tokens, "sampling_params": {}, "model": MODEL}],
            "POST /v1/completions": completion,
        }.get(f"{method} {path.partition('?')[0]}")

    def close(self) -> None:
        """Stop the server. A repeated call does nothing."""
        self.is_closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def tokens_of(prompt: str | list[int]) -> list[int]:
    """Return the token ids of a prompt that the referee sent."""
    return prompt if isinstance(prompt, list) else [int(word) for word in prompt.split() if word.isdecimal()]


class Control:
    """The engine of the control, which holds as many blocks of a prompt as the referee sets, and announces changes."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._held: dict[tuple[int, str | None], int] = {}
        self._publisher = ZmqEventPublisher(
            endpoint=ANY_LOCAL_PORT, replay_endpoint=ANY_LOCAL_PORT, bind=True, dialect="vllm-latest"
        )
        self.endpoint: Final = self._publisher.endpoint
        self.replay_endpoint: Final = self._publisher.replay_endpoint

    def hold(self, tokens: Sequence[int], salt: str | None, blocks: int) -> bool:
        """Hold the first `blocks` blocks of a prompt. Return whether the call has changed the number of held blocks."""
        key = (tokens[0], salt)
        before = self._held.get(key, 0)
        self._held[key] = blocks
        hashes = [hash((key, place)) % (1 << 63) for place in range(max(before, blocks))]
        events: list[KVEvent] = [
            BlockStored(
                [hashes[place]],
                hashes[place - 1] if place else None,
                list(tokens[place * self._size : (place + 1) * self._size]),
                self._size,
                medium="GPU",
                extra_keys=[(salt,)] if salt is not None and not place else None,
            )
            for place in range(before, blocks)
        ]
        if before > blocks:
            events.append(BlockRemoved(hashes[blocks:before][::-1], medium="GPU"))
        if events:
            self._publisher.publish(KVEventBatch(time.time(), events, 0))
        return bool(events)

    def close(self) -> None:
        """End the publisher."""
        self._publisher.shutdown(1.0)


class _Choice(msgspec.Struct):
    text: str


class _Completion(msgspec.Struct):
    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


class PlayedWorker(Protocol):
    """A worker whose server the referee plays."""

    @property
    def url(self) -> str:
        """The URL of the worker's server."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the worker's server. A repeated call does nothing."""


class Ports(NamedTuple):
    """The ports of a router: for requests, and for scrapes of its metrics."""

    requests: int
    metrics: int


class RouterTarget(Target):
    """A router in a process that the referee starts."""

    def __init__(
        self, program: Program, ports: Ports, workers: Mapping[str, PlayedWorker], control: Control, block_size: int
    ) -> None:
        self._program = program
        self._ports = ports
        self._workers = workers
        self._control = control
        self._block_size = block_size
        self._registered: set[str] = set()

    def register(self, registration: EngineRegistration) -> None:
        if not self._registered:
            self._start()
        self._registered.add(registration.worker)

    def _start(self) -> None:
        # The router is ready when it answers prompts: some routers answer /health before they know their workers.
        body = {"model": MODEL, "prompt": "1 2 3", "max_tokens": 1}
        self._program.start(lambda: request(f"{self._program.url}/v1/completions", "POST", body, seconds=5.0).status == 200)

    def find_wrong_answers(self, queries: Sequence[CheckQuery]) -> list[WrongAnswer]:
        return [wrong for query in queries if (wrong := self._compare(query)) is not None]

    def _compare(self, query: CheckQuery) -> WrongAnswer | None:
        held = {name: tokens for name, tokens in query.held.items() if ":" not in name}
        best, size = max(held.values(), default=0), self._block_size
        blocks = [*([best // size - 1] if best >= size else []), *([best // size + 1] if best + size <= len(query.ids) else [])]
        return next((wrong for block in blocks if (wrong := self._choose(query, held, block)) is not None), None)

    def _choose(self, query: CheckQuery, held: Mapping[str, int], blocks: int) -> WrongAnswer | None:
        """Send requests while the control holds `blocks` blocks. Return the wrong choice, or None if all choices are right."""
        tokens, control, best = query.ids, blocks * self._block_size, max(held.values(), default=0)
        if self._control.hold(tokens, query.salt, blocks):
            time.sleep(CONTROL_SECONDS)
        right = {name for name, tokens in held.items() if tokens == best} if best > control else {CONTROL_NAME}
        # One token is appended, because engines always compute the last token of a prompt and never count it as cached.
        body: dict[str, Any] = {"model": MODEL, "prompt": " ".join(map(str, [*tokens, 0])), "max_tokens": 1}
        if query.salt is not None:
            body["cache_salt"] = query.salt
        chosen: Counter[str] = Counter()
        for _ in range(REQUESTS_PER_STATE):
            answer = request(f"{self._program.url}/v1/completions", "POST", body)
            if answer.status != 200:
                return WrongAnswer(min(right), f"a request was answered with {answer.text}", "an error")
            chosen[answer.decode(_Completion).choices[0].text] += 1
        if chosen.keys() <= right:
            return None
        wrong = max(chosen.keys() - right, key=lambda name: chosen[name])
        count = "all requests" if chosen[wrong] == REQUESTS_PER_STATE else f"{chosen[wrong]} of {REQUESTS_PER_STATE} requests"
        truth = ", ".join(f"{name} {tokens}" for name, tokens in sorted({**held, CONTROL_NAME: control}.items()))
        # The control has no faults. So a router that wrongly chooses the control lacks blocks of the best worker.
        concerned = min(right) if wrong == CONTROL_NAME else wrong
        return WrongAnswer(concerned, f"{count} sent to {wrong}; tokens held: {truth}")

    def read_reports(self) -> dict[str, str | None]:
        return dict.fromkeys(self._registered)

    def engine_stopped(self, worker: str) -> None:
        self._workers[worker].close()

    def kill(self) -> None:
        self._program.kill()

    def start(self, registrations: Sequence[EngineRegistration]) -> None:
        del registrations
        self._start()


RouterCommand = Callable[[Ports, int, Sequence[RouterWorker]], Sequence[str]]
"""Returns the command of a router for its ports, a block size, and its workers."""


class RouterDriver(Driver):
    """Starts a router for each scenario. The command that starts the router names all workers."""

    abilities = frozenset[Ability]({"kill", "salt"})
    kind: type[RouterTarget] = RouterTarget

    def __init__(self, title: str, command: RouterCommand) -> None:
        self.title = title
        self._command = command

    @contextmanager
    def target(self, scenario: Scenario, registrations: Sequence[EngineRegistration]) -> Iterator[Target]:
        """Yield a router whose process starts at the first call of `register`."""
        with ExitStack() as stack:
            control = Control(scenario.block_size)
            stack.callback(control.close)
            of_control = EngineRegistration(CONTROL_NAME, 0, control.endpoint, control.replay_endpoint, scenario.block_size)
            followed = [of_control, *registrations]
            workers = self._play_workers(scenario, followed, stack)
            members = [
                RouterWorker(workers[registration.worker].url, registration.endpoint, registration.replay_endpoint)
                for registration in followed
            ]

            # The port stays reserved until the end, because routers of several scenarios run at the same time.
            metrics = reserve_port(ANY_LOCAL_PORT)
            stack.callback(metrics.close)
            metrics_port = int(metrics.endpoint.rpartition(":")[2])

            def command(port: int, _: Path) -> Sequence[str]:
                return self._command(Ports(port, metrics_port), scenario.block_size, members)

            program = stack.enter_context(Program(self.title, command))
            yield self.kind(program, Ports(program.port, metrics_port), workers, control, scenario.block_size)

    def _play_workers(
        self, scenario: Scenario, registrations: Sequence[EngineRegistration], stack: ExitStack
    ) -> Mapping[str, PlayedWorker]:
        del scenario
        workers = {name: FakeWorker(name) for name in dict.fromkeys(registration.worker for registration in registrations)}
        for worker in workers.values():
            stack.callback(worker.close)
        return workers


def vllm_router(folder: Path) -> Driver:
    """Return the driver of vllm-router with the policy `kv_aware`, installed in a virtual environment in `folder`."""
    program = str(Path(install_package(*VLLM_ROUTER_PACKAGE, folder)).with_name("vllm-router"))

    def command(ports: Ports, block_size: int, members: Sequence[RouterWorker]) -> list[str]:
        words = [program, "--host", "127.0.0.1", "--port", str(ports.requests), "--prometheus-port", str(ports.metrics)]
        words += ["--policy", "kv_aware", "--kv-event-block-size", str(block_size), "--kv-event-model", MODEL]
        for member in members:
            words += ["--kv-event-source", f"{member.url}={member.endpoint}"]
            if member.replay_endpoint is not None:
                words += ["--kv-event-replay-source", f"{member.url}={member.replay_endpoint}"]
        return [*words, "--worker-urls", *(member.url for member in members)]

    return RouterDriver(" ".join(VLLM_ROUTER_PACKAGE), command)


def command_router(template: str) -> Driver:
    """Return the driver of the router that a command starts.

    The fields of the command are `{port}`, `{block_size}`, `{urls}`, `{endpoints}`, `{replays}` and `{metrics_port}`. The
    fields `{urls}`, `{endpoints}` and `{replays}` become comma-separated lists with an entry for each worker. An entry of
    `{replays}` can be empty. Raise `ConfigError` if the command cannot be split into words or has other fields,
    or if its program is not found.
    """

    def command(ports: Ports, block_size: int, members: Sequence[RouterWorker]) -> list[str]:
        fields = {
            "port": ports.requests,
            "metrics_port": ports.metrics,
            "block_size": block_size,
            "urls": ",".join(member.url for member in members),
            "endpoints": ",".join(member.endpoint for member in members),
            "replays": ",".join(member.replay_endpoint or "" for member in members),
        }
        return [word.format(**fields) for word in words]

    try:
        words = shlex.split(template)
        title = words[0]
        command(Ports(1, 2), 16, [])
    except (ValueError, LookupError) as error:
        raise ConfigError(f"invalid router command {template!r}: {error}; expected fields like {{port}}, {{urls}}") from error
    check_program(title)
    return RouterDriver(title, command)
