"""The state folder: several threads write to it at once, and no file is malformed, missing or readable by other users."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from stat import S_IMODE

from kvevents.index import PrefixIndex
from kvevents.service.access import AuditLog
from kvevents.service.allow_list import EndpointAllowList
from kvevents.service.fleet.fleet import Fleet
from kvevents.service.fleet.registration import Registration
from kvevents.service.registrations import Registrations
from kvevents.service.state_store import SavedRegistration, StateStore
from kvevents.stream import Checkpoint
from service_cases import DEADLINE, Client, engine, serving, wait_for
from service_cases import registration as registration_body

THREADS = 16


def registration(number: int) -> SavedRegistration:
    registered = Registration(instance=f"e{number}", endpoint=f"tcp://127.0.0.1:{20_000 + number}", model="m")
    return SavedRegistration(registration=registered, lease_seconds=number or None)


def test_registrations_that_threads_write_at_once_are_all_stored(tmp_path: Path) -> None:
    """No write fails, and the file has the newest list after each round."""
    state_store = StateStore(tmp_path)
    for _ in range(20):
        known: list[SavedRegistration] = []
        together = threading.Barrier(THREADS)

        def save_registrations(
            number: int, known: list[SavedRegistration] = known, together: threading.Barrier = together
        ) -> None:
            together.wait(DEADLINE)
            known.append(registration(number))
            state_store.save_registrations(lambda: list(known))

        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(save_registrations, range(THREADS)))
        assert sorted(state_store.load_registrations(), key=str) == sorted(known, key=str)
    assert not list(tmp_path.glob(".*"))


class BlockingCheckpoints:
    """A source of checkpoints that blocks its second call until `go_on` is set."""

    def __init__(self) -> None:
        self.called = threading.Event()
        self.go_on = threading.Event()
        self._calls = 0

    def __call__(self) -> list[Checkpoint]:
        self._calls += 1
        if self._calls == 2:
            self.called.set()
            assert self.go_on.wait(DEADLINE)
        return []


def test_a_save_waits_for_an_earlier_save_and_removes_none_of_its_files(tmp_path: Path) -> None:
    """The last snapshot at SIGTERM can begin during a periodic one. In any order, `current` names a snapshot that exists."""
    state_store = StateStore(tmp_path)
    first, second = BlockingCheckpoints(), BlockingCheckpoints()
    with ThreadPoolExecutor(2) as threads:
        periodic = threads.submit(state_store.save, PrefixIndex(), first)
        assert first.called.wait(DEADLINE)
        last = threads.submit(state_store.save, PrefixIndex(), second)
        assert not second.called.wait(0.05)
        first.go_on.set()
        periodic.result(DEADLINE)
        second.go_on.set()
        last.result(DEADLINE)
    assert state_store.restore(PrefixIndex()) == {}
    assert (tmp_path / "current").exists()


def test_the_time_of_a_snapshot_is_that_of_its_state(tmp_path: Path) -> None:
    """A client that waits for a newer time than now finds in the snapshot what is known now, however long writing takes."""
    checkpoints = BlockingCheckpoints()
    with ThreadPoolExecutor(1) as thread:
        saving = thread.submit(StateStore(tmp_path).save, PrefixIndex(), checkpoints)
        assert checkpoints.called.wait(DEADLINE)
        known = time.time()
        checkpoints.go_on.set()
        assert saving.result(DEADLINE) < known


def test_close_waits_for_a_save_before_it_releases_the_folder(tmp_path: Path) -> None:
    """The next process can open the folder afterwards."""
    state_store, checkpoints = StateStore(tmp_path), BlockingCheckpoints()
    with ThreadPoolExecutor(2) as threads:
        saving = threads.submit(state_store.save, PrefixIndex(), checkpoints)
        assert checkpoints.called.wait(DEADLINE)
        closing = threads.submit(state_store.close)
        checkpoints.go_on.set()
        closing.result(DEADLINE)
        assert (tmp_path / "current").exists()
        saving.result(DEADLINE)
    StateStore(tmp_path).close()


def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    """Other users can list the folder, but snapshots can hold token ids and registrations hold salts."""
    tmp_path.chmod(0o755)
    state_store = StateStore(tmp_path)
    nothing: Callable[[], list[Checkpoint]] = list
    state_store.save(PrefixIndex(), nothing)
    state_store.save_registrations(lambda: [registration(0)])
    modes = {path.name.split("-")[0]: S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(("current", "index", "streams", "registered.json", "lock"), 0o600)


def test_registrations_that_clients_send_at_once_survive_a_kill(tmp_path: Path) -> None:
    """Each response is sent after its registration is on the disk. All registrations are there after SIGKILL."""
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
        wait_for("all of them", lambda: len(service.sources()) == len(names))


class BlockingStore(StateStore):
    """A state folder to which each write of registrations waits until it may go on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.loop = asyncio.get_running_loop()
        self.begun: asyncio.Queue[threading.Event] = asyncio.Queue()

    def save_registrations(self, registrations: Callable[[], list[SavedRegistration]]) -> None:
        may_continue = threading.Event()
        self.loop.call_soon_threadsafe(self.begun.put_nowait, may_continue)
        assert may_continue.wait(DEADLINE)
        super().save_registrations(registrations)


async def test_a_registration_is_saved_only_after_its_write_has_ended(tmp_path: Path) -> None:
    """The client whose request has begun the write hangs up. The answer to another client must not be sent before it ends."""
    fleet = Fleet(PrefixIndex(), max_sources=1)
    with closing(fleet.follower.subscriber), closing(BlockingStore(tmp_path)) as store:
        registrations = Registrations(
            fleet=fleet,
            allow_list=EndpointAllowList(()),
            store=store,
            audit=AuditLog(),
            advice="",
            owner_of=lambda _: None,
            resume=lambda _: None,
            report_fault=lambda _: None,
        )
        async with asyncio.timeout(DEADLINE):
            first, hung_up, other = (asyncio.create_task(registrations.save()) for _ in range(3))
            (await store.begun.get()).set()
            await first
            write = await store.begun.get()  # for both others
            hung_up.cancel()
            next_write = asyncio.create_task(store.begun.get())
            await asyncio.wait((other, next_write), return_when=asyncio.FIRST_COMPLETED)
            assert not other.done()
            write.set()
            (await next_write).set()
            await other
