"""The state folder: several threads write to it at once, and nothing in it is malformed, missing or readable by others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from stat import S_IMODE

from kvevents.index import PrefixIndex
from kvevents.service.registration import Registration
from kvevents.service.state_store import StateStore
from kvevents.stream import Checkpoint
from service_cases import DEADLINE, Client, engine, serving, until
from service_cases import registration as registration_body

THREADS = 16


def registration(number: int) -> Registration:
    return Registration(instance=f"e{number}", endpoint=f"tcp://127.0.0.1:{20_000 + number}", model="m")


def test_registrations_that_threads_write_at_once_are_all_kept(tmp_path: Path) -> None:
    """No write fails, the file is whole after each round, and it has the newest list."""
    state_store = StateStore(tmp_path)
    for _ in range(20):
        known: list[Registration] = []
        together = threading.Barrier(THREADS)

        def save_registrations(number: int, known: list[Registration] = known, together: threading.Barrier = together) -> None:
            together.wait(DEADLINE)
            known.append(registration(number))
            state_store.save_registrations(lambda: list(known))

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(save_registrations, range(THREADS)))
        assert sorted(state_store.load_registrations(), key=str) == sorted(known, key=str)
    assert not list(tmp_path.glob(".*"))


class Standing:
    """Where streams stand: the second question of a save is answered when `go_on` is set."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.go_on = threading.Event()
        self._questions = 0

    def __call__(self) -> list[Checkpoint]:
        self._questions += 1
        if self._questions == 2:
            self.asked.set()
            assert self.go_on.wait(DEADLINE)
        return []


def test_a_save_waits_for_the_one_under_way_and_removes_no_file_of_it(tmp_path: Path) -> None:
    """The last snapshot at SIGTERM beside a periodic one: whichever ends last, `current` names a snapshot that is there."""
    state_store = StateStore(tmp_path)
    first, second = Standing(), Standing()
    with ThreadPoolExecutor(2) as threads:
        periodic = threads.submit(state_store.save, PrefixIndex(), first)
        assert first.asked.wait(DEADLINE)
        last = threads.submit(state_store.save, PrefixIndex(), second)
        assert not second.asked.wait(0.05)
        first.go_on.set()
        periodic.result(DEADLINE)
        second.go_on.set()
        last.result(DEADLINE)
    assert state_store.restore(PrefixIndex()) == {}
    assert (tmp_path / "current").exists()


def test_the_folder_is_left_to_the_next_process_when_all_is_written(tmp_path: Path) -> None:
    """`close` waits for a save under way."""
    state_store, standing = StateStore(tmp_path), Standing()
    with ThreadPoolExecutor(2) as threads:
        saving = threads.submit(state_store.save, PrefixIndex(), standing)
        assert standing.asked.wait(DEADLINE)
        closing = threads.submit(state_store.close)
        standing.go_on.set()
        closing.result(DEADLINE)
        assert saving.done()
    StateStore(tmp_path).close()


def test_every_file_is_for_its_owner_only(tmp_path: Path) -> None:
    """In a folder that others may read, too: snapshots can hold token ids, registrations hold salts."""
    tmp_path.chmod(0o755)
    state_store = StateStore(tmp_path)
    nothing: Callable[[], list[Checkpoint]] = list
    state_store.save(PrefixIndex(), nothing)
    state_store.save_registrations(lambda: [registration(0)])
    modes = {path.name.split("-")[0]: S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("current", "index", "streams", "registered.json", "lock"), 0o600)


def test_registrations_that_clients_make_at_once_survive_a_kill(tmp_path: Path) -> None:
    """No answer before its registration is on the disk, no warning, and all are there after SIGKILL."""
    names = [f"e{number}" for number in range(48)]
    with engine(seed=9) as made, serving("--state-dir", tmp_path, "--snapshot-seconds", "0.1") as service:

        def register(name: str) -> int:
            with closing(Client(service.url)) as client:
                return client.post("/register", registration_body(name, made.publisher)).status

        with ThreadPoolExecutor(THREADS) as threads:
            assert set(threads.map(register, names)) == {201}
        assert service.get("/health").json["warnings"] == []
        service.kill()
    with serving("--state-dir", tmp_path) as service:
        until("all of them", lambda: len(service.sources()) == len(names))
