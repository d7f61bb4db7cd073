"""The interfaces of a target and of its driver; HTTP requests to targets, and the processes of targets.

A target translates the referee's questions into its own protocol. An indexer answers with tokens per worker, a router with the
worker that it chose. Endpoint Pickers of the Gateway API could be a third kind of target: `find_wrong_answers` would send a
request by the `ext_proc` protocol and read `x-gateway-destination-endpoint` of the answer. The referee would play the workers,
as for a router.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvevents.client.protocol import Call, decode_json
from kvevents.client.sync import Client
from kvevents.conform.scenario import Ability, CheckQuery, Scenario
from kvevents.conform.verdict import WrongAnswer
from kvevents.errors import ConfigError, ExternalError
from kvevents.testing.ports import reserve_port
from kvevents.testing.tape import ANY_LOCAL_PORT

ANSWER_SECONDS: Final = 10.0
"""Maximum time for a target to answer one request."""
POLL_SECONDS: Final = 0.01
"""Time between two checks of a condition."""
T = TypeVar("T")
MAX_ANSWER_BYTES: Final = 64 << 20
"""Maximum size of one answer."""


class TargetResponse(NamedTuple):
    """The status and the body of an HTTP response."""

    status: int
    body: bytes

    @property
    def json(self) -> Any:
        """The decoded body, or None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, RecursionError):
            return None

    def decode(self, kind: type[T]) -> T:
        """Return the body, decoded as a value of type `kind`. Raise `TargetError` if the body is not JSON of that type."""
        try:
            return decode_json(self.body, kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise TargetError(f"the answer cannot be decoded ({error}): {self.text[:200]}") from error

    @property
    def text(self) -> str:
        """The status code, followed by the error in the body if the body contains one."""
        content = self.json
        error = content.get("error", "") if isinstance(content, dict) else self.body[:200].decode(errors="replace")
        return f"{self.status} {error}".strip()


def request(url: str, method: str = "GET", body: Any = None, *, seconds: float = ANSWER_SECONDS) -> TargetResponse:
    """Send a request whose body is `body` as JSON, and return the response. Raise `TargetError`."""
    parts = urlsplit(url)
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    call = Call(method, path, dict[str, Any], None if body is None else msgspec.json.encode(body))
    try:
        with Client(f"{parts.scheme}://{parts.netloc}", max_response_bytes=MAX_ANSWER_BYTES) as client:
            return TargetResponse(*client.exchange(call, seconds))
    except TimeoutError as error:
        raise TargetError(f"{method} {url} did not answer within {seconds:g} s") from error
    except (OSError, HTTPException) as error:
        raise TargetError(f"{method} {url} failed: {error or type(error).__name__}") from error


class TargetError(ExternalError):
    """The target ended, gave an unexpected answer, or did not answer in time. The message says why and where."""


class RejectedError(ExternalError):
    """The target rejected a registration. The message is the target's answer."""


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until `condition` returns True, and return True. Return False if `seconds` seconds pass first."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True


def is_open(endpoint: str) -> bool:
    """Whether something accepts connections at `tcp://HOST:PORT`."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=1.0):
            return True
    except OSError:
        return False


class EngineRegistration(NamedTuple):
    """The description of an engine that a target receives in order to follow it."""

    worker: str
    rank: int
    endpoint: str
    replay_endpoint: str | None
    block_size: int
    tenant: str | None = None


class Target(ABC):
    """A program under test, for one scenario. Every method returns within a bounded time, or raises `TargetError`."""

    @abstractmethod
    def register(self, registration: EngineRegistration) -> None:
        """Follow an engine. Raise `RejectedError` if the target rejects the registration."""

    @abstractmethod
    def find_wrong_answers(self, queries: Sequence[CheckQuery]) -> list[WrongAnswer]:
        """Send the queries, and return the wrong answers."""

    @abstractmethod
    def read_reports(self) -> dict[str, str | None]:
        """Return, for each registered worker, the problem that the target reports, or None if it reports no problem."""

    def engine_stopped(self, worker: str) -> None:  # noqa: B027  most targets have nothing to end
        """Stop everything that the referee simulates for a worker beside the engine's events, because the engine has ended."""

    def engine_restarting(self, worker: str) -> AbstractContextManager[None]:
        """Return a context in which a worker's engine restarts, with all other parts of the engine's process."""
        del worker
        return nullcontext()

    def unregister(self, registration: EngineRegistration) -> None:
        """Stop following an engine."""
        raise NotImplementedError

    def kill(self) -> None:
        """Wait until the process has stored its state, and end it with SIGKILL."""
        raise NotImplementedError

    def start(self, registrations: Sequence[EngineRegistration]) -> None:
        """Start the process again. Register again those engines that the process has not stored."""
        raise NotImplementedError


class Driver(ABC):
    """Starts a program under test, with its defaults, for each scenario."""

    title: str
    """Name and version."""
    abilities: frozenset[Ability]
    """Abilities of the targets, besides two that all targets have: to follow engines from the start, and to answer queries."""

    @abstractmethod
    def target(self, scenario: Scenario, registrations: Sequence[EngineRegistration]) -> AbstractContextManager[Target]:
        """Return a context in which the target runs. `registrations` are the registrations that the scenario's steps will make.

        Raise `TargetError` if the target does not start.
        """


START_SECONDS: Final = 60.0
"""Maximum time from the start of a program until the program is ready. It is long because many programs start together."""
INSTALL_SECONDS: Final = 540.0
"""Maximum time to install a wheel with its dependencies."""


class Program:
    """A program in its own process group, with a reserved port, a folder for its state, and a log."""

    def __init__(self, title: str, command: Callable[[int, Path], Sequence[str]], *, is_fed: bool = False) -> None:
        """Create the program. `command` returns the command line for a port and a folder. If `is_fed`, stdin is a pipe."""
        self.title: Final = title
        self._is_fed = is_fed
        self._folder = tempfile.TemporaryDirectory(prefix="kvevents-conform-")
        # The port stays reserved until the end, because programs of several scenarios run at the same time.
        self._reserved_port = reserve_port(ANY_LOCAL_PORT)
        self.port: Final = int(self._reserved_port.endpoint.rpartition(":")[2])
        self._command = command(self.port, Path(self._folder.name))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of the program, if the program is an HTTP server."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, is_ready: Callable[[], bool]) -> None:
        """Start the program, and wait until it is ready. Raise `TargetError` if it ends or needs more than `START_SECONDS`."""
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
        """Raise `TargetError` if the program has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise TargetError(f"{self.title} ended with exit status {self._process.returncode}: {self._last_lines()}")

    def kill(self) -> None:
        """End the program's process group with SIGKILL."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()

    def feed(self, data: bytes, seconds: float) -> None:
        """Write to the program's stdin. Raise `TargetError` if the program ends, or does not read within `seconds`."""
        if self._process is None or self._process.stdin is None:
            raise TargetError(f"{self.title} cannot be given input: it is not started, or does not read its stdin")
        descriptor, rest, deadline = self._process.stdin.fileno(), memoryview(data), time.monotonic() + seconds
        os.set_blocking(descriptor, False)
        poll = select.poll()  # select() accepts no descriptor above 1,023
        poll.register(descriptor, select.POLLOUT)
        while rest:
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                raise TargetError(f"{self.title} did not read its input within {seconds:g} s")
            try:
                rest = rest[os.write(descriptor, rest) :]
            except OSError as error:
                raise TargetError(f"{self.title} ended: {self._last_lines()}") from error

    def end(self, seconds: float) -> None:
        """Close the program's stdin, and wait until it ends. Raise `TargetError` if this takes more than `seconds`."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise TargetError(f"{self.title} did not end within {seconds:g} s after the end of its input") from error

    def _last_lines(self) -> str:
        lines = Path(self._folder.name, "log").read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:]) or "it logged nothing"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reserved_port.close()
        self._folder.cleanup()


def check_program(program: str) -> None:
    """Raise `ConfigError` if the program of a command is not found, or is not executable."""
    if shutil.which(program) is None:
        raise ConfigError(f"cannot start {program!r}: expected a program in PATH, or the path of an executable file")


def install_package(package: str, version: str, folder: Path, *wheels: Path, requirements: Sequence[str] = ()) -> str:
    """Return the interpreter of a virtual environment with a released wheel. Create the environment in `folder` if needed.

    Wheels in this folder and in the folders `wheels` are preferred to wheels of the package index. The packages in
    `requirements` are also installed. Raise `ExternalError` if the installation fails.
    """
    home = folder / f"{package}-{version}"
    python, ready = home / "bin" / "python", home / ".ready"
    if ready.exists():
        return str(python)
    print(f"installing {package} {version} into {home} once", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    links = [word for place in (folder, *wheels) for word in ("--find-links", str(place))]
    options = ("--quiet", "--disable-pip-version-check", "--only-binary=:all:", "--prefer-binary", *links)
    for command in (
        (sys.executable, "-m", "venv", "--clear", str(home)),
        (str(python), "-m", "pip", "install", *options, f"{package}=={version}", *requirements),
    ):
        try:
            done = subprocess.run(command, stdout=sys.stderr, check=False, timeout=INSTALL_SECONDS)  # noqa: S603  pip
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ExternalError(f"cannot install {package} {version} into {home}: {error}") from error
        if done.returncode:
            raise ExternalError(f"cannot install {package} {version} into {home}: pip ended with {done.returncode}")
    ready.touch()
    return str(python)
