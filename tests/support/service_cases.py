"""Parts of the service's tests: a real `kvevents serve`, a small client, engines, and waits with a deadline."""

from __future__ import annotations

import os
import re
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from time import monotonic, time
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

import msgspec
import zmq

from cli_cases import ProcessResult, Program
from forked_commands import ForkedProcess
from kvevents.client.schemas import Problem
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvevents.index import block_keys
from kvevents.publisher import ZmqEventPublisher
from kvevents.stream import DegradedReason
from publisher_cases import ANY, last_endpoint, run_publisher

T = TypeVar("T")

DEADLINE = 60.0
"""Deadline of every wait in seconds. Only a failing test waits that long."""
PAUSE = 0.01
"""Seconds between two polls of a service in another process."""
BLOCK = 16
MODEL = "m"


def suspend(process: subprocess.Popen[Any] | ForkedProcess) -> None:
    """Suspend a child process and wait until all of its threads are stopped."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def wait_for(what: str, look: Callable[[], T | None], seconds: float = DEADLINE) -> T:
    """Call `look` until its result is true, and return the result. Fail after the deadline."""
    end = monotonic() + seconds
    pause = threading.Event()
    while not (found := look()):
        assert monotonic() < end, f"waited {seconds:g} s for {what}"
        pause.wait(PAUSE)
    return found


class Answer(NamedTuple):
    """An HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The decoded body."""
        return msgspec.json.decode(self.body)

    @property
    def reason(self) -> str:
        """The reason of an error, after a check that the response is as documented."""
        found = self.json
        problem = msgspec.convert(found, Problem)
        assert all(found.values()), found
        assert problem == Problem.of(self.status, problem.reason, problem.detail, problem.hint)
        assert set(found) == set(Problem.__struct_fields__), found
        assert self.headers["content-type"] == "application/problem+json"
        return problem.reason


class Client:
    """A client of one server, with one connection."""

    def __init__(self, url: str, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        self.host, self.port = parts.hostname, parts.port
        self.token = token
        self._requested_at = monotonic()
        self._connection = (
            HTTPConnection(self.host, self.port, timeout=DEADLINE)
            if tls is None
            else HTTPSConnection(self.host, self.port, timeout=DEADLINE, context=tls)
        )

    def ask(self, method: str, path: str, body: bytes | None = None, /, **headers: str) -> Answer:
        """Send one request and return the response. `_` in the names of headers is sent as `-`."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.token is not None:
            sent["authorization"] = f"Bearer {self.token}"
        if monotonic() - self._requested_at > 30:
            self._connection.close()  # the server closes connections that are idle for longer; the next request opens another
        self._requested_at = monotonic()
        self._connection.request(method, path, body, sent)
        response = self._connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, body: Any = None, **fields: Any) -> Answer:
        """Send `body`, or an object with `fields`, as JSON."""
        return self.ask("POST", path, msgspec.json.encode(fields if body is None else body), content_type="application/json")

    def confirm(self) -> None:
        """Call `confirm` for every source."""
        for source in self.get("/v1/sources").json["sources"]:
            confirm(source)

    def wait_until_ready(self) -> None:
        """Wait until the service is ready, and live batches of engines from `engine` have confirmed replayed batches."""

        def look() -> bool:
            self.confirm()
            is_ready = self.get("/readyz").status == 200
            return is_ready and not any(map(is_unconfirmed, self.get("/v1/sources").json["sources"]))

        wait_for(f"{self.host}:{self.port} to be ready", look)

    def close(self) -> None:
        self._connection.close()


class Service(Client):
    """A process of `kvevents serve`, and a client of it."""

    def __init__(self, program: Program, token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.program = program
        found = re.search(r"(https?://[^\s\"]+)", program.err.wait("listening at http"))
        assert found
        self.url = found[1]
        super().__init__(self.url, token, tls)

    @property
    def log(self) -> list[str]:
        """The lines that the service has written to stderr so far."""
        return self.program.err.all

    def wait_for_log(self, pattern: str) -> None:
        """Wait until a line of the log matches. A test may read a line later than an answer that was sent after it."""
        self.program.err.wait(pattern)

    def log_lines(self, pattern: str) -> list[str]:
        """Return the matching lines of the log so far; for lines that must be absent or rare."""
        return [line for line in self.log if re.search(pattern, line)]

    # --- the fleet

    def register(self, instance: int | str, engine: ZmqEventPublisher | str, rank: int = 0, **more: Any) -> Answer:
        """Register an engine through Dynamo's API."""
        return self.post("/register", registration(instance, engine, rank, **more))

    def sources(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Return the sources of all scopes, by instance and rank."""
        return {(each["instance"], each["rank"]): each for each in self.get("/v1/sources").json["sources"]}

    def source(self, instance: int | str, rank: int = 0) -> dict[str, Any]:
        return self.sources()[str(instance), rank]

    def trust(self, instance: int | str, rank: int = 0) -> tuple[str, str]:
        """Return the trust state of a source, and its reason."""
        found = self.source(instance, rank)["trust"]
        return found["state"], found["reason"]

    def exact(self, instance: int | str, rank: int = 0, *, blocks: int | None = None) -> dict[str, Any]:
        """Wait until a source is EXACT, with `blocks` blocks if given, and return it.

        An engine from `engine` publishes an empty batch if no live batch has confirmed the replayed ones yet.
        """

        def look() -> dict[str, Any] | None:
            found = self.sources().get((str(instance), rank))
            if found is None:
                return None
            confirm(found)
            fits = found["trust"]["state"] == "EXACT" and blocks in {None, found["blocks"]}
            return found if fits else None

        return wait_for(f"{instance} to be EXACT" + ("" if blocks is None else f" with {blocks} blocks"), look)

    def query(self, tokens: Sequence[int], **more: Any) -> Any:
        """Return the answer of Dynamo's API for a prompt, including the block of the last token."""
        answer = self.post("/query", {"model_name": MODEL, "token_ids": list(tokens), "whole_prompt": True, **more})
        assert answer.status == 200, answer
        return answer.json

    def held(self, tokens: Sequence[int], **more: Any) -> dict[str, int]:
        """Return the tokens of the longest prefix match of each instance with a match."""
        found = self.query(tokens, **more)["instances"].items()
        return {name: each["longest_matched"] for name, each in found if each["longest_matched"]}

    def wait_for_prefix(self, instance: int | str, tokens: Sequence[int], length: int | None = None, **more: Any) -> None:
        """Wait until an instance holds `length` tokens of a prompt; all of them by default."""
        wanted = len(tokens) if length is None else length
        wait_for(f"{instance} to hold {wanted} tokens", lambda: self.held(tokens, **more).get(str(instance)) == wanted)

    def keys(self, instance: int | str, rank: int = 0) -> set[tuple[str, str]]:
        """Return the key and the tier of every block of a source, read page by page."""
        found: set[tuple[str, str]] = set()
        cursor = ""
        while True:
            page = self.get(f"/v1/blocks?instance={instance}&rank={rank}&limit=500&cursor={cursor}").json
            found |= {(block["key"], block["tier"]) for block in page["blocks"]}
            if page["next"] is None:
                return found
            cursor = page["next"]

    # --- the end of the process

    def end(self, number: signal.Signals = signal.SIGTERM) -> ProcessResult:
        """Send a signal, SIGTERM by default, and wait until the process has ended."""
        self.close()
        return self.program.interrupt(number)

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self.close()
        self.program.process.kill()
        self.program.end()


@contextmanager
def serving(
    *args: object, token: str | None = None, tls: ssl.SSLContext | None = None, command: Sequence[str] | None = None, **env: str
) -> Iterator[Service]:
    """Yield a service and kill it afterwards. Check that it has written no traceback and no warning of Python."""
    words = ("serve", "--port", "0") if command is None else ()
    with Program(*words, *args, command=command, **{"PYTHONWARNINGS": "error", **env}) as program:
        service = Service(program, token, tls)
        try:
            yield service
        finally:
            service.close()
    assert not service.log_lines("Traceback|Warning:|has failed"), "\n".join(service.log)


def registration(instance: int | str, engine: ZmqEventPublisher | str, rank: int = 0, **more: Any) -> dict[str, Any]:
    """Return the body of a request to `/register` of Dynamo's API."""
    endpoint, replay = (engine, None) if isinstance(engine, str) else (engine.endpoint, engine.replay_endpoint)
    body = {"instance_id": instance, "endpoint": endpoint, "replay_endpoint": replay, "model_name": MODEL, "block_size": BLOCK}
    return {**body, "dp_rank": rank, **more}


class Engine:
    """A publisher of one rank that chooses the hashes of its blocks."""

    def __init__(self, publisher: ZmqEventPublisher, seed: int = 1) -> None:
        self.publisher = publisher
        self.endpoint = publisher.endpoint
        self.replay_endpoint = publisher.replay_endpoint
        self._seed = seed
        self._next = seed << 32

    def store(
        self, tokens: Sequence[int], *, parent: Sequence[int] = (), block_size: int = BLOCK, medium: str = "GPU", **more: Any
    ) -> list[int]:
        """Announce the blocks of a prompt, behind those with the hashes `parent`, and return all hashes."""
        before = list(parent)
        hashes = [self._next + number for number in range(len(tokens) // block_size)]
        self._next += len(hashes)
        event = BlockStored(hashes, before[-1] if before else None, list(tokens), block_size, medium=medium, **more)
        self.publish(event)
        return before + hashes

    def publish(self, *events: Any, at: float | None = None) -> None:
        self.publisher.publish(EventBatch(time() if at is None else at, list(events)))

    @property
    def last_seq(self) -> int:
        """The sequence number of the newest batch; -1 before the first batch."""
        return self.publisher.stats().published - 1

    def remove(self, hashes: Sequence[int], medium: str = "GPU") -> None:
        self.publish(BlockRemoved(list(hashes), medium=medium))

    def clear(self) -> None:
        self.publish(AllBlocksCleared())


@contextmanager
def engine(*, seed: int = 1, **options: Any) -> Iterator[Engine]:
    """Yield one rank of an engine on real sockets, by default with replay."""
    options.setdefault("replay_endpoint", ANY)
    with run_publisher(**options) as publisher:
        made = _ENGINES[publisher.endpoint] = Engine(publisher, seed)
        yield made
        if _ENGINES.get(publisher.endpoint) is made:  # a newer engine may have the same endpoint
            del _ENGINES[publisher.endpoint]


_ENGINES: dict[str, Engine] = {}
"""The running engines by endpoint."""


def is_refused(service: Service, instance: str, rank: int = 0) -> bool:
    """Return whether the service has found that nothing listens where an engine should; its trust is the same from then on."""
    found = service.source(instance, rank)
    return found["fault"] is not None and "refused" in found["trust"]["reason_codes"]


def is_unconfirmed(source: Mapping[str, Any]) -> bool:
    """Return whether no live batch has confirmed the replayed ones yet. Replicas report this as text, without a code."""
    return DegradedReason.REPLAY_UNPROVEN.value in source["trust"]["reason"]


def confirm(source: Mapping[str, Any]) -> None:
    """Have an engine from `engine` publish an empty batch if no live batch has confirmed the replayed ones yet.

    `source` is an item of `/v1/sources`. The engine publishes nothing while an earlier batch has not arrived, so that repeated
    calls publish one batch in most cases.
    """
    made = _ENGINES.get(source["endpoint"])
    if made is not None and is_unconfirmed(source) and source["last_seq"] >= made.last_seq:
        made.publish()


@contextmanager
def engines(count: int, **options: Any) -> Iterator[list[Engine]]:
    """Yield several engines with different seeds."""
    with ExitStack() as stack:
        yield [stack.enter_context(engine(seed=number + 1, **options)) for number in range(count)]


def prompt(first: int, blocks: int = 4, block_size: int = BLOCK) -> list[int]:
    """Return token ids that differ from those for any other `first`."""
    return [first * 100_000 + place for place in range(blocks * block_size)]


def hex_keys(tokens: Sequence[int], block_size: int = BLOCK) -> list[str]:
    """Return the keys of a prompt's blocks in the form of `/v1`."""
    return [f"{key:016x}" for key in block_keys(list(tokens), block_size)]


def write(path: Path, text: str) -> Path:
    """Write a file. A process that reads it meanwhile reads the former text or all of the new one."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(text, encoding="utf-8")
    return fresh.replace(path)


def escape(path: str) -> str:
    """Return a path with an escaped character: the data plane forwards its queries to the control plane."""
    return f"/%{ord(path[1]):02x}{path[2:]}"


class EventStream:
    """A client of `/v1/events`. When it is created, the service has accepted it and sends events to it."""

    def __init__(self, service: Client, query: str = "", *, last_id: str | None = None) -> None:
        self._connection = HTTPConnection(service.host, service.port, timeout=DEADLINE)
        headers = {} if service.token is None else {"authorization": f"Bearer {service.token}"}
        if last_id is not None:
            headers["last-event-id"] = last_id
        self.last_id = ""
        """Id of the newest event."""
        self._connection.request("GET", f"/v1/events{query}", headers=headers)
        self.response = self._connection.getresponse()
        self.status = self.response.status
        if self.status == 200:
            assert self.response.headers["content-type"] == "text/event-stream"
            first = self._read_block()
            assert first is not None
            assert first[0] == "retry: 2000"

    def _read_block(self) -> list[str] | None:
        """Return the lines up to an empty one; None at the end of the stream."""
        lines: list[str] = []
        while line := self.response.readline():
            if line == b"\n":
                self.last_id = lines[-1].removeprefix("id: ")
                return lines
            lines.append(line.decode().rstrip("\n"))
        return None

    def next(self, kind: str, fits: Callable[[Any], object] = lambda _: True) -> Any:
        """Return the next event of a kind for which `fits` returns true. Other events are skipped."""
        end = monotonic() + DEADLINE
        while True:
            assert monotonic() < end, f"no {kind}"
            block = self._read_block()
            assert block is not None, f"the stream ended without {kind}"
            if block[0] == f"event: {kind}":
                event = msgspec.json.decode(block[1].removeprefix("data: "))
                if fits(event):
                    return event

    def ended(self) -> bool:
        """Read until the end of the stream, which must come within the deadline."""
        while self._read_block() is not None:
            pass
        return True

    def close(self) -> None:
        self.response.close()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawPublisher:
    """An engine that sends given bytes and has no replay endpoint."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self._socket = context.socket(zmq.XPUB)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.rcvtimeo = int(DEADLINE * 1000)
        self._socket.bind(ANY)
        self.endpoint = last_endpoint(self._socket)
        self._seq = 0

    def wait(self) -> None:
        """Wait for a subscriber."""
        assert self._socket.recv()[:1] == b"\x01"

    def send(self, payload: bytes, *, skip: int = 0) -> None:
        """Send one batch, and skip `skip` sequence numbers before it."""
        self._seq += skip
        self._socket.send_multipart([b"", self._seq.to_bytes(8, "big"), payload])
        self._seq += 1

    def send_frames(self, *frames: bytes) -> None:
        """Send a message, which need not be a batch."""
        self._socket.send_multipart(frames)

    def close(self) -> None:
        self._socket.close()


@contextmanager
def run_raw_publisher() -> Iterator[RawPublisher]:
    """Yield an engine that sends given bytes on a real socket."""
    with zmq.Context() as context:
        made = RawPublisher(context)
        try:
            yield made
        finally:
            made.close()


def exchange(client: Client, sent: bytes, *, half: bool = False) -> bytes:
    """Send bytes to a server, and return what it sends until it closes. With `half` our side is closed after sending."""
    with socket.create_connection((client.host, client.port), DEADLINE) as connection:
        connection.sendall(sent)
        if half:
            connection.shutdown(socket.SHUT_WR)
        received = bytearray()
        while piece := connection.recv(65_536):
            received += piece
        return bytes(received)
