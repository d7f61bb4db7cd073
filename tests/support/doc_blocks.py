"""Code blocks in documents: finds them, and runs their commands as a reader would, with endpoints of this machine."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, closing
from pathlib import Path
from typing import NamedTuple, Self

import paths
from cli_cases import ProcessResult, Program
from service_cases import Client, wait_for

COMMAND_SECONDS = 480.0
"""Longest time of a command that ends by itself. Some take six seconds of CPU, which are minutes on a very busy machine."""
SHELLS = ("sh", "console", "")
"""Languages of blocks with commands. In the last two a command begins with `$ `, and other lines are its output."""
UNTIL_STOPPED = {
    ("serve",): r"listening at (\S+)",
    ("bridge",): r"writes to the",
    ("relay",): r"relaying to",
    ("tail",): r".",
    ("play",): r".",
    ("publish",): r"publishing at",
    ("sim", "run"): r"engine-0/0 publishes",
}
"""Commands that run until they are stopped, each with a pattern of what it prints when it is ready."""
SHELL_SYNTAX = frozenset("|<>&;$*?~`(")
FINITE = ("--check", "--list", "--count", "--help")
"""Options with which these commands end by themselves."""


class Block(NamedTuple):
    """One fenced block."""

    language: str
    text: str
    line: int


class ShellCommand(NamedTuple):
    """One command of a block, on one line, and what the block shows as its output."""

    text: str
    output: str

    @property
    def program(self) -> str:
        """The name of the program; for Python, with `-m` and the module."""
        words = shlex.split(self.text, comments=True)
        words = [word for number, word in enumerate(words) if number or "=" not in word]
        return " ".join(words[:3]) if words[0] == "python" else words[0]


def blocks_of(path: Path) -> list[Block]:
    """Return the fenced blocks of a document, including those in lists."""
    text = path.read_text(encoding="utf-8")
    found = re.finditer(r"^ *```([\w-]*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)
    return [Block(each[1], each[2], text.count("\n", 0, each.start()) + 1) for each in found]


def commands_of(block: Block) -> Iterator[ShellCommand]:
    """Yield the commands of a block, each on one line. An argument in quotes may have several lines."""
    lines = block.text.replace("\\\n", " ").splitlines()
    command, output = "", [""]
    for line in [*lines, ""]:
        if _is_open(command):
            command += "\n" + line
            continue
        text = line.strip()
        starts = line.startswith("$ ") if block.language != "sh" else bool(text) and not text.startswith("#")
        if command and (starts or block.language == "sh"):
            yield ShellCommand(command, "")
            command = ""
        if starts:
            command, output = line.removeprefix("$ "), []
        else:
            output.append(line)
    if command:
        yield ShellCommand(command, "\n".join(output))


def _is_open(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


class CommandRunner:
    """Runs the commands of one document in a folder, one after the other. Servers keep running until the context ends.

    `places` maps addresses and files of the document to their replacements.
    """

    def __init__(self, folder: Path, places: Mapping[str, str]) -> None:
        self._folder = folder
        self._places = dict(places)
        relay, replay = (places.get(f"127.0.0.1:{port}", f"127.0.0.1:{port}") for port in (6557, 6558))
        self._environment = {"KVEVENTS_RELAY_ENDPOINT": f"tcp://{relay}", "KVEVENTS_RELAY_REPLAY_ENDPOINT": f"tcp://{replay}"}
        """Variables that replace the default endpoints of relays."""
        self._stack = ExitStack()
        self._running: list[Program] = []
        folder.mkdir(exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, command: ShellCommand) -> str:
        """Run a command to its end, or until it is ready, and return what it printed on stdout."""
        text = command.text
        for old, new in self._places.items():
            text = text.replace(old, new)
        words = shlex.split(text, comments=True)
        ready = next((line for name, line in UNTIL_STOPPED.items() if tuple(words[1 : 1 + len(name)]) == name), None)
        if words[0] == "kvevents" and ready and not set(FINITE) & set(words):
            return self._start(words[1:], ready)
        if words[:3] == ["kvevents", "plane", "status"] or words[-1].endswith("/readyz"):  # they fail until all is ready
            wait_for(f"{text} to succeed", lambda: self._run(text).code == 0)
        done = self._run(text)
        assert done.code == 0, (text, done.out, done.err)
        return done.out

    def _run(self, text: str) -> ProcessResult:
        """Run a command in a fork, or in a shell if it uses one."""
        service = self._places["http://127.0.0.1:8090"]
        words = shlex.split(text, comments=True)
        if words[0] == "kvevents" and not SHELL_SYNTAX & set(text.partition(" #")[0]):
            with chdir(self._folder), Program(*words[1:], KVEVENTS_SERVICE=service) as program:
                assert program.process.stdin
                program.process.stdin.close()
                return program.end(COMMAND_SECONDS)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        script = text.replace("curl -s ", "curl -sS --fail-with-body ")
        done = subprocess.run(
            ["sh", "-euc", script],  # noqa: S607 - our own documents
            cwd=self._folder,
            env=os.environ | {"PATH": path, "KVEVENTS_SERVICE": service},
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS,
        )
        return ProcessResult(done.returncode, done.stdout, done.stderr)

    def _start(self, words: Sequence[str], ready: str) -> str:
        words = [word for word in words if word != "&"]
        more = ["--port", "0"] if words[0] == "serve" else []
        if "--port" in words:
            words[words.index("--port") + 1], more = "0", []
        if words[0] == "relay":  # relays of a document are alternatives, at the same endpoints
            self.stop()
        with chdir(self._folder):
            program = self._stack.enter_context(Program(*words, *more, **self._environment))
        self._running.append(program)
        lines = program.out if words[0] == "tail" else program.err
        found = re.search(ready, lines.wait(ready))
        if words[0] == "serve" and found:
            self._places["http://127.0.0.1:8090"] = self._places["http://HOST:8090"] = found[1]
            if "--worker" in words or "--nats" in words:  # its engines are running
                with closing(Client(found[1])) as client:
                    wait_for("the service to be ready", lambda: client.get("/readyz").status == 200)
        return ""

    def stop(self) -> None:
        """Interrupt the running programs, as Ctrl-C does, and check that each one ends without an error."""
        for program in reversed(self._running):
            program.process.send_signal(signal.SIGINT)
        for program in reversed(self._running):
            ended = program.end()
            # The last code is that of a program that had reached its own end: the interpreter no longer handles signals then.
            assert ended.code in {0, 130, -signal.SIGINT}, (program.process.args, ended)
            assert "Traceback" not in ended.err
        self._running.clear()


def has_same_shape(shown: str, printed: str) -> bool:
    """Return whether two outputs are equal except for numbers. `...` in the shown one stands for any further lines."""
    expected, found = (
        [re.sub(r"\d[\d,.]*", "N", line).split() for line in text.strip().splitlines()] for text in (shown, printed)
    )
    if ["..."] in expected:
        expected = expected[: expected.index(["..."])]
        found = found[: len(expected)]
    return expected == found


def list_documents() -> list[Path]:
    """Return all documents for users, except the changelog and the ADRs."""
    root = paths.ROOT
    names = (
        "README.md",
        "CONTRIBUTING.md",
        *(f"{each}/README.md" for each in ("benchmarks", "deploy", "examples", "tests", "native/index")),
    )
    pages = [path for path in sorted((root / "docs").rglob("*.md")) if "adr" not in path.parts]
    return [*(root / name for name in names), *pages]
