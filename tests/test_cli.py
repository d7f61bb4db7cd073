"""The program around the commands: help, versions, errors. The other CLI tests import `Program` and its friends from here."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import pytest

from kvevents.cli.console import printable
from kvevents.cli.program import COMMANDS
from kvevents.errors import EndpointError
from kvevents.recording import LiveBatch
from kvevents.testing import Faults, TapePlayer
from kvevents.testing.reel import Tape
from ports import quiet_port

KVEVENTS = (sys.executable, "-m", "kvevents.cli")
RECORDING = Path(__file__).parent / "data" / "vllm-0.32-captures.jsonl.gz"
RUN = "bs32-sha256cbor-seed0"
SECONDS = 20.0
"""Deadline of every wait; nothing waits for it unless it fails."""


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """This process's, without what changes colors."""
    return {name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR"}} | more


def run(*args: object, stdin: bytes = b"") -> Ended:
    """`kvevents` with these arguments, from beginning to end."""
    command = [*KVEVENTS, *map(str, args)]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=SECONDS, env=environment(), check=False)
    return Ended(done.returncode, done.stdout.decode(), done.stderr.decode())


class Lines:
    """What a process writes, as it writes it."""

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
        """Wait for a line that matches an expression, or for a condition; the newest matching line."""
        test = wanted if callable(wanted) else (lambda lines: any(re.search(wanted, line) for line in lines))
        with self._changed:
            self._changed.wait_for(lambda: test(self.all) or self._ended, SECONDS)
            assert test(self.all), f"{wanted} not in {self.all[-20:]}"
            return next((line for line in reversed(self.all) if not callable(wanted) and re.search(wanted, line)), "")

    def close(self) -> None:
        self._thread.join(SECONDS)
        self._stream.close()


@contextmanager
def heeding_interrupts() -> Iterator[None]:
    """For children that are to be interrupted: in the background of a shell, SIGINT is ignored, which children inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class Program:
    """A process under test that goes on until it is told to stop."""

    def __init__(self, *args: object, command: Sequence[str] = KVEVENTS, **env: str) -> None:
        argv = [*command, *map(str, args)]
        with heeding_interrupts():
            self.process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(**env)
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

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> Ended:
        """Send a signal and wait for the end."""
        self.process.send_signal(number)
        return self.end()

    def end(self) -> Ended:
        """Wait for the end."""
        code = self.process.wait(SECONDS)
        for stream in (self.out, self.err):
            stream.close()
        if self.process.stdin:
            self.process.stdin.close()
        return Ended(code, "\n".join(self.out.all), "\n".join(self.err.all))


@contextmanager
def adjacent(tape: Tape | None = None, ranks: int = 1, **kwargs: Any) -> Iterator[list[TapePlayer]]:
    """Tapes on ports that follow one another, as an engine's ranks, and their replay endpoints behind them."""
    for _ in range(50):
        players: list[TapePlayer] = []
        try:
            base = quiet_port()
            for rank in range(ranks):
                endpoints = [f"tcp://127.0.0.1:{base + rank}", f"tcp://127.0.0.1:{base + ranks + rank}"]
                source = RECORDING if tape is None else tape
                run_name = RUN if tape is None else None
                players.append(TapePlayer(source, run=run_name, endpoint=endpoints[0], replay_endpoint=endpoints[1], **kwargs))
            break
        except (EndpointError, OverflowError):
            close_all(players)
    try:
        yield players
    finally:
        close_all(players)


def close_all(players: list[TapePlayer]) -> None:
    for player in players:
        player.close()


@contextmanager
def refusing() -> Iterator[str]:
    """An endpoint at which nothing listens, and nobody else will."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"tcp://127.0.0.1:{holder.getsockname()[1]}"


def tape_of(*batches: tuple[bytes, int, bytes] | LiveBatch, **faults: Any) -> TapePlayer:
    """A tape with these batches and faults, on any ports."""
    return TapePlayer(batches, faults=Faults(**faults))


def test_help_names_every_command_with_its_examples() -> None:
    ended = run("--help")
    assert ended.code == 0
    for command in COMMANDS:
        assert re.search(rf"^ +{command.name} +{re.escape(command.summary)}", ended.out, re.MULTILINE)
    assert "kvevents doctor tcp://127.0.0.1:5557" in ended.out


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_help_of_a_command_has_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    from kvevents.cli.program import _parser  # noqa: PLC0415

    with pytest.raises(SystemExit) as ended:
        _parser().parse_args([command, "--help"])
    assert ended.value.code == 0
    examples = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    assert len(examples) >= 3
    for example in examples:
        parts = [part.split("   ")[0].replace("'", "").split() for part in example.strip().split(" | ")]
        ours = [_parser().parse_args(words[1:]).command.name for words in parts if words[0] == "kvevents"]
        assert command in ours


def test_version() -> None:
    assert re.fullmatch(r"kvevents \d+\.\d+\.\d+\S*\n", run("--version").out)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nonsense"],
        ["tail"],
        ["tail", "5557"],
        ["tail", "tcp://127.0.0.1"],
        ["tail", "tcp://127.0.0.1:70000"],
        ["tail", "http://127.0.0.1:5557"],
        ["tail", "127.0.0.1:5557", "--type", "stored,moved"],
        ["tail", "127.0.0.1:5557", "--ranks", "0"],
        ["tail", "127.0.0.1:5557", "--ranks", "5000"],
        ["tail", "127.0.0.1:5557", "--quiet", "--token-ids"],
        ["tail", "127.0.0.1:5557", "--replay", "127.0.0.1:5558", "--no-replay"],
        ["tail", "127.0.0.1:5557", "--idle-timeout", "nan"],
        ["tail", "127.0.0.1:5557", "--duration", "-1"],
        ["play", "run.jsonl", "--speed", "fast"],
        ["publish", "--dialect", "llama-1.0"],
        ["publish", "--rate", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_told_with_code_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from kvevents.cli import main  # noqa: PLC0415

    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    assert "usage: kvevents" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "word"),
    [
        ("relay --endpiont x 127.0.0.1:5557", "kvevents relay: error: there is no option --endpiont; did you mean --endpoint?"),
        (
            "relay --replay x 127.0.0.1:5557",
            "kvevents relay: error: there is no option --replay; did you mean --replay-endpoint?",
        ),
        ("relay --endpiont=x 127.0.0.1:5557", "kvevents relay: error: there is no option --endpiont; did you mean --endpoint?"),
        ("tail --zzz x 127.0.0.1:5557", "kvevents tail: error: there is no option --zzz"),
        ("plane status --ouptut", "kvevents plane status: error: there is no option --ouptut; did you mean --output?"),
        ("sim compare --polcy x", "kvevents sim compare: error: there is no option --polcy; did you mean --policy?"),
        ("tail 5557 -- --zzz", "kvevents tail: error: argument ENDPOINT: invalid endpoint '5557'"),
    ],
)
def test_a_misspelled_option_is_named_before_its_value_is_blamed(
    args: str, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvevents.cli import main  # noqa: PLC0415

    with pytest.raises(SystemExit) as ended:
        main(args.split())
    assert ended.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told == word or told.startswith((f"{word};", f"{word}:"))


def test_an_error_is_one_sentence_and_code_1(tmp_path: Path) -> None:
    ended = run("play", tmp_path / "none.jsonl")
    assert (ended.code, ended.out) == (1, "")
    assert re.fullmatch(r"kvevents: cannot read \S+none\.jsonl: .*No such file.*\n", ended.err)


def test_an_impossible_endpoint_is_one_sentence(capfd: pytest.CaptureFixture[str]) -> None:
    from kvevents.cli import main  # noqa: PLC0415

    assert main(["tail", "ipc:///no/such/directory/kv", "--bind", "--idle-timeout", "0.1"]) == 1
    assert re.search(r"^kvevents: cannot bind ipc:///no/such/directory/kv: .*$", capfd.readouterr().err, re.MULTILINE)


def test_what_peers_say_cannot_drive_the_terminal() -> None:
    assert printable("GPU") == "GPU"
    assert printable("a\x1b[2Jb\nc\x07") == r"a\x1b[2Jb\nc\x07"
    assert printable("Gerät 机") == "Gerät 机"
