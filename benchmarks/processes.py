"""Processes that talk in lines of JSON: the harness runs each trial in one, and a trial its peers."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from threading import Timer
from types import TracebackType
from typing import Any, Final, Self

from tools.released import CHECKOUT

PATIENCE: Final = 120.0
"""Seconds that one trial may take; a longer one is killed, which ends the run with a traceback that names it."""


class Peer:
    """A role of `benchmarks.<module>` in a process of its own."""

    def __init__(self, module: str, *arguments: object, python: str = sys.executable) -> None:
        command = [python, "-m", f"benchmarks.{module}", *map(str, arguments)]
        self._process: subprocess.Popen[str] = subprocess.Popen(  # noqa: S603 - an interpreter, with our own words
            command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    @property
    def pid(self) -> int:
        """As the operating system knows it."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Write one line to the peer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")

    def receive(self) -> Any:
        """Wait for the next line of the peer. Raises `RuntimeError` when it ends without one."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()} and said nothing")
        return json.loads(line)

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def close(self) -> None:
        """End it: its input closes, and if that does not do it, it is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def send_line(message: Any) -> None:
    """Write a line to the parent, which reads it by `Peer.receive`."""
    print(json.dumps(message), flush=True)


def receive_line() -> Any:
    """Return the next line of the parent, sent by `Peer.send`; None when the parent is gone."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def run(module: str, *arguments: object, python: str = sys.executable) -> dict[str, Any]:
    """One line from a process that is run for it."""
    with Peer(module, *arguments, python=python) as peer:
        alarm = Timer(PATIENCE, peer.kill)
        alarm.start()
        try:
            result: dict[str, Any] = peer.receive()
        finally:
            alarm.cancel()
    return result


def free_ports(count: int) -> list[int]:
    """TCP ports that no process uses now."""
    sockets = [socket.create_server(("", 0)) for _ in range(count)]
    ports = [int(each.getsockname()[1]) for each in sockets]
    for each in sockets:
        each.close()
    return ports
