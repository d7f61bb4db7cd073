"""State across restarts: a service that is killed at any moment restarts with correct state, and reports what it lost."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest

from cli_cases import run
from ports import quiet_port
from service_cases import (
    BLOCK,
    COMMAND,
    DEADLINE,
    Engine,
    Service,
    Stream,
    engine,
    engines,
    hex_keys,
    prompt,
    serving,
    until,
    write,
)

FLAGS = ("--snapshot-seconds", "0.2")


class Publishing:
    """An engine that goes on: it stores prompts and removes some of them, and knows what it must hold."""

    def __init__(self, made: Engine, seed: int) -> None:
        self.engine = made
        self._random = Random(seed)
        self._first = seed * 100_000
        self._prompts: dict[int, list[int]] = {}
        self.truth: set[tuple[str, str]] = set()

    def step(self) -> None:
        if len(self._prompts) > 30 or (self._prompts and self._random.random() < 0.3):
            number = self._random.choice(list(self._prompts))
            self.engine.remove(self._prompts.pop(number))
            self.truth -= self._keys(number)
            return
        self._first += 1
        self._prompts[self._first] = self.engine.store(self._tokens(self._first))
        self.truth |= self._keys(self._first)

    def _tokens(self, number: int) -> list[int]:
        return [number * 64 % 2**31 + place for place in range(3 * BLOCK)]

    def _keys(self, number: int) -> set[tuple[str, str]]:
        return {(key, "gpu") for key in hex_keys(self._tokens(number))}


@contextmanager
def going_on(streams: Sequence[Publishing]) -> Iterator[None]:
    """Meanwhile each of them publishes, some hundred batches a second."""
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


def knows_the_truth(service: Service, streams: dict[str, Publishing]) -> None:
    for name, stream in streams.items():
        until(f"the truth of {name}: {len(stream.truth)} blocks", lambda n=name, s=stream: service.keys(n) == s.truth)  # type: ignore[misc]
        service.exact(name)


def test_killed_at_any_moment_it_comes_back_with_the_truth(tmp_path: Path) -> None:
    """Moments are random; the seed is not, and the publishers never pause."""
    moments = Random(4)
    state = tmp_path / "state"
    with engines(3) as made:
        streams = {f"e{number}": Publishing(each, number + 1) for number, each in enumerate(made)}
        with serving("--state-dir", state, *FLAGS) as service:
            for name, stream in streams.items():
                assert service.register(name, stream.engine.publisher).status == 201
            with going_on(list(streams.values())):
                for name in streams:
                    service.exact(name)
                known = time.time()
                until("a snapshot of all three", lambda: (service.get("/v1/stats").json["snapshot_at"] or 0.0) > known)
                service.kill()
        for _ in range(4):
            with serving("--state-dir", state, *FLAGS) as service, going_on(list(streams.values())):
                # From here on only its own files list the sources that it subscribes to.
                for name in streams:
                    service.exact(name)
                threading.Event().wait(moments.random() * 0.4)
                service.kill()
        with serving("--state-dir", state, *FLAGS) as service:
            service.says("restored [1-9][0-9]* blocks of 3 streams")
            knows_the_truth(service, streams)
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
            service.says("e rank 0: its blocks are removed: publisher restarted")
            assert service.held(prompt(1)) == {}


def test_a_stream_is_not_exact_before_it_was_checked(tmp_path: Path) -> None:
    with engine(seed=3) as made, serving("--state-dir", tmp_path) as service:
        assert service.register("e", made.publisher).status == 201
        made.store(prompt(3))
        service.exact("e", blocks=4)
        service.end()
    with serving("--state-dir", tmp_path) as service:  # the engine is gone
        until("the reason", lambda: "nothing listens" in service.trust("e")[1])
        assert service.trust("e")[0] in {"CONNECTING", "STALE"}
        # What it held is answered, with how far it can be trusted.
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
            service.says(f"ERROR +{warning[:40]}")
            if broken == "registered":
                assert (tmp_path / "registered.bad").read_bytes() == path.with_suffix(".bad").read_bytes()
                assert service.sources() == {}
                assert service.register("e", made.publisher).status == 201
            service.exact("e", blocks=4)
            assert service.held(prompt(4)) == {"e": 64}
            # It does not pass with the next good snapshot: an operator looks later than that.
            until("a snapshot", lambda: service.get("/v1/stats").json["snapshot_at"])
            assert service.get("/health").json["warnings"] == [warning]
            service.end()
        with serving("--state-dir", tmp_path) as service:
            assert service.get("/health").json["warnings"] == []
            service.exact("e", blocks=4)


def test_what_a_killed_process_had_begun_to_write_is_swept_away(tmp_path: Path) -> None:
    write(tmp_path / ".kvevents-0123.tmp", "half")
    write(tmp_path / ".current.tmp", "half")
    with serving("--state-dir", tmp_path):
        assert not list(tmp_path.glob(".*.tmp"))


def test_a_killed_process_leaves_nothing_in_the_temporary_folder(tmp_path: Path) -> None:
    """What the control plane answers comes over no file."""
    with serving(TMPDIR=str(tmp_path)) as service:
        assert service.get("/openapi.json").status == 200
        service.program.process.kill()
        service.program.end()
    assert list(tmp_path.iterdir()) == []


def test_one_folder_is_for_one_process(tmp_path: Path) -> None:
    with serving("--state-dir", tmp_path):
        ended = run("serve", "--port", 0, "--state-dir", tmp_path)
        assert ended.code == 1
        (line,) = ended.err.splitlines()
        assert f"state_dir {tmp_path} is in use by another process" in line


# --- a disk that is full

_LIMITED = """
import resource, runpy, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
signal.signal(signal.SIGUSR1, lambda *_: resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2))
sys.argv = ["kvevents", "serve", "--port", "0"] + sys.argv[1:]
runpy.run_module("kvevents", run_name="__main__")
"""
"""A process that may write files of 64 bytes at most, until it is sent SIGUSR1."""


@contextmanager
def full_disk(folder: Path) -> Iterator[tuple[Path, tuple[str, ...], Callable[[Service], None]]]:
    """A folder on a disk that is full, the command to use it with, and what makes room."""
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
        yield folder, COMMAND, lambda _: filler.unlink()
    finally:
        subprocess.run(["umount", "-l", folder], check=True)  # noqa: S607


def metric(service: Service, value: int) -> bool:
    return f"kvevents_snapshot_failed {value}\n".encode() in service.get("/metrics").body


def test_a_full_disk_is_a_state_that_passes(tmp_path: Path) -> None:
    with engine(seed=5) as made, full_disk(tmp_path / "small") as (folder, command, make_room):
        with serving("--state-dir", folder, *FLAGS, command=command) as service:
            assert service.register("e", made.publisher).status == 201
            made.store(prompt(5, 100))
            service.exact("e", blocks=100)

            until("the fault", lambda: metric(service, 1))
            fault = service.get("/v1/stats").json["snapshot_fault"]
            assert str(folder) in fault
            assert service.get("/health").json == {"status": "ok", "warnings": [fault]}
            assert service.held(prompt(5, 100)) == {"e": 1600}
            assert service.end().code == 0
        with serving("--state-dir", folder, *FLAGS, command=command) as service:
            assert service.register("e", made.publisher).status == 201
            service.exact("e", blocks=100)
            until("the fault", lambda: metric(service, 1))
            make_room(service)
            until("a snapshot", lambda: metric(service, 0))
            assert service.get("/health").json["warnings"] == []
            # What was registered while there was no room is kept, too.
            until("registrations", (folder / "registered.json").exists)
            assert len(service.log_lines("ERROR")) <= 3
            service.kill()
        with serving("--state-dir", folder) as service:
            service.exact("e", blocks=100)


def test_registrations_that_the_disk_refused_are_written_at_the_end(tmp_path: Path) -> None:
    """The next snapshot would try again; a service that ends before it does so then."""
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


# --- an orderly end


def test_sigterm_ends_what_is_under_way_and_keeps_the_rest(tmp_path: Path) -> None:
    """When the last request has its answer, the service ends: it does not wait for the time that requests have."""
    config = write(tmp_path / "c.toml", "limits = { drain_seconds = 3600 }\n")
    with engine(seed=6) as made, serving("--config", config, "--state-dir", tmp_path) as service:
        assert service.register("e", made.publisher).status == 201
        made.store(prompt(6))
        service.exact("e", blocks=4)
        body = b'{"model_name":"m","token_ids":[1]}'
        head = b"POST /query HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        with Stream(service) as stream, socket.create_connection((service.host, service.port), DEADLINE) as slow:
            slow.sendall(head + body[:10])
            assert service.get("/health").status == 200  # the bytes before it are there
            service.program.process.send_signal(signal.SIGTERM)
            assert stream.ended()
            slow.sendall(body[10:])
            assert slow.recv(65_536).startswith(b"HTTP/1.1 200 ")
        assert service.program.end().code == 0
        assert not service.log_lines("ERROR|WARNING")
        with pytest.raises(ConnectionError):
            socket.create_connection((service.host, service.port), 1)
    assert (tmp_path / "current").exists()


def test_idle_clients_delay_the_end_no_longer_than_configured(tmp_path: Path) -> None:
    """Another test shows that a request has its time; this one, that no client has more. The end comes, and is orderly."""
    config = write(tmp_path / "c.toml", "limits = { drain_seconds = 0.5 }\n")
    with serving("--config", config) as service, socket.create_connection((service.host, service.port)) as idle:
        idle.sendall(b"POST /v1/match_many HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert service.get("/health").status == 200
        began = time.monotonic()
        assert service.end().code == 0
        assert time.monotonic() - began > 0.4
        assert not service.log_lines("Traceback")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_service_waits_for_nothing_at_its_end(tmp_path: Path, number: signal.Signals) -> None:
    """Neither for the time that requests would have, nor for what snapshots are apart."""
    config = write(tmp_path / "c.toml", "snapshot_seconds = 3600\nlimits = { drain_seconds = 3600 }\n")
    with serving("--config", config, "--state-dir", tmp_path / "state") as service:
        assert service.end(number).code == 0


def test_a_registration_that_is_refused_forgets_nothing_of_what_was_kept(tmp_path: Path) -> None:
    """The right one goes on where the process before has ended, though a wrong one came first."""
    tokens = prompt(1)
    with engine(seed=1, buffer_steps=2, compact=False) as made:
        with serving("--state-dir", tmp_path / "state") as service:
            assert service.register("e", made.publisher).status == 201
            # Two of three batches are left for replay: the first one must come live.
            until("the subscription", lambda: made.publisher.stats().subscribers)
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


def test_the_settings_of_a_registration_come_back_after_a_restart(tmp_path: Path) -> None:
    """Tiers without removals are not taken for exact ones because the service has restarted."""
    with engine() as made:
        with serving("--state-dir", tmp_path) as service:
            load = f"http://127.0.0.1:{quiet_port()}"
            assert service.register("e", made.publisher, stores_only=["cpu", "NVME"], drafts=[1], load=load).status == 201
            before = service.exact("e")
            assert service.end().code == 0
        with serving("--state-dir", tmp_path) as service:
            after = service.exact("e")
            until("a request", lambda: str(service.source("e")["load_fault"]).startswith(f"{load}/metrics does not answer"))
    assert before["stores_only"] == after["stores_only"] == ["cpu", "NVME"]
    assert before["drafts"] == after["drafts"] == [1]
    assert before["trust"]["reason_codes"] == after["trust"]["reason_codes"] == ["stores-only"]
