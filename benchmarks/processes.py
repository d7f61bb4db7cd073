"""Processes that exchange lines of JSON. The harness runs trials, and trials run their peers, as such processes.

`python -m benchmarks.processes MODULE.FUNCTION ARGUMENT...` calls a function of `benchmarks.MODULE` with arguments in JSON,
and prints what it returns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from threading import Timer
from types import TracebackType
from typing import Any, Final, Self

from tools.released import CHECKOUT

MAX_SECONDS: Final = 120.0
"""Maximum number of seconds of one trial. A longer trial is killed, and the run ends with a traceback that names the trial."""


class Peer:
    """A process that runs a function, named `MODULE.FUNCTION`."""

    def __init__(self, function: str, *arguments: object) -> None:
        command = [sys.executable, "-m", "benchmarks.processes", function, *map(json.dumps, arguments)]
        # Users have compiled modules; without them a start takes twice as long.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._process: subprocess.Popen[str] = subprocess.Popen(  # noqa: S603 - this interpreter, with fixed arguments
            command, cwd=CHECKOUT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Write one line to the process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")

    def receive(self) -> Any:
        """Wait for the next line of the process. Raise `RuntimeError` if it ends without one."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()} and printed nothing")
        return json.loads(line)

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def close(self) -> None:
        """Close the input of the process, and kill it if it does not end."""
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
    """Return the next line of the parent, sent by `Peer.send`; None if the parent has closed the input."""
    line = sys.stdin.readline()
    return json.loads(line) if line else None


def run(function: str, *arguments: object) -> dict[str, Any]:
    """Return the line that a process prints. Kill the process after `MAX_SECONDS`."""
    with Peer(function, *arguments) as peer:
        alarm = Timer(MAX_SECONDS, peer.kill)
        alarm.start()
        try:
            result: dict[str, Any] = peer.receive()
        finally:
            alarm.cancel()
    return result


def main(function: str, *arguments: str) -> None:
    """Call a function, and print what it returns."""
    module, _, name = function.rpartition(".")
    result = getattr(import_module(f"benchmarks.{module}"), name)(*map(json.loads, arguments))
    if result is not None:
        send_line(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
