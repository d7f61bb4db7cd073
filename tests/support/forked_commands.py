"""Runs `kvevents` in forks of a process that has imported it already.

A new process spends 0.2 to 0.5 s of CPU on imports, and tests run hundreds of commands from beginning to end. Tests that start
programs of their own show that each command can be imported in a new process.
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

NOT_PRELOADED: Final = frozenset({"demo", "conform", "export", "sim"})
"""Commands that are imported in forks, because few tests run them or their libraries start threads, which forks lose."""


class CommandServer:
    """A process that forks for each command, and runs one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._python = select_python_variables(os.environ)
        self._socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with child_end:
            self._process = subprocess.Popen([sys.executable, __file__, str(child_end.fileno())], pass_fds=[child_end.fileno()])
        self._answers = self._socket.makefile("r")

    def run(self, arguments: Sequence[str], files: Sequence[IO[bytes]], environment: Mapping[str, str], seconds: float) -> int:
        """Return the exit code of a command whose stdin, stdout and stderr are `files`.

        After `seconds` the command is killed, and `TimeoutExpired` is raised.
        """
        assert select_python_variables(environment) == self._python, "Python reads its variables when it starts: use `Program`"
        requests = json.dumps({"arguments": list(arguments), "environment": dict(environment), "folder": os.getcwd()}).encode()  # noqa: PTH109 - as given
        with self._lock:
            socket.send_fds(self._socket, [len(requests).to_bytes(4, "little")], [file.fileno() for file in files])
            self._socket.sendall(requests)
            number = int(self._answers.readline())
            timeout = threading.Timer(seconds, os.kill, (number, signal.SIGKILL))
            timeout.start()
            try:
                code = int(self._answers.readline())
            finally:
                timeout.cancel()
                timeout.join()
        if code == -signal.SIGKILL:
            raise subprocess.TimeoutExpired(list(arguments), seconds)
        return code

    def close(self) -> None:
        """End the process."""
        self._answers.close()
        self._socket.close()
        self._process.wait()


def select_python_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Python reads when it starts."""
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


@cache
def command_server() -> CommandServer:
    """Return the server of this process, which ends with it."""
    made = CommandServer()
    atexit.register(made.close)
    return made


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each requested command. Return the command in each fork, and None in the server after the last one."""
    while True:
        head, files, _, _ = socket.recv_fds(requests, 4, 3)
        if not head:
            return None
        command = json.loads(requests.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL))
        number = os.fork()
        if not number:
            for standard, file in enumerate(files):
                os.dup2(file, standard)
                os.close(file)
            requests.close()
            return dict(command)
        for file in files:
            os.close(file)
        requests.sendall(b"%d\n" % number)
        requests.sendall(b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which is not on the path of commands
    for command in COMMANDS:
        if isinstance(command, Command) and command.name not in NOT_PRELOADED:
            command.load()
    gc.freeze()  # or the first collection in each fork would copy the pages of all objects
    to_run = serve(socket.socket(fileno=int(sys.argv[1])))
    if to_run is not None:
        os.chdir(to_run["folder"])
        os.environ.clear()
        os.environ.update(to_run["environment"])
        sys.argv = ["kvevents", *to_run["arguments"]]
        sys.exit(main())
