"""Starts `kvevents` in forks of a process that has imported it already.

A new process spends 0.2 to 1 s of CPU on imports, and tests start hundreds of commands. `test_cli_wrong_uses.py`
starts each command in a new process, and `test_docs_blocks.py` those that need a shell.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import IO, Any, Final

from kvevents.cli import run_program
from kvevents.cli.command import Command
from kvevents.cli.program import COMMANDS

NOT_PRELOADED: Final = frozenset({"demo", "conform", "export", "sim"})
"""Commands that are imported in forks, because few tests run them or their libraries start threads, which forks lose."""
PR_SET_CHILD_SUBREAPER: Final = 36


class ForkedProcess:
    """A child of this process, with the methods of `subprocess.Popen` that tests need."""

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid: Final = pid
        self.args: Final = args
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self._lock = threading.Lock()
        self._descriptor = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with self._lock:
            if self.returncode is None:
                signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        with self._lock:
            return self._reap(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the exit code. Raise `TimeoutExpired`."""
        with self._lock:
            code = self._reap(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def _reap(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            if poll.poll(None if timeout is None else timeout * 1000):
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                os.close(self._descriptor)
        return self.returncode


class CommandServer:
    """A process that forks for each command."""

    def __init__(self) -> None:
        # The server forks twice: the command is an orphan then, and the kernel gives orphans to the nearest subreaper.
        assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
        self._lock = threading.Lock()
        self._python = select_python_variables(os.environ)
        self._socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(child_end.fileno())], pass_fds=[child_end.fileno()], stdout=subprocess.DEVNULL
            )
        self._answers = self._socket.makefile("r")

    def start(self, arguments: Sequence[str], files: Sequence[int], environment: Mapping[str, str]) -> ForkedProcess:
        """Start a command whose stdin, stdout and stderr are `files`."""
        assert select_python_variables(environment) == self._python, "Python reads its variables when it starts"
        request = json.dumps({"arguments": list(arguments), "environment": dict(environment), "folder": os.getcwd()}).encode()  # noqa: PTH109 - as given
        with self._lock:
            socket.send_fds(self._socket, [len(request).to_bytes(4, "little")], list(files))
            self._socket.sendall(request)
            return ForkedProcess(int(self._answers.readline()), ["kvevents", *arguments])

    def close(self) -> None:
        """End the process."""
        self._answers.close()
        self._socket.close()
        self._process.wait()


def select_python_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Python reads when it starts, except the one that forks apply."""
    return {name: value for name, value in environment.items() if name.startswith("PYTHON") and name != "PYTHONWARNINGS"}


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
        reading, writing = os.pipe()
        parent = os.fork()
        if not parent:
            number = os.fork()
            if number:
                os.write(writing, b"%d\n" % number)
                os._exit(0)
            for standard, file in enumerate(files):
                os.dup2(file, standard)
            for descriptor in (*files, reading, writing):
                os.close(descriptor)
            requests.close()
            return dict(command)
        os.waitpid(parent, 0)  # now the command is an orphan
        requests.sendall(os.read(reading, 32))
        for descriptor in (*files, reading, writing):
            os.close(descriptor)


def open_standard_files() -> None:
    """Open `sys.stdin` and the others again: a file object remembers from its start whether its file can be sought in."""
    sys.stdin = os.fdopen(0, encoding=sys.stdin.encoding, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding=sys.stdout.encoding, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding=sys.stderr.encoding, errors="backslashreplace", buffering=1, closefd=False)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, which is not on the path of commands
    for command in COMMANDS:
        if isinstance(command, Command) and command.name not in NOT_PRELOADED:
            command.load(command.name)
    gc.freeze()  # or the first collection in each fork would copy the pages of all objects
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    to_run = serve(socket.socket(fileno=int(sys.argv[1])))
    if to_run is not None:
        open_standard_files()
        os.chdir(to_run["folder"])
        os.environ.clear()
        os.environ.update(to_run["environment"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if os.environ.get("PYTHONWARNINGS") == "error":
            warnings.simplefilter("error")
        sys.argv = ["kvevents", *to_run["arguments"]]
        sys.exit(run_program())
