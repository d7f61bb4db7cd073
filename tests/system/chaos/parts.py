"""Processes that can be stopped and killed, the proxies between them, and small disks."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Self

from kvevents.testing import FaultProxy

START_SECONDS: Final = 20.0
ANSWER_SECONDS: Final = 30.0
"""Limit of one answer: a process may wait long for a CPU, and then has to apply a replay of 10,000 batches first."""
END_SECONDS: Final = 5.0
DISK_BYTES: Final = 256 * 1024
PRELOADED: Final = [
    "tests.system.chaos.engine",
    "tests.system.chaos.consumer",
    "tests.system.chaos.example",
    "tests.system.chaos.relaying",
]

_context: Final = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


def preload(*modules: str) -> None:
    """Let processes start with these modules imported. Must be called before the first process starts."""
    _context.set_forkserver_preload([*PRELOADED, *modules])


class SilentPartError(Exception):
    """A part has not answered in time, or its process has ended."""


class BrokenStageError(Exception):
    """The stage of a round has failed, not what is tested on it."""


class Part:
    """A process with a pipe. It calls `target` with its end of the pipe and `arguments`."""

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        self.name = name
        own_end, child_end = _context.Pipe()
        self.pipe: Connection = own_end
        self._process = _context.Process(target=_main, args=(target, child_end, *arguments), name=name)
        self._process.start()
        child_end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send(self, message: Any) -> None:
        """Send a message. Raises `SilentPartError` if the process has ended."""
        try:
            self.pipe.send(message)
        except OSError as error:
            raise SilentPartError(f"{self.name} has ended") from error

    def receive(self, seconds: float = ANSWER_SECONDS) -> Any:
        """Return the next message of the process. Raises `SilentPartError` if it sends no message in time."""
        try:
            if self.pipe.poll(seconds):
                return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise SilentPartError(f"{self.name} has ended: exit code {self._process.exitcode}") from error
        raise SilentPartError(f"{self.name} does not answer within {seconds:g} s")

    def exchange(self, request_message: Any = "?", seconds: float = ANSWER_SECONDS) -> Any:
        """Send a message and return the answer. Raises `SilentPartError`."""
        self.send(request_message)
        return self.receive(seconds)

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end of the process."""
        self._process.kill()
        self._process.join(END_SECONDS)
        self.pipe.close()

    def end(self) -> None:
        """Wait for the end of the process, and kill it after `END_SECONDS`."""
        self._process.join(END_SECONDS)
        self.kill()


def _main(target: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    import logging  # noqa: PLC0415 - only in the child

    logging.disable(logging.CRITICAL)  # rounds cause warnings all the time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    target(pipe, *arguments)


class Leg:
    """Proxies for a live and a replay endpoint over TCP. Other endpoints have no proxies."""

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
    """A small file system that can be filled. Raises `OSError` if the user must not mount one."""

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
    def is_available(cls, folder: Path) -> bool:
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


def wait_until(is_ready: Callable[[], bool], seconds: float, interval: float = 0.005) -> bool:
    """Wait until `is_ready` returns true. Return False if it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not is_ready():
        if time.monotonic() > end:
            return False
        time.sleep(interval)
    return True
