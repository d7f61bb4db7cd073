"""Processes that can be stopped and killed, the proxies between them, and small disks."""

from __future__ import annotations

import contextlib
import logging
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

from tests.system.chaos_kit.redirecting_proxy import RedirectingProxy

START_SECONDS: Final = 60.0
ANSWER_SECONDS: Final = 30.0
"""Limit of one answer: a process may wait long for a CPU, and then has to apply a replay of 10,000 batches first."""
END_SECONDS: Final = 30.0
DISK_BYTES: Final = 256 * 1024

context: Final = multiprocessing.get_context("forkserver")
_preloaded: Final = ["tests.system.chaos_kit.stage"]
context.set_forkserver_preload(_preloaded)


def preload(*modules: str) -> None:
    """Let processes start with these modules imported. Must be called before the first process starts."""
    _preloaded.extend(modules)
    context.set_forkserver_preload(_preloaded)


class SilentPartError(Exception):
    """A part has not answered in time, or its process has ended."""


class BrokenStageError(Exception):
    """The stage of a round has failed, and not the tested program."""


class Part:
    """A process with a pipe, which can be started again. It calls `target` with its end of the pipe and `arguments`.

    With `opens`, the process sends a message when it is ready, and `start` waits for it.
    """

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any, opens: bool = False) -> None:
        self.name: Final = name
        self._target: Final = target
        self._arguments: Final = arguments
        self._opens: Final = opens
        self._launch()

    def _launch(self) -> None:
        self.pipe, child_end = context.Pipe()
        arguments = (self._target, child_end, *self._arguments)
        self._process = context.Process(target=_main, args=arguments, name=self.name)
        self._process.start()
        child_end.close()
        if self._opens:
            try:
                self.receive(START_SECONDS)
            except BaseException:
                self.kill()
                raise

    def start(self) -> None:
        """Start the process again. Do nothing if it runs."""
        if not self.is_alive:
            self._launch()

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
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def resume(self) -> None:
        """Let the process run again, whether it was stopped or killed."""
        self.go_on()
        self.start()

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end of the process."""
        self._process.kill()
        self._process.join(END_SECONDS)
        self.pipe.close()


def begin_process() -> None:
    """Prepare a process of a round: rounds cause warnings all the time, and Ctrl-C is for the process that plays them."""
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _main(target: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    begin_process()
    target(pipe, *arguments)


class Leg:
    """Proxies for a live and a replay endpoint over TCP. Other endpoints have no proxies."""

    def __init__(self, endpoint: str, replay_endpoint: str | None) -> None:
        self.live = RedirectingProxy(endpoint) if endpoint.startswith("tcp://") else None
        self.replay = (
            RedirectingProxy(replay_endpoint) if replay_endpoint is not None and replay_endpoint.startswith("tcp://") else None
        )
        self.endpoint = endpoint if self.live is None else self.live.endpoint
        self.replay_endpoint = replay_endpoint if self.replay is None else self.replay.endpoint

    @property
    def proxies(self) -> list[RedirectingProxy]:
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
