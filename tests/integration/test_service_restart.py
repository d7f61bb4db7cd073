"""State across restarts: a service that is killed at any moment restarts with correct state, and reports what it lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from random import Random
from typing import Self

import pytest

from cli_cases import refuse_connections, run
from service_cases import (
    BLOCK,
    DEADLINE,
    Client,
    Engine,
    EventStream,
    Service,
    confirm,
    engine,
    engines,
    hex_keys,
    prompt,
    registration,
    serving,
    wait_for,
    write,
)
from tools.ports import reserve_port

FLAGS = ("--snapshot-seconds", "0.2")
REFUSED = "the index refused or dropped some of its blocks at memory_limit"


class PublishingEngine:
    """An engine that stores prompts and removes some of them, and records the blocks that it must hold."""

    def __init__(self, made: Engine, seed: int) -> None:
        self.engine = made
        self._random = Random(seed)
        self._first = seed * 100_000
        self._prompts: dict[int, list[int]] = {}
        self.expected: set[tuple[str, str]] = set()

    def step(self) -> None:
        if len(self._prompts) > 30 or (self._prompts and self._random.random() < 0.3):
            number = self._random.choice(list(self._prompts))
            self.engine.remove(self._prompts.pop(number))
            self.expected -= self._keys(number)
            return
        self._first += 1
        self._prompts[self._first] = self.engine.store(self._tokens(self._first))
        self.expected |= self._keys(self._first)

    def _tokens(self, number: int) -> list[int]:
        return [number * 64 % 2**31 + place for place in range(3 * BLOCK)]

    def _keys(self, number: int) -> set[tuple[str, str]]:
        return {(key, "gpu") for key in hex_keys(self._tokens(number))}


@contextmanager
def publish_meanwhile(streams: Sequence[PublishingEngine]) -> Iterator[None]:
    """Publish some hundred batches a second in a thread."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.004):
            for stream in streams:
                stream.step()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def wait_for_snapshot(service: Service) -> None:
    """Wait until there is a snapshot of what the service knows now."""
    now = time.time()
    wait_for("a snapshot", lambda: (service.get("/v1/stats").json["snapshot_at"] or 0.0) > now)


def check_blocks(service: Service, streams: dict[str, PublishingEngine]) -> None:
    for name, stream in streams.items():
        wait_for(f"keys of {name}: {len(stream.expected)} blocks", lambda n=name, s=stream: service.keys(n) == s.expected)  # type: ignore[misc]
        service.exact(name)


def test_a_service_that_is_killed_at_any_moment_restarts_with_the_right_blocks(tmp_path: Path) -> None:
    """The moments are random with a fixed seed, and the publishers never pause."""
    moments = Random(4)
    state = tmp_path / "state"
    with engines(3) as made:
        streams = {f"e{number}": PublishingEngine(each, number + 1) for number, each in enumerate(made)}
        with serving("--state-dir", state, *FLAGS) as service:
            for name, stream in streams.items():
                assert service.register(name, stream.engine.publisher).status == 201
            with publish_meanwhile(list(streams.values())):
                for name in streams:
                    service.exact(name)
                wait_for_snapshot(service)
                service.kill()
        for _ in range(4):
            with serving("--state-dir", state, *FLAGS) as service, publish_meanwhile(list(streams.values())):
                # From here on the service knows its sources only from its state folder.
                for name in streams:
                    service.exact(name)
                threading.Event().wait(moments.random() * 0.4)
                service.kill()
        with serving("--state-dir", state, *FLAGS) as service:
            service.wait_for_log("restored [1-9][0-9]* blocks of 3 streams")
            check_blocks(service, streams)
            assert [service.source(name)["lost"] for name in streams] == [0, 0, 0]
            assert [service.source(name)["resets"] for name in streams] == [0, 0, 0]
            assert service.get("/health").json == {"status": "ok", "warnings": []}
            assert service.end().code == 0
            assert not list(state.glob(".*.tmp"))


def test_an_engine_that_restarted_meanwhile_begins_with_a_reset(tmp_path: Path) -> None:
    with engine(seed=1) as made:
        place = {"endpoint": made.endpoint, "replay_endpoint": made.replay_endpoint, "bind": True}
        with serving("--state-dir", tmp_path) as service:
            assert service.register("e", made.publisher).status == 201
            made.store(prompt(1))
            service.exact("e", blocks=4)
            assert service.end().code == 0
    with engine(seed=2, **place) as again:
        again.store(prompt(2, 2))
        with serving("--state-dir", tmp_path) as service:
            service.exact("e", blocks=2)
            assert service.keys("e") == {(key, "gpu") for key in hex_keys(prompt(2, 2))}
            assert service.source("e")["resets"] == 1
            service.wait_for_log("e rank 0: its blocks are removed: publisher restarted")
            assert service.held(prompt(1)) == {}


def test_a_stream_with_refused_blocks_is_not_exact_after_a_restart_until_a_clear(tmp_path: Path) -> None:
    """A higher limit does not bring back the blocks that the index refused before the restart."""
    with engine(seed=5) as made:
        with serving("--state-dir", tmp_path, "--memory-limit", "1MiB") as service:
            assert service.register("e", made.publisher).status == 201
            made.store(prompt(1))
            service.exact("e", blocks=4)
            for first in range(100, 160):
                made.store(prompt(first, 1_000))
            wait_for("a refusal", lambda: REFUSED in service.trust("e")[1])
            service.end()
        with serving("--state-dir", tmp_path) as service:

            def is_refused() -> bool:
                confirm(service.source("e"))
                state, reason = service.trust("e")
                return state == "DEGRADED" and REFUSED in reason

            wait_for("the reason", is_refused)
            made.clear()
            made.store(prompt(6))
            service.exact("e", blocks=4)


def test_a_restored_stream_is_not_exact_before_its_engine_answers(tmp_path: Path) -> None:
    with engine(seed=3) as made, serving("--state-dir", tmp_path) as service:
        assert service.register("e", made.publisher).status == 201
        made.store(prompt(3))
        service.exact("e", blocks=4)
        service.end()
    with serving("--state-dir", tmp_path) as service:  # the engine is gone
        wait_for("the reason", lambda: "nothing listens" in service.trust("e")[1])
        assert service.trust("e")[0] in {"CONNECTING", "STALE"}
        # Queries return the restored blocks with their trust.
        assert service.query(prompt(3))["instances"]["e"]["trust"]["0"] in {"CONNECTING", "STALE"}
        assert service.get("/readyz").status == 503


@pytest.mark.parametrize("broken", ["current", "index", "streams", "gone", "registered"])
def test_unreadable_files_are_set_aside_and_reported(tmp_path: Path, broken: str) -> None:
    with engine(seed=4) as made:
        with serving("--state-dir", tmp_path) as service:
            assert service.register("e", made.publisher).status == 201
            made.store(prompt(4))
            service.exact("e", blocks=4)
            service.end()
        (path,) = tmp_path.glob("current" if broken == "current" else f"{'index' if broken == 'gone' else broken}*")
        content = path.read_bytes()
        if broken == "gone":
            path.unlink()
        else:
            path.write_bytes(content[: len(content) // 2] + b"\xff\0nonsense")
        with serving("--state-dir", tmp_path, *FLAGS) as service:
            (warning,) = service.get("/health").json["warnings"]
            assert str(tmp_path) in warning
            service.wait_for_log(f"ERROR +{warning[:40]}")
            if broken == "registered":
                assert (tmp_path / "registered.bad").read_bytes() == path.with_suffix(".bad").read_bytes()
                assert service.sources() == {}
                assert service.register("e", made.publisher).status == 201
            service.exact("e", blocks=4)
            assert service.held(prompt(4)) == {"e": 64}
            # The warning stays after the next good snapshot, because an operator looks later.
            wait_for("a snapshot", lambda: service.get("/v1/stats").json["snapshot_at"])
            assert service.get("/health").json["warnings"] == [warning]
            service.end()
        with serving("--state-dir", tmp_path) as service:
            assert service.get("/health").json["warnings"] == []
            service.exact("e", blocks=4)


def test_temporary_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    write(tmp_path / ".kvevents-0123.tmp", "half")
    write(tmp_path / ".current.tmp", "half")
    with serving("--state-dir", tmp_path):
        assert not list(tmp_path.glob(".*.tmp"))


def test_a_killed_process_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    """Responses of the control plane are not passed through files."""
    with serving(TMPDIR=str(tmp_path)) as service:
        assert service.get("/openapi.json").status == 200
        service.program.process.kill()
        service.program.end()
    assert list(tmp_path.iterdir()) == []


def test_a_state_folder_in_use_is_refused(tmp_path: Path) -> None:
    with serving("--state-dir", tmp_path):
        ended = run("serve", "--port", 0, "--state-dir", tmp_path)
        assert ended.code == 2
        (line,) = ended.err.splitlines()
        assert f"state_dir {tmp_path} is in use by another process" in line


# --- a full disk

_LIMITED = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
signal.signal(signal.SIGUSR1, lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2))
sys.argv = ["kvevents", "serve", "--port", "0"] + sys.argv[1:]
runpy.run_module("kvevents", run_name="__main__")
"""
"""A process that can write at most 64 bytes to a file until it receives SIGUSR1."""


@contextmanager
def fill_disk(folder: Path) -> Iterator[tuple[Path, tuple[str, ...] | None, Callable[[Service], None]]]:
    """Return a folder on a full disk, the command of a service that uses it, and a function that makes room."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False, capture_output=True)  # noqa: S607
    if mounted.returncode:
        yield folder, (sys.executable, "-c", _LIMITED), lambda service: service.program.process.send_signal(signal.SIGUSR1)
        return
    try:
        filler = folder / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
        yield folder, None, lambda _: filler.unlink()
    finally:
        subprocess.run(["umount", "-l", folder], check=True)  # noqa: S607


def has_snapshot_failed_metric(service: Service, value: int) -> bool:
    return f"kvevents_snapshot_failed {value}.0\n".encode() in service.get("/metrics").body


def test_a_full_disk_is_reported_until_there_is_room(tmp_path: Path) -> None:
    with engine(seed=5) as made, fill_disk(tmp_path / "small") as (folder, command, make_room):
        with serving("--state-dir", folder, *FLAGS, command=command) as service:
            assert service.register("e", made.publisher).status == 201
            made.store(prompt(5, 100))
            service.exact("e", blocks=100)

            wait_for("the fault", lambda: has_snapshot_failed_metric(service, 1))
            # Which file had no room differs from attempt to attempt.
            (fault,) = wait_for("the warning", lambda: service.get("/health").json["warnings"])
            assert fault.startswith("cannot write ")
            assert str(folder) in fault
            assert service.get("/health").json["status"] == "ok"
            assert str(folder) in service.get("/v1/stats").json["snapshot_fault"]
            assert service.held(prompt(5, 100)) == {"e": 1600}
            assert service.end().code == 0
        with serving("--state-dir", folder, *FLAGS, command=command) as service:
            assert service.register("e", made.publisher).status == 201
            service.exact("e", blocks=100)
            wait_for("the fault", lambda: has_snapshot_failed_metric(service, 1))
            make_room(service)
            wait_for("a snapshot", lambda: has_snapshot_failed_metric(service, 0))
            wait_for("no warning", lambda: service.get("/health").json["warnings"] == [])
            # Registrations from the time without room are stored, too.
            wait_for("registrations", (folder / "registered.json").exists)
            assert len(service.log_lines("ERROR")) <= 3
            service.kill()
        with serving("--state-dir", folder) as service:
            service.exact("e", blocks=100)


def test_registrations_that_the_disk_refused_are_written_at_the_end(tmp_path: Path) -> None:
    """The next snapshot would retry. A service that ends before it writes them when it ends."""
    state = tmp_path / "state"
    config = write(tmp_path / "c.toml", "snapshot_seconds = 3600\n")
    with serving("--config", config, "--state-dir", state) as service:
        (state / "registered.json").mkdir()
        answer = service.register("e", "tcp://127.0.0.1:1")
        assert answer.status == 201
        assert "cannot write" in str(service.get("/health").json["warnings"])
        (state / "registered.json").rmdir()
        assert service.end().code == 0
    with serving("--state-dir", state) as service:
        assert [name for name, _ in service.sources()] == ["e"]


def test_a_fault_lasts_while_a_part_of_the_state_cannot_be_written(tmp_path: Path) -> None:
    """A snapshot that succeeds beside registrations that fail neither ends the warning nor logs it again each time."""
    state = tmp_path / "state"
    with serving("--state-dir", state, *FLAGS) as service:
        (state / "registered.json").mkdir()
        assert service.register("e", "tcp://127.0.0.1:1").status == 201
        for _ in range(3):
            wait_for_snapshot(service)
            assert has_snapshot_failed_metric(service, 1)
        assert len(service.log_lines("ERROR")) == 1
        (state / "registered.json").rmdir()
        wait_for("the end of the fault", lambda: has_snapshot_failed_metric(service, 0))


# --- shutdown


def test_sigterm_finishes_open_requests_and_stores_a_snapshot(tmp_path: Path) -> None:
    """The service ends when the last request has its response. It does not wait for `drain_seconds`."""
    config = write(tmp_path / "c.toml", "limits = { drain_seconds = 3600 }\n")
    with engine(seed=6) as made, serving("--config", config, "--state-dir", tmp_path) as service:
        assert service.register("e", made.publisher).status == 201
        made.store(prompt(6))
        service.exact("e", blocks=4)
        body = b'{"model_name":"m","token_ids":[1]}'
        head = b"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        with EventStream(service) as stream, socket.create_connection((service.host, service.port), DEADLINE) as slow:
            slow.sendall(head + body[:10])
            assert service.get("/health").status == 200  # earlier bytes have arrived
            service.program.process.send_signal(signal.SIGTERM)
            assert stream.ended()
            slow.sendall(body[10:])
            assert slow.recv(65_536).startswith(b"HTTP/1.1 200 ")
        assert service.program.end().code == 0
        assert not service.log_lines("ERROR|WARNING")
        with pytest.raises(ConnectionError):
            socket.create_connection((service.host, service.port), 1)
    assert (tmp_path / "current").exists()


class RestlessClient:
    """Registers and unregisters engines of its own until the service ends, and notes which are registered."""

    def __init__(self, service: Service, name: str, endpoint: str) -> None:
        self.registered: dict[str, bool] = {}
        """Registered engines by name, without the effect of the newest request, which might not have been answered."""
        self._name = name
        self._endpoint = endpoint
        self._client = Client(service.url)
        self._random = Random(name)
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        with suppress(OSError, HTTPException):  # the service has ended
            while True:
                self._step()

    def _step(self) -> None:
        name = f"{self._name}-{self._random.randrange(20)}"
        is_registered = self.registered.pop(name, False)
        if is_registered:
            answer = self._client.post("/unregister", instance_id=name)
        else:
            lease = {"lease_seconds": 600} if self._random.random() < 0.5 else {}
            answer = self._client.post("/register", registration(name, self._endpoint, **lease))
        if answer.status < 300:
            self.registered[name] = not is_registered

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._client.close()


def test_sigterm_at_any_moment_leaves_a_snapshot_and_all_registrations(tmp_path: Path) -> None:
    """Clients register and an engine publishes meanwhile. The exit code is 0, and the log has neither error nor traceback.

    Many more rounds: KVEVENTS_SIGTERM_ROUNDS=200.
    """
    moments = Random(8)
    with refuse_connections() as nowhere, engine() as made:
        for number in range(int(os.environ.get("KVEVENTS_SIGTERM_ROUNDS", "5"))):
            state = tmp_path / str(number)
            stream = PublishingEngine(made, 1)
            with serving("--state-dir", state) as service:
                assert service.register("e", made.publisher).status == 201
                with ExitStack() as stack:
                    stack.enter_context(publish_meanwhile([stream]))
                    clients = [stack.enter_context(RestlessClient(service, f"c{each}", nowhere)) for each in range(3)]
                    threading.Event().wait(moments.random() * 0.5)
                    assert service.end().code == 0
                assert not service.log_lines("ERROR"), number
            assert (state / "current").exists(), number
            saved = {each["registration"]["instance"] for each in json.loads((state / "registered.json").read_bytes())}
            for client in clients:
                for name, is_registered in client.registered.items():
                    assert (name in saved) == is_registered, (number, name)


def test_idle_clients_delay_the_shutdown_no_longer_than_configured(tmp_path: Path) -> None:
    """The service waits `drain_seconds` for an unfinished request, and then ends without an error."""
    config = write(tmp_path / "c.toml", "limits = { drain_seconds = 0.5 }\n")
    with serving("--config", config) as service, socket.create_connection((service.host, service.port)) as idle:
        idle.sendall(b"POST /v1/match_many HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert service.get("/health").status == 200
        began = time.monotonic()
        assert service.end().code == 0
        assert time.monotonic() - began > 0.4
        assert not service.log_lines("Traceback")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_service_ends_at_once(tmp_path: Path, number: signal.Signals) -> None:
    """The service waits neither for `drain_seconds` nor for `snapshot_seconds`."""
    config = write(tmp_path / "c.toml", "snapshot_seconds = 3600\nlimits = { drain_seconds = 3600 }\n")
    with serving("--config", config, "--state-dir", tmp_path / "state") as service:
        assert service.end(number).code == 0


def test_a_refused_registration_keeps_the_restored_blocks(tmp_path: Path) -> None:
    """A later registration that is accepted continues where the previous process has ended."""
    tokens = prompt(1)
    with engine(seed=1, buffer_steps=2, compact=False) as made:
        with serving("--state-dir", tmp_path / "state") as service:
            assert service.register("e", made.publisher).status == 201
            # Replay has only two of three batches, so the first batch must be received live.
            wait_for("the subscription", lambda: made.publisher.stats().subscribers)
            for number in range(3):
                made.store(prompt(number + 1))
            service.exact("e", blocks=12)
            assert service.end().code == 0
        (tmp_path / "state" / "registered.json").unlink()
        limits = write(tmp_path / "c.toml", "limits = { max_sources = 1 }\n")
        with serving("--state-dir", tmp_path / "state", "--config", limits) as service:
            assert service.register("another", "tcp://127.0.0.1:9").status == 201
            assert service.register("e", made.publisher).status == 413
            assert service.post("/unregister", instance_id="another").status == 200
            assert service.register("e", made.publisher).status == 201
            assert service.held(tokens) == {"e": len(tokens)}
            service.exact("e", blocks=12)


def test_settings_of_a_registration_survive_a_restart(tmp_path: Path) -> None:
    """Tiers without removals are still inexact after a restart."""
    with engine() as made:
        with serving("--state-dir", tmp_path) as service:
            load = f"http://127.0.0.1:{reserve_port()}"
            assert service.register("e", made.publisher, stores_only=["cpu", "NVME"], drafts=[1], load=load).status == 201
            before = service.exact("e")
            assert service.end().code == 0
        with serving("--state-dir", tmp_path) as service:
            after = service.exact("e")
            wait_for("a request", lambda: str(service.source("e")["load_fault"]).startswith(f"{load}/metrics does not answer"))
    assert before["stores_only"] == after["stores_only"] == ["cpu", "NVME"]
    assert before["drafts"] == after["drafts"] == [1]
    assert before["trust"]["reason_codes"] == after["trust"]["reason_codes"] == ["stores-only"]
