"""Processes that are stopped, killed and born again, and the proxies between them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Self

from kvevents.testing import FaultProxy

START_SECONDS: Final = 20.0
ANSWER_SECONDS: Final = 30.0
"""Side by side with others a process may wait for a CPU for long, and then has a replay of 10,000 batches to take in first."""
END_SECONDS: Final = 5.0
DISK_BYTES: Final = 256 * 1024
PRELOADED: Final = [
    "tests.system.chaos.engine",
    "tests.system.chaos.consumer",
    "tests.system.chaos.example",
    "tests.system.chaos.relaying",
]

_nursery: Final = multiprocessing.get_context("forkserver")
_nursery.set_forkserver_preload(PRELOADED)


def preload(*modules: str) -> None:
    """Have processes begin with these modules; before the first one begins."""
    _nursery.set_forkserver_preload([*PRELOADED, *modules])


class Silent(Exception):  # noqa: N818 - a word of the field: a process that says nothing
    """A part has not answered in time, or is gone."""


class Broken(Exception):  # noqa: N818 - says what is broken: not what is tested, but what tests it
    """The stage itself fell over."""


class Part:
    """A process with a pipe. `target` gets its end of the pipe, and `arguments`."""

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        self.name = name
        ours, theirs = _nursery.Pipe()
        self.pipe: Connection = ours
        self._process = _nursery.Process(target=_main, args=(target, theirs, *arguments), name=name)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send(self, message: Any) -> None:
        """Raises `Silent` when it is gone."""
        try:
            self.pipe.send(message)
        except OSError as error:
            raise Silent(f"{self.name} is gone") from error

    def receive(self, seconds: float = ANSWER_SECONDS) -> Any:
        """Its next message. Raises `Silent`."""
        try:
            if self.pipe.poll(seconds):
                return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise Silent(f"{self.name} is gone: exit code {self._process.exitcode}") from error
        raise Silent(f"{self.name} says nothing for {seconds:g} s")

    def ask(self, question: Any = "?", seconds: float = ANSWER_SECONDS) -> Any:
        """A question, and its answer."""
        self.send(question)
        return self.receive(seconds)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """As `kill -9`; until it is gone."""
        self._process.kill()
        self._process.join(END_SECONDS)
        self.pipe.close()

    def end(self) -> None:
        """Let it end by itself, else kill it."""
        self._process.join(END_SECONDS)
        self.kill()


def _main(target: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    import logging  # noqa: PLC0415 - of the child alone

    logging.disable(logging.CRITICAL)  # what is lost is what the round is about
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    target(pipe, *arguments)


class Leg:
    """Proxies before the live and the replay endpoint of something, on TCP; on anything else nothing stands between."""

    def __init__(self, endpoint: str, replay_endpoint: str | None) -> None:
        self.live = FaultProxy(endpoint) if endpoint.startswith("tcp://") else None
        self.replay = (
            FaultProxy(replay_endpoint) if replay_endpoint is not None and replay_endpoint.startswith("tcp://") else None
        )
        self.endpoint = endpoint if self.live is None else self.live.endpoint
        self.replay_endpoint = replay_endpoint if self.replay is None else self.replay.endpoint

    @property
    def proxies(self) -> list[FaultProxy]:
        return [proxy for proxy in (self.live, self.replay) if proxy is not None]

    def heal(self) -> None:
        for proxy in self.proxies:
            proxy.heal()

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()


class Disk:
    """A file system of its own that can be full. Raises `OSError` if this machine does not let its user mount one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        mount = shutil.which("mount")
        if mount is None or os.geteuid():
            raise PermissionError("only root can mount a small file system")
        command = [mount, "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(folder)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            raise PermissionError("mount is not permitted here")

    def fill(self) -> None:
        with contextlib.suppress(OSError), Path(self.folder, "ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(4096))

    def free(self) -> None:
        Path(self.folder, "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        umount = shutil.which("umount")
        assert umount is not None
        subprocess.run([umount, "-l", str(self.folder)], check=False, capture_output=True)

    @classmethod
    def can_be_had(cls, folder: Path) -> bool:
        try:
            cls(folder).close()
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                folder.rmdir()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def until(ready: Callable[[], bool], seconds: float, look: float = 0.005) -> bool:
    """Whether something became true in time."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(look)
    return True


@contextlib.contextmanager
def ending(parts: list[Part]) -> Iterator[None]:
    """Whatever happens, none of these stays behind, stopped ones neither."""
    try:
        yield
    finally:
        for part in parts:
            part.kill()
