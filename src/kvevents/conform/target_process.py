"""The process of a program under test, and virtual environments with released wheels."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, NamedTuple, Self

from kvevents.conform.scripted_engine import POLL_SECONDS
from kvevents.conform.target import TargetError
from kvevents.errors import ExternalError
from kvevents.testing.ports import reserve_port
from kvevents.testing.tape import ANY_LOCAL_PORT

START_SECONDS: Final = 60.0
"""Time of a program to answer after its start; many start at once on few CPUs."""
INSTALL_SECONDS: Final = 540.0
"""Time to install a wheel with its dependencies."""
LOG_LINES: Final = 3
"""Last lines of the log that an error quotes."""


class _ProcessInput(NamedTuple):
    """A process and its stdin."""

    process: subprocess.Popen[bytes]
    stdin: IO[bytes]


class Program:
    """A program in a process group of its own, with a reserved port, a folder for its state, and a log."""

    def __init__(self, title: str, command: Callable[[int, Path], Sequence[str]], *, is_fed: bool = False) -> None:
        """Create the program. `command` returns its command from the port and the folder; `is_fed`: it reads its stdin."""
        self.title: Final = title
        self._is_fed = is_fed
        self._folder = tempfile.TemporaryDirectory(prefix="kvevents-conform-")
        # Held, because programs of several scenarios run at a time.
        self._held = reserve_port(ANY_LOCAL_PORT)
        self.port: Final = int(self._held.endpoint.rpartition(":")[2])
        self._command = command(self.port, Path(self._folder.name))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The address of the process, if it speaks HTTP."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, is_ready: Callable[[], bool]) -> None:
        """Start it, and wait until it is ready. Raise `TargetError` if it ends instead, or takes too long."""
        stdin = subprocess.PIPE if self._is_fed else subprocess.DEVNULL
        with Path(self._folder.name, "log").open("ab") as log:
            try:
                self._process = subprocess.Popen(  # noqa: S603  the program that is tested
                    self._command, stdin=stdin, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as error:
                raise TargetError(f"{self.title} did not start: {error}") from error
        deadline = time.monotonic() + START_SECONDS
        while True:
            self.check()
            with suppress(TargetError):
                if is_ready():
                    return
            if time.monotonic() > deadline:
                raise TargetError(f"{self.title} was not ready within {START_SECONDS:g} s: {self._last_lines()}")
            time.sleep(5 * POLL_SECONDS)

    def check(self) -> None:
        """Raise `TargetError` if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise TargetError(f"{self.title} ended with {self._process.returncode}: {self._last_lines()}")

    def kill(self) -> None:
        """End its process group with SIGKILL."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()

    @property
    def _running(self) -> _ProcessInput:
        if self._process is None or self._process.stdin is None:
            raise TargetError(f"{self.title} is not started, or does not read its stdin")
        return _ProcessInput(self._process, self._process.stdin)

    def feed(self, data: bytes, seconds: float) -> None:
        """Write to its stdin. Raise `TargetError` if it ends, or does not read within `seconds`."""
        descriptor, rest, deadline = self._running.stdin.fileno(), memoryview(data), time.monotonic() + seconds
        os.set_blocking(descriptor, False)
        poll = select.poll()  # select() takes no descriptor above 1,023
        poll.register(descriptor, select.POLLOUT)
        while rest:
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise TargetError(f"{self.title} did not read its input within {seconds:g} s")
            try:
                rest = rest[os.write(descriptor, rest) :]
            except OSError as error:
                raise TargetError(f"{self.title} ended: {self._last_lines()}") from error

    def end(self, seconds: float) -> None:
        """Close its stdin, and wait until it ends. Raise `TargetError` if it does not, within `seconds`."""
        running = self._running
        running.stdin.close()
        try:
            running.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise TargetError(f"{self.title} did not end within {seconds:g} s after the end of its input") from error

    def _last_lines(self) -> str:
        lines = Path(self._folder.name, "log").read_text(errors="replace").splitlines()
        return " | ".join(lines[-LOG_LINES:]) or "it logged nothing"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._held.holder is not None:
            self._held.holder.close()
        self._folder.cleanup()


def python_with(package: str, version: str, folder: Path) -> str:
    """Return the interpreter of a virtual environment with a released wheel. Create it in `folder` if it is not there.

    Wheels in the folder are used before those of the package index. Raise `ExternalError` if that fails.
    """
    home = folder / f"{package}-{version}"
    python, ready = home / "bin" / "python", home / ".ready"
    if ready.exists():
        return str(python)
    print(f"installing {package} {version} into {home} once", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    wheels = ("--only-binary=:all:", "--prefer-binary", "--find-links", str(folder))
    for command in (
        (sys.executable, "-m", "venv", "--clear", str(home)),
        (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wheels, f"{package}=={version}"),
    ):
        try:
            done = subprocess.run(command, stdout=sys.stderr, check=False, timeout=INSTALL_SECONDS)  # noqa: S603  pip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ExternalError(f"cannot install {package} {version} into {home}: {error}") from error
        if done.returncode:
            raise ExternalError(f"cannot install {package} {version} into {home}: pip ended with {done.returncode}")
    ready.touch()
    return str(python)
