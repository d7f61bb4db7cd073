"""Runs `kvevents` in forks of a process that has imported it already.

A process of its own imports for 0.2 to 0.5 s of CPU, and tests run hundreds of commands from beginning to end. That a command
can be imported by itself is proven by the programs that tests start and stop.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import IO, Any, Final

from kvevents.cli import main
from kvevents.cli.command import Command
from kvevents.cli.program import COMMANDS

OTHERS: Final = frozenset({"demo", "conform", "export", "sim"})
"""Commands that are imported in forks: their libraries start threads, which a fork would not have, or few tests run them."""


class CommandServer:
    """A process that forks for each command, and runs one at a time."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._python = of_python(os.environ)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        self._answers = self._socket.makefile("r")

    def run(self, arguments: Sequence[str], files: Sequence[IO[bytes]], environment: Mapping[str, str], seconds: float) -> int:
        """Return the exit code of a command whose stdin, stdout and stderr are `files`.

        After `seconds` the command is killed, and `TimeoutExpired` is raised.
        """
        assert of_python(environment) == self._python, "Python reads its variables when it starts: use `Program`"
        asked = json.dumps({"arguments": list(arguments), "environment": dict(environment), "folder": os.getcwd()}).encode()  # noqa: PTH109 - as given
        with self._asking:
            socket.send_fds(self._socket, [len(asked).to_bytes(4, "little")], [file.fileno() for file in files])
            self._socket.sendall(asked)
            number = int(self._answers.readline())
            late = threading.Timer(seconds, os.kill, (number, signal.SIGKILL))
            late.start()
            try:
                code = int(self._answers.readline())
            finally:
                late.cancel()
                late.join()
        if code == -signal.SIGKILL:
            raise subprocess.TimeoutExpired(list(arguments), seconds)
        return code

    def close(self) -> None:
        """End the process."""
        self._answers.close()
        self._socket.close()
        self._process.wait()


def of_python(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Python reads when it starts."""
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


@cache
def command_server() -> CommandServer:
    """Return the server of this process, which ends with it."""
    made = CommandServer()
    atexit.register(made.close)
    return made


def serve(asked: socket.socket) -> dict[str, Any] | None:
    """Fork for each command. Return in each fork the command that it runs, and in the server None at the end."""
    while True:
        head, files, _, _ = socket.recv_fds(asked, 4, 3)
        if not head:
            return None
        command = json.loads(asked.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL))
        number = os.fork()
        if not number:
            for standard, file in enumerate(files):
                os.dup2(file, standard)
                os.close(file)
            asked.close()
            return dict(command)
        for file in files:
            os.close(file)
        asked.sendall(b"%d\n" % number)
        asked.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which commands do not know
    for command in COMMANDS:
        if isinstance(command, Command) and command.name not in OTHERS:
            command.load()
    gc.freeze()  # or the first collection in each fork would copy the pages of all objects
    to_run = serve(socket.socket(fileno=int(sys.argv[1])))
    if to_run is not None:
        os.chdir(to_run["folder"])
        os.environ.clear()
        os.environ.update(to_run["environment"])
        sys.argv = ["kvevents", *to_run["arguments"]]
        sys.exit(main())
