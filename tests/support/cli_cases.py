"""Commands of `kvevents` in processes, and what they write."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from tempfile import TemporaryFile
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import paths
from forked_commands import ForkedProcess, command_server
from kvevents.recording import LiveBatch
from kvevents.testing import Faults, TapePlayer
from kvevents.testing.playlist import Tape
from tools.ports import reserve_adjacent_ports

KVEVENTS = (sys.executable, "-m", "kvevents")


RECORDING = paths.DATA / "vllm-0.32-captures.jsonl.gz"


RUN = "bs32-sha256cbor-seed0"


SECONDS = 60.0
"""Deadline of every wait. Only a failing test waits that long."""


class ProcessResult(NamedTuple):
    """The exit code and the output of a process that has ended."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """Return the environment of this process with `more`, but without the variables that change colours."""
    return {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR"}} | more


def run(*args: object, stdin: bytes = b"") -> ProcessResult:
    """Run `kvevents` with these arguments until it ends."""
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        process = command_server().start([*map(str, args)], [each.fileno() for each in (given, out, err)], environment())
        try:
            code = process.wait(SECONDS)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return ProcessResult(code, out.read().decode(), err.read().decode())


class Lines:
    """Lines that a process has written to a pipe so far. A thread reads them."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.all: list[str] = []
        self._stream = stream
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            with self._changed:
                self.all.append(line.decode().rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, wanted: str | Callable[[list[str]], bool]) -> str:
        """Wait for a line that matches a pattern and return the newest one, or wait until a condition on all lines is true."""
        test = wanted if callable(wanted) else (lambda lines: any(re.search(wanted, line) for line in lines))
        with self._changed:
            self._changed.wait_for(lambda: test(self.all) or self._ended, SECONDS)
            assert test(self.all), f"{wanted} is not in {self.all[-20:]}"
            return next((line for line in reversed(self.all) if not callable(wanted) and re.search(wanted, line)), "")

    def close(self) -> None:
        self._thread.join(SECONDS)
        self._stream.close()


@contextmanager
def interrupts_enabled() -> Iterator[None]:
    """Start children that SIGINT interrupts. A background job of a shell ignores SIGINT, and its children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start(command: Sequence[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with interrupts_enabled():
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(variables)
        )


def _start_fork(args: Sequence[str], variables: Mapping[str, str]) -> ForkedProcess:
    pipes = [os.pipe() for _ in range(3)]
    child_ends = [pipes[0][0], pipes[1][1], pipes[2][1]]
    try:
        process = command_server().start(args, child_ends, variables)
    finally:
        for descriptor in child_ends:
            os.close(descriptor)
    process.stdin = os.fdopen(pipes[0][1], "wb", buffering=0)
    process.stdout, process.stderr = os.fdopen(pipes[1][0], "rb"), os.fdopen(pipes[2][0], "rb")
    return process


class Program:
    """A process under test that runs until it is stopped; a context manager that kills it.

    Without `command` it is `kvevents`, in a fork of a process that has imported it.
    """

    def __init__(self, *args: object, command: Sequence[str] | None = None, **env: str) -> None:
        self.process = (
            _start_fork([*map(str, args)], environment(**env))
            if command is None
            else _start([*command, *map(str, args)], environment(**env))
        )
        assert self.process.stdout
        assert self.process.stderr
        self.out = Lines(self.process.stdout)
        self.err = Lines(self.process.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.end()

    def write(self, line: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> ProcessResult:
        """Send a signal and wait until the process has ended."""
        self.process.send_signal(number)
        return self.end()

    def end(self, seconds: float = SECONDS) -> ProcessResult:
        """Wait until the process has ended, at most so long, and return its result."""
        code = self.process.wait(seconds)
        for stream in (self.out, self.err):
            stream.close()
        if self.process.stdin:
            self.process.stdin.close()
        return ProcessResult(code, "\n".join(self.out.all), "\n".join(self.err.all))


@contextmanager
def play_on_adjacent_ports(tape: Tape | None = None, ranks: int = 1, **kwargs: Any) -> Iterator[list[TapePlayer]]:
    """Play a tape for each rank of an engine: live endpoints at consecutive ports, then replay endpoints at the next ones."""
    source, run_name = (RECORDING, RUN) if tape is None else (tape, None)
    base = reserve_adjacent_ports(2 * ranks)
    with ExitStack() as stack:
        players: list[TapePlayer] = []
        for rank in range(ranks):
            live, replay = (f"tcp://127.0.0.1:{port}" for port in (base + rank, base + ranks + rank))
            player = TapePlayer(source, run=run_name, endpoint=live, replay_endpoint=replay, **kwargs)
            players.append(stack.enter_context(player))
        yield players


@contextmanager
def refuse_connections() -> Iterator[str]:
    """Yield an endpoint that refuses connections. Its port stays reserved, so that nothing listens there later."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{reserved.getsockname()[1]}"


def tape_of(*batches: tuple[bytes, int, bytes] | LiveBatch, **faults: Any) -> TapePlayer:
    """Play a tape with these batches and faults, on any ports."""
    return TapePlayer(batches, faults=Faults(**faults))
